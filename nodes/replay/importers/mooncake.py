"""Mooncake traces: a JSON object a line, `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

The size of a block stands nowhere in the file. It is 512 tokens where that fits every row, as in the public traces,
else the one that the lengths allow: a prompt of n tokens with k ids has blocks of ceil(n / k) to (n - 1) / (k - 1).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pdbus.bus.errors import ConfigError

from ..workload import Asked, Workload
from .numbers import number, shown, tokens
from .rows import Row, in_ns, workload
from .source import BadLine, CutLine, Importer, Line, Source

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length")
MS = 1_000_000


def matches(head: str) -> bool:
    first = head.lstrip().partition("\n")[0]
    return first.startswith("{") and '"input_length"' in first and '"requests"' not in first


def read(source: Source) -> Workload:
    """Raises ConfigError naming file and line."""
    rows = in_ns(list(source.parsed(_row)), source, "milliseconds")
    return workload(source.path.name, rows, source, _block_tokens(rows, source))


def _row(line: Line) -> Row:
    fields = _object(line.text)
    at = number(fields.get("timestamp"), "timestamp", "milliseconds since the beginning, a finite number")
    prompt, answer = (tokens(fields.get(name), name) for name in FIELDS[1:])
    return Row(line.number, at, Asked(0, prompt, answer, _hash_ids(fields.get("hash_ids"))))


def _object(text: str) -> dict[str, Any]:
    wanted = f"give an object a line, with {', '.join(FIELDS)} and hash_ids"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        problem = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
        raise CutLine(f"is no JSON ({problem}); {wanted}") from None
    if not isinstance(value, dict):
        raise BadLine(f"is {shown(value)}; {wanted}")
    return value


def _hash_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise BadLine(f"hash_ids is {shown(value)}; give a list of whole numbers from 0 on, one for each block")
    return tuple(value)


MOONCAKE = Importer("mooncake", "JSON lines of Mooncake", matches, read)


# ---------------------------------------------------------------- the size of a block


def _block_tokens(rows: Sequence[Row], source: Source) -> int:
    rows = [row for row in rows if row.asked.hash_ids]
    if not rows:
        return 0
    least = max(-(-row.asked.input_tokens // len(row.asked.hash_ids)) for row in rows)
    most = min((_most(row.asked) for row in rows if len(row.asked.hash_ids) > 1), default=max(least, BLOCK_TOKENS))
    if least <= BLOCK_TOKENS <= most:
        return BLOCK_TOKENS
    power = 1 << (least - 1).bit_length()
    if least > most:
        raise _mismatch(rows, source)
    return power if power <= most else least


def _most(asked: Asked) -> int:
    return (asked.input_tokens - 1) // (len(asked.hash_ids) - 1)


def _mismatch(rows: Sequence[Row], source: Source) -> ConfigError:
    for row in rows:
        length, count = row.asked.input_tokens, len(row.asked.hash_ids)
        needed = -(-length // BLOCK_TOKENS)
        if needed != count:
            problem = f"hash_ids has {count} ids; a prompt of {length} tokens has {needed} blocks of {BLOCK_TOKENS}"
            return source.error(f"{problem}, and no other size of a block fits all lines", row.line)
    raise AssertionError("512 fits all rows")


# ---------------------------------------------------------------- writing


def write(workload: Workload, path: Path) -> None:
    """Writes the Mooncake form, packed with gzip when the name ends in .gz. Sessions and think times are not in it.
    Raises ConfigError when it cannot be written."""
    with _opened(path) as file:
        for asked in workload.requests:
            whole, rest = divmod(asked.at_ns, MS)
            row: dict[str, Any] = {"timestamp": asked.at_ns / MS if rest else whole}
            row |= {"input_length": asked.input_tokens, "output_length": asked.output_tokens}
            file.write(json.dumps({**row, "hash_ids": list(asked.hash_ids)}) + "\n")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "wt", encoding="utf-8") as packed:
                yield packed
        else:
            with path.open("w", encoding="utf-8") as plain:
                yield plain
    except OSError as e:
        raise ConfigError(str(path), f"cannot be written: {e.strerror}") from None
