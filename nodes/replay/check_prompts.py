"""Invariant 4 on a vLLM prefill server: what a lease announces has been copied out of vLLM's memory, and is nobody
else's."""

from __future__ import annotations

from typing import Any

from pdbus.bus.messages import PrefillRequest
from pdbus.bus.wire import unpack_u32
from pdbus.connector.vllm.events import PromptCame, PromptSaved

from .. import events as ev
from .check_leases import Key, key_of
from .checks import Check, Report
from .facts import announcements
from .turns import Turn

RULE = "4: KV counts only when it is valid"
NOT_GIVEN = "2: no block that may still be written is given to anyone"


class PromptCheck(Check):
    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._requests: dict[bytes, str] = {}  # by pair: vLLM's name of the first request that came with it
        self._saved: dict[str, int] = {}  # tokens, by that name
        self._pairs: dict[Key, bytes] = {}  # of what decode servers asked for
        self._blocks: dict[Key, bytes] = {}  # u32 ids announced under held leases
        self._announced: dict[int, Key] = {}  # by block
        self.events = {PromptCame: self._came, PromptSaved: self._was_saved, ev.MessageCame: self._heard}
        self.effects = {ev.Publish: self._published, ev.Send: self._sent}

    def _came(self, turn: Turn, event: PromptCame) -> None:
        if self._requests.setdefault(event.pair, event.request) == event.request:
            self._saved.setdefault(event.request, 0)

    def _was_saved(self, turn: Turn, event: PromptSaved) -> None:
        if event.request in self._saved:
            self._saved[event.request] = max(event.ready, self._saved[event.request])

    def _heard(self, turn: Turn, event: ev.MessageCame[Any]) -> None:
        if isinstance(event.message, PrefillRequest):
            self._pairs.setdefault(key_of(event.message.try_), event.message.pair)

    def _published(self, turn: Turn, effect: ev.Publish) -> None:
        if effect.event == "lease.ended":
            data: Any = effect.data
            key = (data["decode_node"], data["request"], data["attempt"])
            for block in unpack_u32(self._blocks.pop(key, b"")):
                self._announced.pop(block, None)

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        for said in announcements(effect.message):
            self._announces(turn, key_of(said.try_), said.blocks, said.ready)

    def _announces(self, turn: Turn, key: Key, blocks: bytes, ready: int) -> None:
        name = f"request {key[1]} of {key[0]}"
        saved = self._saved.get(self._requests.get(self._pairs.get(key, b""), ""), 0)
        if ready > saved:
            self.report(turn, RULE, f"{ready} tokens are announced to {name}, but only {saved} were copied")
        if not blocks.startswith(known := self._blocks.get(key, b"")):
            self.report(turn, RULE, f"other blocks than before are announced to {name}")
            return
        self._blocks[key] = blocks
        for block in unpack_u32(blocks[len(known) :]):
            if block in self._announced:
                self.report(turn, NOT_GIVEN, f"block {block} is announced to {name}, and under another lease")
            self._announced[block] = key
