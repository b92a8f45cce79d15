"""Invariant 4 on a prefill node: what a lease announces holds the prompt's KV, and nothing writes it until it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdbus.bus.wire import unpack_u32

from .. import events as ev
from .blocks import Blocks, Own, describe
from .check_leases import Key, key_of
from .checks import Check, Report
from .facts import announcements
from .turns import Turn

RULE = "4: KV counts only when it is valid"


@dataclass(slots=True)
class Offer:
    """A prompt under a held lease."""

    name: str
    hashes: tuple[bytes, ...]
    tokens: int
    have: int
    seq: int = 0
    blocks: bytes = b""  # u32 ids announced so far


class OfferCheck(Check):
    def __init__(self, report: Report, blocks: Blocks) -> None:
        super().__init__(report)
        self._blocks = blocks
        self._offers: dict[Key, Offer] = {}
        self.effects = {ev.Publish: self._published, ev.OpenSequence: self._open, ev.Send: self._sent}

    def _published(self, turn: Turn, effect: ev.Publish) -> None:
        if effect.topic != "lease":
            return
        data: Any = effect.data
        key = (data["decode_node"], data["request"], data["attempt"])
        if effect.event == "lease.ended":
            self._end(key)
        elif isinstance(turn.event, ev.MessageCame):
            asked = turn.event.message
            name = f"lease {data['generation']} of request {key[1]} attempt {key[2]}"
            self._offers[key] = Offer(name, turn.event.block_hashes, asked.prompt_tokens, asked.have)

    def _end(self, key: Key) -> None:
        offer = self._offers.pop(key, None)
        for block in unpack_u32(offer.blocks) if offer else ():
            self._blocks.withdraw(block)

    def _open(self, turn: Turn, effect: ev.OpenSequence) -> None:
        offer = self._offers.get(key_of(effect.try_)) if effect.try_ else None
        if offer is not None:
            offer.seq = effect.seq

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        for said in announcements(effect.message):
            self._announced(turn, key_of(said.try_), said.blocks, said.ready)

    def _announced(self, turn: Turn, key: Key, blocks: bytes, ready: int) -> None:
        offer = self._offers.get(key)
        if offer is None or blocks == offer.blocks:
            return
        size = self._blocks.size
        first = offer.have // size
        end = -(-offer.tokens // size) if ready == offer.tokens else ready // size
        if len(blocks) != 4 * max(0, end - first) or not blocks.startswith(offer.blocks):
            self.report(
                turn, RULE, f"{offer.name} announces {len(blocks) // 4} blocks for {ready} tokens, or other ones"
            )
            return
        known, offer.blocks = len(offer.blocks), blocks
        for index, block in enumerate(unpack_u32(blocks[known:]), first + known // 4):
            self._blocks.advertise(block)
            self._check(turn, offer, index, block)

    def _check(self, turn: Turn, offer: Offer, index: int, block: int) -> None:
        blocks = self._blocks
        whole = (index + 1) * blocks.size <= offer.tokens
        stands = blocks.mirror.get(block)
        if stands != (offer.hashes[index] if whole else Own(offer.seq)):
            what = f"{offer.name} announces block {block} as block {index} of its prompt"
            self.report(turn, RULE, f"{what}, but there is {describe(stands)}")
        if block in blocks.writing or block in blocks.reading or block in blocks.copying:
            self.report(turn, RULE, f"{offer.name} announces block {block}, which is still being written")
