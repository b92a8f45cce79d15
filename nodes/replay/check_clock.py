"""Invariant 6 where no machine can see it: time goes forward, and a tick comes when one is due."""

from __future__ import annotations

from typing import Any

from pdbus.connector.timers import Timers

from .checks import Check, Report
from .turns import Turn

WAKE_NS = 1_000_000_000  # how long after a deadline, while other things happen, its tick may be missing
RULE = "6: every waiting state has a deadline"


class ClockCheck(Check):
    def __init__(self, report: Report, *timers: Timers[Any]) -> None:
        super().__init__(report)
        self._timers = timers
        self._now = 0
        self._late_since: int | None = None  # from when on the node is awake and its tick is due
        self._told = False

    def every_turn(self, turn: Turn) -> None:
        now = turn.now_ns
        if now < self._now:
            self.report(turn, "the clock", f"time goes back by {self._now - now} ns")
        self._now = now
        due = min((at for timers in self._timers if (at := timers.next_deadline()) is not None), default=None)
        if due is None or now <= due:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > WAKE_NS and not self._told:
            self._told = True
            self.report(turn, RULE, f"the tick that was due {(now - due) / 1e9:.1f} s ago has not come")
