"""Azure's traces of LLM inference: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Nothing tells of prefixes."""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from typing import Any

from ..workload import Asked, Workload
from .numbers import number, shown, tokens
from .rows import Row, in_ns, workload
from .source import BadLine, CutLine, Importer, Line, Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
GIVE_TIME = "a date such as 2023-11-16 18:15:46.6805900, or seconds"
NS = 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


def matches(head: str) -> bool:
    names = head.partition("\n")[0].lower()
    return COLUMNS[1].lower() in names or COLUMNS[2].lower() in names


def read(source: Source) -> Workload:
    """Raises ConfigError naming file and line."""
    table = _Table()
    rows = list(source.parsed(table.row))
    return workload(source.path.name, rows if table.dated else in_ns(rows, source, "seconds"), source)


AZURE = Importer("azure", "CSV of Azure (TIMESTAMP, ContextTokens, GeneratedTokens)", matches, read)


class _Table:
    """The columns, from the first line, and whether times are dates, from the second."""

    def __init__(self) -> None:
        self.dated: bool | None = None
        self._columns: list[int] = []

    def row(self, line: Line) -> Row | None:
        cells = _cells(line.text)
        if not self._columns:
            self._columns = _columns(cells)
            return None
        if max(self._columns) >= len(cells) or not cells[-1]:
            raise CutLine(f"has {sum(map(bool, cells))} values; give {', '.join(COLUMNS)}")
        time, prompt, answer = (cells[column] for column in self._columns)
        asked = Asked(0, tokens(_number(prompt), COLUMNS[1]), tokens(_number(answer), COLUMNS[2]))
        return Row(line.number, self._time(time), asked)

    def _time(self, text: str) -> int | float:
        date = _DATE.fullmatch(text)
        if self.dated is None:
            self.dated = date is not None
        if self.dated and date is None:
            raise BadLine(f"{COLUMNS[0]} is {shown(text or None)}; give a date as the lines before do")
        if date is not None and not self.dated:
            raise BadLine(f"{COLUMNS[0]} is {shown(text)}; give seconds as the lines before do")
        return _ns(date) if date is not None else number(_number(text), COLUMNS[0], GIVE_TIME)


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.strip("\ufeff\r\n")]), [])]
    except csv.Error as e:
        raise BadLine(f"is no CSV ({e}); give {', '.join(COLUMNS)}") from None


def _columns(names: list[str]) -> list[int]:
    lower = [name.lower() for name in names]
    missing = [name for name in COLUMNS if name.lower() not in lower]
    if missing:
        raise BadLine(f"names no column {missing[0]}; give {', '.join(COLUMNS)}")
    return [lower.index(name.lower()) for name in COLUMNS]


def _number(text: str) -> Any:
    """An int or a float when it is one; None when it is empty; else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def _ns(date: re.Match[str]) -> int:
    """Nanoseconds since 1970; without an offset it is UTC."""
    day, time, fraction, zone = date.groups()
    offset = "+00:00" if zone in (None, "Z") else zone
    try:
        whole = datetime.fromisoformat(f"{day}T{time}{offset}") - EPOCH
    except ValueError as e:
        raise BadLine(f"{COLUMNS[0]} is {shown(date[0])}: {e}; give {GIVE_TIME}") from None
    return (whole.days * 86_400 + whole.seconds) * NS + int((fraction or "0").ljust(9, "0"))
