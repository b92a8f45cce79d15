"""Invariant 6 where no machine can see it: time goes forward, and a tick comes when one is due."""

from __future__ import annotations

from typing import Any

from pdbus.connector.timers import Timers
from pdbus.connector.vllm.core import PairCore

from ..core import NodeCore
from .checks import Check, Report
from .turns import Turn

WAKE_NS = 1_000_000_000  # how long after a deadline, while other things happen, its tick may be missing
LOOK_NS = WAKE_NS // 10
RULE = "6: every waiting state has a deadline"


class ClockCheck(Check):
    def __init__(self, report: Report, *timers: Timers[Any]) -> None:
        """`timers` hold what is due when, as the other checks follow it."""
        super().__init__(report)
        self.core: NodeCore | PairCore | None = None  # run again, and still the same
        self._timers = timers
        self._now = self._look_at = 0
        self._late_since: int | None = None  # from when on the node is awake and its tick is due
        self._told = False

    def every_turn(self, turn: Turn) -> None:
        now = turn.now_ns
        if now < self._now:
            self.report(turn, "the clock", f"time goes back by {self._now - now} ns")
        self._now = now
        if now >= self._look_at:
            self._look_at = now + LOOK_NS
            self._look(turn, now)

    def _look(self, turn: Turn, now: int) -> None:
        due = min((at for timers in self._timers if (at := timers.next_deadline()) is not None), default=None)
        if due is None:
            self._late_since = None
            return
        asks_for = self.core.next_deadline() if self.core is not None else due
        if asks_for is None or asks_for > due:
            when = f"{(asks_for - due) / 1e9:.1f} s after" if asks_for is not None else "never, not even at"
            self._tell(turn, f"the core asks to be woken {when} what is due next: a wake-up is lost")
        if now <= due:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > WAKE_NS:
            self._tell(turn, f"the tick that was due {(now - due) / 1e9:.1f} s ago has not come")

    def _tell(self, turn: Turn, problem: str) -> None:
        if not self._told:
            self._told = True
            self.report(turn, RULE, problem)
