"""A prefill node where attempts keep failing is left alone as long as was said, then asked for one trial at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdbus.bus.messages import Agent, PrefillRequest

from .. import events as ev
from .checks import Check, Report
from .turns import Turn

RULE = "an open circuit is left alone"


@dataclass(slots=True)
class Open:
    """What was said of a node. `trial` is the request that is to decide, '' before."""

    until_ns: int
    trial: str = ""


class CircuitCheck(Check):
    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._open: dict[str, Open] = {}  # by node
        self._agents: dict[str, tuple[bytes, int]] = {}  # by node: incarnation and epoch
        self._asked: dict[tuple[bytes, int], None] = {}  # tries: a request that is repeated is not a new one
        self.events = {ev.MessageCame: self._heard}
        self.effects = {ev.Publish: self._published, ev.Send: self._sent}

    def _heard(self, turn: Turn, event: ev.MessageCame[Any]) -> None:
        """Another life or epoch of the node is another circuit."""
        if isinstance(event.message, Agent):
            node, agent = event.header.from_, (event.header.from_inc, event.message.epoch)
            if self._agents.get(node) != agent:
                self._agents[node] = agent
                self._open.pop(node, None)

    def _published(self, turn: Turn, effect: ev.Publish) -> None:
        data: Any = effect.data
        match effect.event:
            case "circuit.opened":
                self._open[data["node"]] = Open(turn.now_ns + data["for_ms"] * 1_000_000)
            case "circuit.closed":
                self._open.pop(data["node"], None)
            case "attempt.failed" | "ended":
                for circuit in self._open.values():
                    if circuit.trial == data["request"]:
                        circuit.trial = ""

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        message = effect.message
        if not isinstance(message, PrefillRequest):
            return
        attempt, name = (message.try_.request, message.try_.attempt), message.try_.request.hex()
        circuit = self._open.get(effect.to)
        if attempt not in self._asked and circuit is not None:
            if turn.now_ns < circuit.until_ns:
                left_ms = (circuit.until_ns - turn.now_ns) // 1_000_000
                self.report(turn, RULE, f"{effect.to} is asked for request {name} {left_ms} ms too early")
            elif circuit.trial:
                self.report(turn, RULE, f"{effect.to} is asked for request {name} beside its trial {circuit.trial}")
            circuit.trial = name
        self._asked[attempt] = None
