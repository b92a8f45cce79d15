"""Prompts: a prefill server's half. The engine's prompts meet the requests for them, in either order.

| of one pair | hears                     | becomes | and                                             |
|-------------|---------------------------|---------|-------------------------------------------------|
| nothing     | asked                     | awaited | no answer yet                                   |
| nothing     | prompt came               | here    | blocks reserved, if there is room               |
| awaited     | prompt came, the same one | leased  | the offering half answers (../offer.py)         |
| awaited     | prompt came, another one  | here    | failed(conflict)                                |
| awaited     | not in time               | nothing | failed(unpaired)                                |
| here        | asked, the same prompt    | leased  |                                                 |
| here        | asked, another prompt     | here    | failed(conflict)                                |
| leased      | asked by another reader   | leased  | failed(conflict)                                |
| leased      | lease ended               | spent   | nobody is given it again                        |
| any         | request left, incomplete  | nothing | its lease ends: failed                          |
| spent       | request left              | nothing | blocks free                                     |
| here        | request left              | here    | for `park_ns` more                              |
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pdbus.bus.messages import PrefillCancel, PrefillFailed, PrefillRequest, TryId
from pdbus.bus.wire import Header

from .. import events as ev
from ..handoff import (
    ChunkComputed,
    LeaseEnded,
    OfferEvent,
    OfferTick,
    PrefillAsked,
    PrefillBroke,
    ReaderGone,
    ReaderSaid,
    StartPrefill,
    StopPrefill,
    WritesEnded,
)
from ..offer import Offers
from ..offering import Offering
from ..timers import Timers, earliest
from .events import PromptCame, PromptSaved
from .pair import PAIR_BYTES
from .shelf import Prompt, Reader, Shelf

AWAITED_MAX = 4_096  # a bound on what strangers' requests may allocate


class Asked(NamedTuple):
    """A request whose prompt has not come yet."""

    link: str
    header: Header
    message: PrefillRequest


class Prompts(Offering):
    def __init__(self, shelf: Shelf, offers: Offers, *, pair_wait_ns: int, park_ns: int) -> None:
        """`pair_wait_ns`: how long a reader's request waits for its prompt; `park_ns`: how long a prompt that the
        engine is done with waits for its reader."""
        super().__init__(offers)
        self._shelf = shelf
        self._pair_wait_ns = pair_wait_ns
        self._park_ns = park_ns
        self._awaited: dict[bytes, Asked] = {}
        self._waits: Timers[bytes] = Timers()
        self._parked: Timers[bytes] = Timers()
        self.counters: Counter[str] = Counter()

    def next_deadline(self) -> int | None:
        return earliest(self._waits.next_deadline(), self._parked.next_deadline(), self._offers.next_deadline())

    # ------------------------------------------------------------ the engine

    def came(self, event: PromptCame, now: int) -> list[ev.NodeEffect]:
        if self._shelf.put(event.request, event.pair, event.prompt_tokens, event.prompt_digest) is None:
            self.counters["pair.again"] += 1  # computed like any other request, and handed to nobody
            return []
        self._waits.clear(event.pair)
        asked = self._awaited.pop(event.pair, None)
        return self.asked(asked, now) if asked else []

    def saved(self, event: PromptSaved, now: int) -> list[ev.NodeEffect]:
        prompt = self._shelf.of_request(event.request)
        if prompt is None or not prompt.ready <= event.ready <= prompt.prompt_tokens:
            self.counters["saved.late"] += 1
            return []
        prompt.ready = event.ready
        return self.handle(_chunk(prompt, prompt.try_), now) if prompt.try_ else []

    def left(self, request: str, now: int) -> list[ev.NodeEffect]:
        prompt = self._shelf.of_request(request)
        if prompt is None or prompt.left:
            return []
        prompt.left = True
        if prompt.spent:
            self._shelf.take_away(prompt)
        elif prompt.complete:
            self._parked.set(prompt.pair, now + self._park_ns)
        else:
            try_, prompt.try_ = prompt.try_, None
            self._shelf.take_away(prompt)
            return self.handle(PrefillBroke(try_=try_, problem="its prompt was not computed"), now) if try_ else []
        return []

    # ------------------------------------------------------------ the reader

    def asked(self, asked: Asked, now: int) -> list[ev.NodeEffect]:
        message = asked.message
        if len(message.pair) != PAIR_BYTES:
            return [_failed(asked, f"invalid: pair of {len(message.pair)} bytes: {PAIR_BYTES}")]
        prompt = self._shelf.of_pair(message.pair)
        if prompt is None:
            return self._await(asked, now)
        same = (prompt.prompt_digest, prompt.prompt_tokens) == (message.prompt_digest, message.prompt_tokens)
        if not same or prompt.reader not in (None, _reader(message.try_)) or prompt.spent:
            self.counters["pair.conflict"] += 1
            return [_failed(asked, "conflict")]
        offer = PrefillAsked(link=asked.link, message=message, block_hashes=(message.pair,), to_inc=asked.header.to_inc)
        return self.handle(offer, now)

    def _await(self, asked: Asked, now: int) -> list[ev.NodeEffect]:
        pair = asked.message.pair
        before = self._awaited.get(pair)
        if before is not None and _reader(before.message.try_) != _reader(asked.message.try_):
            return [_failed(asked, "conflict")]
        if before is None and len(self._awaited) >= AWAITED_MAX:
            return [_failed(asked, "no_room")]
        self._awaited[pair] = asked
        if before is None:
            self._waits.set(pair, now + self._pair_wait_ns)
        return []

    def _forget(self, node: str, incarnation: bytes, cancelled: TryId | None = None) -> None:
        """A reader that has left, or one of its requests, waits for no prompt any more."""
        for pair, asked in list(self._awaited.items()):
            try_ = asked.message.try_
            if (node, incarnation) == (try_.node, try_.incarnation) and cancelled in (None, try_):
                del self._awaited[pair]
                self._waits.clear(pair)

    # ------------------------------------------------------------ the offering half

    def handle(self, event: OfferEvent, now: int) -> list[ev.NodeEffect]:
        match event:
            case ReaderGone(node=node, incarnation=incarnation):
                self._forget(node, incarnation)
            case ReaderSaid(node=node, incarnation=incarnation, message=PrefillCancel(try_=try_)):
                self._forget(node, incarnation, try_)
        return super().handle(event, now)

    def tick(self, now: int) -> list[ev.NodeEffect]:
        out = self.handle(OfferTick(), now)
        while (pair := self._waits.pop_due(now)) is not None:
            self.counters["pair.unpaired"] += 1
            out.append(_failed(self._awaited.pop(pair), "unpaired"))
        while (pair := self._parked.pop_due(now)) is not None:
            prompt = self._shelf.of_pair(pair)
            if prompt is not None and prompt.left and prompt.try_ is None:
                self.counters["prompt.unclaimed"] += 1
                self._shelf.take_away(prompt)
        return out

    def _start(self, start: StartPrefill, now: int, out: list[ev.NodeEffect], queue: list[OfferEvent]) -> None:
        """What is there of it already can be read at once."""
        prompt = self._shelf.of_pair(start.block_hashes[0])
        assert prompt is not None  # its blocks were reserved just now
        prompt.try_, prompt.reader = start.try_, _reader(start.try_)
        self._parked.clear(prompt.pair)
        if prompt.ready:
            queue.append(_chunk(prompt, start.try_))

    def _stop(self, stop: StopPrefill, out: list[ev.NodeEffect], queue: list[OfferEvent]) -> None:
        """The engine writes on, into blocks that the prompt holds until it has left."""
        queue.append(WritesEnded(try_=stop.try_))

    def _lease_ended(self, ended: LeaseEnded) -> None:
        prompt = self._shelf.of_try(ended.try_)
        if prompt is None:
            return
        prompt.try_ = None
        prompt.spent = True
        if prompt.complete:  # the engine writes no more of it
            self._shelf.empty(prompt)
        if prompt.left:
            self._shelf.take_away(prompt)


def _chunk(prompt: Prompt, try_: TryId) -> ChunkComputed:
    return ChunkComputed(try_=try_, ready=prompt.ready, last=prompt.complete)


def _failed(asked: Asked, cause: str) -> ev.Send[PrefillFailed]:
    failed = PrefillFailed(try_=asked.message.try_, cause=cause)
    return ev.Send(link=asked.link, to=asked.header.from_, to_inc=asked.header.from_inc, message=failed)


def _reader(try_: TryId) -> Reader:
    return try_.node, try_.incarnation, try_.request
