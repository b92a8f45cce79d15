"""Invariant 7: a request ends exactly once, and until then its client gets every token once, the first one once.

Also that time does not pass by: a tick ends whatever is overdue by then, and a tick comes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdbus.connector.timers import Timers

from .. import events as ev
from .checks import Check, Report
from .facts import Ended, Facts
from .turns import Turn

REASONS = ("stop", "length", "cancelled", "error")
IN_TIME = "6: every waiting state has a deadline"
RULE = "7: a request ends exactly once"


@dataclass(slots=True)
class Open:
    """A request that has not ended."""

    deadline_ns: int
    first_token: bool = False
    tokens: int = 0


class RequestCheck(Check):
    def __init__(self, report: Report, facts: Facts, *, whole: bool = True) -> None:
        """`whole`: what begins is all that there is."""
        super().__init__(report)
        self._facts = facts
        self._whole = whole
        self.deadlines: Timers[bytes] = Timers()
        self.ended: Counter[str] = Counter()  # by reason
        self.open: dict[bytes, Open] = {}
        self._known: dict[bytes, None] = {}
        self._more: dict[int, int] = {}  # by sequence: tokens beyond one in the step that ended last
        self.events = {ev.GenerateAsked: self._asked, ev.StepEnded: self._step_ended}
        self.effects = {
            ev.TakeFirstToken: self._first_token,
            ev.EmitToken: self._token,
            ev.EndRequest: self._end,
        }
        self.after = {ev.Tick: self._ticked}

    def _asked(self, turn: Turn, event: ev.GenerateAsked) -> None:
        if event.request in self._known:
            self.report(turn, RULE, f"request {event.request.hex()} begins a second time")
        self._known[event.request] = None
        deadline = turn.now_ns + event.deadline_ns
        self.open[event.request] = Open(deadline)
        self.deadlines.set(event.request, deadline)

    def _first_token(self, turn: Turn, effect: ev.TakeFirstToken) -> None:
        found = self._found(turn, effect.request, "is given a first token")
        if found is None:
            return
        if found.first_token or found.tokens:
            self.report(
                turn, "R8", f"request {effect.request.hex()} is given a first token after {found.tokens} tokens"
            )
        found.first_token = True
        found.tokens += 1

    def _token(self, turn: Turn, effect: ev.EmitToken) -> None:
        found = self.open.get(effect.request) or self._found(turn, effect.request, "is given a token")
        if found is not None:
            found.tokens += 1 + self._more.get(effect.seq, 0)

    def _step_ended(self, turn: Turn, event: ev.StepEnded) -> None:
        self._more = {row.seq: row.tokens - 1 for row in event.rows if row.tokens != 1}

    def _end(self, turn: Turn, effect: ev.EndRequest) -> None:
        found = self._found(turn, effect.request, "ends")
        if found is None:
            return
        del self.open[effect.request]
        self.deadlines.clear(effect.request)
        self.ended[effect.reason] += 1
        self._facts.ended[effect.request] = Ended(effect.reason, effect.completion_tokens)
        name = effect.request.hex()
        if effect.completion_tokens != found.tokens:
            self.report(turn, RULE, f"request {name} ends with {effect.completion_tokens} tokens of {found.tokens}")
        if effect.reason not in REASONS or (effect.reason == "error") is not bool(effect.code):
            self.report(
                turn, RULE, f"request {name} ends as {effect.reason!r} with code {effect.code!r}: nobody learns how"
            )

    def _ticked(self, turn: Turn) -> None:
        while (request := self.deadlines.pop_due(turn.now_ns)) is not None:
            if request in self.open:
                self.report(
                    turn, "6: every waiting state has a deadline", f"request {request.hex()} outlives its deadline"
                )

    def _found(self, turn: Turn, request: bytes, what: str) -> Open | None:
        found = self.open.get(request)
        if found is None and (self._whole or request in self._known):
            before = "after its end" if request in self._known else "without having begun"
            self.report(turn, RULE, f"request {request.hex()} {what} {before}")
        return found
