"""Agent sessions as kv-cache-tester of Weka records them: a JSON file a session, or a folder of them.

`t` counts seconds from the session's start; sessions of a folder start together. A request carries its whole prompt:
what it shares with those before stands in `hash_ids`, one for each full block of `block_size` tokens. With
`hash_id_scope` local, ids of different files say nothing of each other. An entry with `requests` of its own is another
agent that the session started; its times and ids are those of the file.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from ..workload import Asked, Workload
from .numbers import number, shown, to_ns, tokens
from .prefixes import Prefixes
from .rows import Row, in_ns, workload
from .source import BadLine, Importer, Source

BLOCK_TOKENS_MAX = 1 << 20
SCOPES = ("local", "global")
PATTERNS = ("*.json", "*.json.gz")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def matches(head: str) -> bool:
    return head.lstrip().startswith("{") and '"requests"' in head and '"block_size"' in head


def read(source: Source) -> Workload:
    """Raises ConfigError naming file and field."""
    path = source.path
    sessions = _Sessions(source)
    for file in files_in(path) if path.is_dir() else [path]:
        sessions.add(Source(file))
    mismatched = sessions.prefixes.mismatched
    if mismatched:
        source.notes.append(f"{path}: {mismatched} prompts have fewer or more ids than blocks; filled up or cut")
    rows = in_ns(sessions.rows, source, "seconds")
    rows.sort(key=lambda row: row.at)
    return workload(path.name, rows, source, sessions.block_tokens)


WEKA = Importer("weka", "JSON of agent sessions (Weka)", matches, read)


class _Sessions:
    """Rows of all files, their ids made one workload's."""

    def __init__(self, source: Source) -> None:
        self.rows: list[Row] = []
        self.prefixes = Prefixes()
        self.block_tokens = 0
        self._source = source
        self._sessions = self._files = 0
        self._scope: Hashable = ""

    def add(self, file: Source) -> None:
        self._files += 1
        try:
            top = _session(file)
            scope = top.get("hash_id_scope", SCOPES[0])
            if scope not in SCOPES:
                raise BadLine(f"hash_id_scope is {shown(scope)}; give {' or '.join(SCOPES)}")
            self._scope = self._files if scope == SCOPES[0] else SCOPES[1]
            self._check_block(top.get("block_size"))
            self._add(top, "requests")
        except BadLine as e:
            raise file.error(str(e)) from None

    def _check_block(self, size: Any) -> None:
        if type(size) is not int or not 1 <= size <= BLOCK_TOKENS_MAX:
            raise BadLine(f"block_size is {shown(size)}; give the tokens of a block, 1 to {BLOCK_TOKENS_MAX}")
        if self.block_tokens not in (0, size):
            raise BadLine(f"block_size is {size}, in the files before it is {self.block_tokens}; give sessions alike")
        self.block_tokens = size

    def _add(self, agent: dict[str, Any], where: str) -> None:
        self._sessions += 1
        session, last = self._sessions, float("-inf")
        for name, entry in _entries(agent, where):
            if "requests" in entry:
                self._add(entry, f"{name}.requests")
                continue
            row = self._row(entry, name, session)
            if row.at < last:
                self._source.notes.append(f"{self._source.path}: {name}.t is before that of the request before it")
            last = row.at
            self.rows.append(row)

    def _row(self, entry: dict[str, Any], name: str, session: int) -> Row:
        at = number(entry.get("t"), f"{name}.t", "seconds since the session began, a finite number")
        think = number(entry.get("think_time") or 0, f"{name}.think_time", "seconds, a finite number")
        prompt, answer = (tokens(entry.get(key), f"{name}.{key}") for key in ("in", "out"))
        named = entry.get("hash_ids") or []
        if not isinstance(named, list) or not all(type(item) is int for item in named):
            raise BadLine(f"{name}.hash_ids is {shown(named)}; give a list of whole numbers, one for each block")
        ids = self.prefixes.ids(((self._scope, item) for item in named), prompt, self.block_tokens)
        return Row(0, at, Asked(0, prompt, answer, ids, session, max(0, to_ns(think, "seconds"))))


def _session(file: Source) -> dict[str, Any]:
    try:
        value = json.loads(file.all())
    except json.JSONDecodeError as e:
        raise BadLine(f"line {e.lineno}, column {e.colno}: is no JSON ({e.msg}): is it cut? Give it whole") from None
    except (ValueError, RecursionError) as e:
        raise BadLine(f"is no JSON ({e})") from None
    if not isinstance(value, dict) or "requests" not in value:
        raise BadLine("is no agent session; give an object with block_size and requests")
    return value


def _entries(agent: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = agent["requests"]
    if not isinstance(entries, list):
        raise BadLine(f"{where} is {shown(entries)}; give a list of requests")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadLine(f"{where}[{i}] is {shown(entry)}; give an object with t, in, out and hash_ids")
        yield f"{where}[{i}]", entry
