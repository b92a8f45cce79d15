"""Moments of several nodes, put into one order by clock and cause, and shown as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from .words import colours_of


class Moment(NamedTuple):
    """One thing that happened on one node. `said` and `heard` name the message that it sent, or that came."""

    at_ns: int  # on the common clock
    node: str
    sequence: int
    what: str
    details: str = ""
    said: bytes = b""
    heard: bytes = b""


def in_order(stories: Sequence[Sequence[Moment]]) -> list[Moment]:
    """Each node's moments in its own order; between nodes by the clock, but nothing is heard before it is said: clocks
    of several machines may be apart by more than a message takes."""
    left = [list(reversed(story)) for story in stories if story]
    unsaid = Counter(moment.said for story in stories for moment in story if moment.said)
    ordered: list[Moment] = []
    while left:
        ready = [story for story in left if not unsaid[story[-1].heard]] or left
        story = min(ready, key=lambda s: (s[-1].at_ns, s[-1].node))
        moment = story.pop()
        ordered.append(moment)
        if moment.said:
            unsaid[moment.said] -= 1
        left = [s for s in left if s]
    return ordered


def merged(moments: Sequence[Moment]) -> list[Moment]:
    """Runs of the same on one node, as the tokens of an answer are, become one."""
    out: list[Moment] = []
    count = 1
    for moment in moments:
        same = out and (out[-1].node, out[-1].what.partition(" x ")[0]) == (moment.node, moment.what)
        if same and moment.what in MANY:
            count += 1
            out[-1] = out[-1]._replace(what=f"{moment.what} x {count}")
        else:
            count = 1
            out.append(moment)
    return out


MANY = ("EmitToken", "CreditGiven", "Got token", "Sent credit")


def table(title: str, moments: Sequence[Moment]) -> Table:
    """Node, record, milliseconds since the first moment, what it was, its details."""
    grid = Table(title=escape(title), title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("node", "record", "+ms", "what"):
        grid.add_column(column, justify="right" if column in ("record", "+ms") else "left", no_wrap=True)
    grid.add_column("details", overflow="fold", style="dim")
    colours = colours_of(moment.node for moment in moments)
    for m in moments:
        passed = f"{(m.at_ns - moments[0].at_ns) / 1e6:.3f}"
        grid.add_row(f"[{colours[m.node]}]{escape(m.node)}[/]", str(m.sequence), passed, escape(m.what), m.details)
    return grid
