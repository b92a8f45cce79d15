"""Results for people and for tools: plain dicts as tables and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdbus.bus import wire

from .printable import printable

Row = Mapping[str, Any]

PIPE_COLUMNS = 200  # where no terminal says how wide it is: a line stays a line for grep


def output() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(wire.to_json(value).decode() + "\n")
    sys.stdout.flush()


def print_result(title: str, result: Row, console: Console | None = None) -> None:
    """Scalars as one table of names and values, every list of dicts as a table of its own."""
    console = console or output()
    console.print(f"[bold]{escape(title)}[/bold]")
    lists = {name: value for name, value in result.items() if _is_rows(value)}
    scalars = {name: value for name, value in result.items() if name not in lists}
    if scalars:
        console.print(pairs(scalars))
    for rows in lists.values():
        console.print(table(rows))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def pairs(values: Row) -> Table:
    """Names and values, a line each."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        grid.add_row(name, escape(show(value, name)))
    return grid


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> Table:
    """Dicts as rows. Without `columns`, those of the first row in its order; one that is empty in all rows is left out.

    In a narrow terminal headings break between their words and values fold: nothing is cut off.
    """
    grid = Table(box=None, header_style="dim", pad_edge=False)
    shown = [c for c in columns or tuple(rows[0]) if any(show(row.get(c, ""), c) for row in rows)]
    for name in shown:
        numeric = all(isinstance(row.get(name, 0), int | float) for row in rows)
        grid.add_column(name.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(escape(show(row.get(name, ""), name)) for name in shown))
    return grid


def show(value: Any, name: str = "") -> str:
    """A value as a person reads it; `name` tells bytes, whose unit is chosen to fit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (name == "bytes" or name.endswith("_bytes")):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value)
    return printable(str(value))


def size(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
