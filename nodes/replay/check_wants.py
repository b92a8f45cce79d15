"""On a vLLM decode server: of each request it is told once whether its KV is there, and that it is only after exactly
its lease was confirmed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pdbus.bus.messages import LeaseReleased
from pdbus.connector.timers import Timers
from pdbus.connector.vllm.events import KvWanted, RequestLeft

from .. import events as ev
from .checks import Check, Report
from .turns import Turn

BY_CLAIM = "R1: valid only by claim"
ONCE = "7: a request ends exactly once"
IN_TIME = "6: every waiting state has a deadline"
SETTLED = {"kv.fetched": "fetched", "attempt.failed": "computed there"}


class WantCheck(Check):
    def __init__(self, report: Report, fetch_ns: int) -> None:
        """`fetch_ns`: how long a fetch may take."""
        super().__init__(report)
        self.ended: Counter[str] = Counter()
        self.deadlines: Timers[bytes] = Timers()
        self._fetch_ns = fetch_ns
        self._ids: dict[str, bytes] = {}  # by vLLM's name for it
        self._waiting: dict[bytes, None] = {}
        self.events = {KvWanted: self._wanted, RequestLeft: self._left}
        self.effects = {ev.Publish: self._published}
        self.after = {ev.Tick: self._ticked}

    def _wanted(self, turn: Turn, event: KvWanted) -> None:
        if event.request not in self._ids:
            self._ids[event.request] = event.id
            self._waiting[event.id] = None
            self.deadlines.set(event.id, turn.now_ns + self._fetch_ns)

    def _left(self, turn: Turn, event: RequestLeft) -> None:
        id = self._ids.pop(event.request, None)
        if id is not None and id in self._waiting:
            self._settle(id, "cancelled")

    def _published(self, turn: Turn, effect: ev.Publish) -> None:
        how = SETTLED.get(effect.event)
        if how is None:
            return
        name: Any = effect.data["request"]
        if bytes.fromhex(name) not in self._waiting:
            self.report(turn, ONCE, f"request {name} is told {effect.event} without waiting for it")
            return
        if effect.event == "kv.fetched" and not _confirms(turn, name):
            self.report(turn, BY_CLAIM, f"KV of request {name} counts, but nothing confirms its lease")
        self._settle(bytes.fromhex(name), how)

    def _settle(self, id: bytes, how: str) -> None:
        del self._waiting[id]
        self.deadlines.clear(id)
        self.ended[how] += 1

    def _ticked(self, turn: Turn) -> None:
        while (id := self.deadlines.pop_due(turn.now_ns)) is not None:
            self.report(turn, IN_TIME, f"request {id.hex()} waits for KV beyond its time")


def _confirms(turn: Turn, request: str) -> bool:
    message = turn.event.message if isinstance(turn.event, ev.MessageCame) else None
    return isinstance(message, LeaseReleased) and message.valid and message.try_.request.hex() == request
