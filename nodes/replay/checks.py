"""What all checks of one node's turns have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .turns import Turn

Report = Callable[[Turn, str, str], None]  # the turn, the rule that is broken, how
Handler = Callable[[Turn, Any], None]
After = Callable[[Turn], None]


class Check:
    """One kind of invariant. It hears the events and effects that it names, in order, and is asked after the turns of
    some events."""

    events: Mapping[type[Any], Handler] = {}
    effects: Mapping[type[Any], Handler] = {}
    after: Mapping[type[Any], After] = {}

    def __init__(self, report: Report) -> None:
        self.report = report


class Checks:
    """All checks of one node, told of its turns."""

    def __init__(self, checks: list[Check]) -> None:
        self._events = _merged(check.events for check in checks)
        self._effects = _merged(check.effects for check in checks)
        self._after = _merged(check.after for check in checks)

    def turn(self, turn: Turn, *, whole: bool = True) -> None:
        """`whole`: none of its effects is missing."""
        for hear in self._events.get(type(turn.event), ()):
            hear(turn, turn.event)
        for effect in turn.effects:
            for hear in self._effects.get(type(effect), ()):
                hear(turn, effect)
        if whole:
            for ask in self._after.get(type(turn.event), ()):
                ask(turn)


def _merged(maps: Any) -> dict[type[Any], list[Any]]:
    merged: dict[type[Any], list[Any]] = {}
    for handlers in maps:
        for type_, handler in handlers.items():
            merged.setdefault(type_, []).append(handler)
    return merged
