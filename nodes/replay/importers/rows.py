"""From rows as they stand in a file to a workload: times from 0 on and in order, at least one token each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..workload import Asked, Workload
from .numbers import SPAN_NS_MAX, to_ns, unit_of
from .source import Source


class Row(NamedTuple):
    """A request, and where it stands. `at` is in the file's unit, since whatever it counts from."""

    line: int
    at: int | float
    asked: Asked


def in_ns(rows: Sequence[Row], source: Source, unit: str) -> list[Row]:
    """The rows with `at` in nanoseconds. Tells when they count in another unit than `unit`."""
    found = unit_of([row.at for row in rows], unit)
    if found != unit:
        source.notes.append(f"{source.path}: times are {found} since 1970, not {unit} since the beginning")
    return [row._replace(at=to_ns(row.at, found)) for row in rows]


def workload(name: str, rows: Iterable[Row], source: Source, block_tokens: int = 0) -> Workload:
    """The rows, `at` in nanoseconds, as a workload that begins at 0. Raises ConfigError when there are none, or when
    times lie years apart."""
    rows = list(rows)
    if not rows:
        raise source.error("holds no request")
    begin = min(row.at for row in rows)
    for row in rows:
        if row.at - begin > SPAN_NS_MAX:
            years = (row.at - begin) / SPAN_NS_MAX
            raise source.error(f"lies {years:.0f} years after the first request: are units mixed?", row.line)
    earlier = sum(b.at < a.at for a, b in pairwise(rows))
    if earlier:
        source.notes.append(f"{source.path}: {earlier} requests stand after a later one; sorted by time")
        rows.sort(key=lambda row: row.at)
    requests = [_timed(row.asked, int(row.at - begin)) for row in rows]
    empty = sum(row.asked.output_tokens < 1 or row.asked.input_tokens < 1 for row in rows)
    if empty:
        source.notes.append(f"{source.path}: {empty} requests have a prompt or an answer of no tokens; taken as one")
    return Workload(name, requests, block_tokens, tuple(source.notes))


def _timed(asked: Asked, at_ns: int) -> Asked:
    return asked._replace(
        at_ns=at_ns, input_tokens=max(1, asked.input_tokens), output_tokens=max(1, asked.output_tokens)
    )
