"""What this node said to others and heard from them: nobody may have heard what was not said."""

from __future__ import annotations

from typing import Any

from pdbus.bus.hashing import digest
from pdbus.bus.messages import Message
from pdbus.bus.wire import encode

from .. import events as ev
from ..recording import with_payloads
from .checks import Check, Report
from .facts import Facts
from .turns import Turn

BETWEEN_NODES = ("welcome", "agent", "prefill.", "transfer.", "lease.")  # what only a node's core says


class MessageCheck(Check):
    def __init__(self, report: Report, facts: Facts) -> None:
        super().__init__(report)
        self._facts = facts
        self.events = {ev.MessageCame: self._came}
        self.effects = {ev.Send: self._sent}

    def _came(self, turn: Turn, event: ev.MessageCame[Any]) -> None:
        if event.message.KIND.startswith(BETWEEN_NODES):
            heard = self._facts.heard.setdefault((event.header.from_, event.header.from_inc), {})
            heard.setdefault(name_of(event.message), turn.sequence)

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        if effect.message.KIND.startswith(BETWEEN_NODES):
            self._facts.sent[name_of(effect.message)] = None


def name_of(message: Message) -> bytes:
    """A message by what it says, the same on both sides: without payloads, which each hides under a key of its own."""
    return digest(message.KIND.encode() + encode(with_payloads(message, _same)))


def _same(request: bytes, payload: bytes) -> bytes:
    return b""
