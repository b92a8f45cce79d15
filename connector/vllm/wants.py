"""Wants: a decode server's half. A request's KV is fetched into blocks of the slab; the engine hears of it when all
of it is there and was valid throughout, or that it must compute the prompt itself.

    | state    | hears              | becomes  | and                                                     |
    |----------|--------------------|----------|---------------------------------------------------------|
    |          | wanted, can be had | fetching | blocks reserved; the fetching half asks (../fetch.py)   |
    |          | wanted             | failed   | no prefill node, no room, nothing to fetch              |
    | fetching | fetched            | ready    | the engine copies it into memory of its own             |
    | fetching | attempt failed     | failed   | blocks free, or in quarantine while a read may write    |
    | any      | request left       |          | blocks free; P is told if it still holds a lease        |

One attempt: no other prefill node has the prompt. The engine's own memory is never the target of a read, so that
whatever arrives late cannot change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdbus.bus import members as ms
from pdbus.bus.messages import Sampling

from .. import events as ev
from ..fetch import Fetches
from ..handoff import (
    Ask,
    AttemptFailed,
    FetchAsked,
    Fetched,
    FetchEffect,
    FetchEvent,
    FetchLeft,
    Holder,
    PostRead,
    Say,
)
from ..peer_agents import start_read
from ..pool import BlockPool
from ..tally import Tally
from .events import KvWanted


class WantState(StrEnum):
    FETCHING = "fetching"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class Want:
    request: str
    id: bytes
    node: str
    prompt_tokens: int
    have: int
    blocks: tuple[int, ...] = ()  # of the whole prompt, by position; those before `have` stay as they are
    state: WantState = WantState.FETCHING
    problem: str = ""


class Wants:
    def __init__(self, pool: BlockPool, fetches: Fetches, *, fetch_ns: int) -> None:
        """`fetch_ns`: how long all of a fetch may take, waiting for the prefill included."""
        self._pool = pool
        self._fetches = fetches
        self._fetch_ns = fetch_ns
        self._wants: dict[str, Want] = {}
        self._by_id: dict[bytes, Want] = {}
        self._fetching = Tally()
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._wants)

    def get(self, request: str) -> Want | None:
        return self._wants.get(request)

    def all(self) -> Iterable[Want]:
        """In the order they came."""
        return self._wants.values()

    def fetching_from(self) -> Mapping[str, int]:
        """How many requests fetch from each prefill node that any fetches from, now."""
        return self._fetching

    # ------------------------------------------------------------ the engine

    def wanted(self, event: KvWanted, source: ms.Peer | None, now: int) -> list[ev.NodeEffect]:
        """`source`: the prefill node to ask; None: there is none that could be read."""
        if event.request in self._wants:
            self.counters["wanted.again"] += 1
            return []
        want = Want(event.request, event.id, source.name if source else "", event.prompt_tokens, event.have)
        self._wants[want.request] = self._by_id[want.id] = want
        if source is None:
            return self._fail(want, "no prefill node" if not event.node else f"no prefill node {event.node}")
        if event.prompt_tokens - 1 <= event.have:
            return self._fail(want, "nothing to fetch")
        room = self._pool.reserve(event.prompt_tokens, (), Holder.HELD)
        if room is None:
            return self._fail(want, "no room in the slab")
        want.blocks = room.blocks
        self._fetching.more(want.node)
        geometry = source.hello.geometry if source.hello else None
        return self.handle(
            FetchAsked(
                request=want.id,
                attempt=1,
                node=source.name,
                incarnation=source.incarnation,
                epoch=source.epoch,
                link=source.link,
                source_size=geometry.block_size if geometry else self._pool.block_size,
                prompt_tokens=event.prompt_tokens,
                have=event.have,
                prompt_digest=event.prompt_digest,
                sampling=Sampling(max_tokens=1),
                blocks=want.blocks,
                deadline_ns=now + self._fetch_ns,
                pair=event.pair,
            ),
            now,
        )

    def left(self, request: str, now: int) -> list[ev.NodeEffect]:
        want = self._wants.pop(request, None)
        if want is None:
            return []
        del self._by_id[want.id]
        out = self.handle(FetchLeft(request=want.id), now)
        self._settle(want, want.state)
        self._pool.drop(want.blocks, Holder.HELD)
        return out

    # ------------------------------------------------------------ the fetching half

    def handle(self, event: FetchEvent, now: int) -> list[ev.NodeEffect]:
        """Let it decide, and carry out what it decides."""
        out: list[ev.NodeEffect] = []
        for effect in self._fetches.handle(event, now):
            out += self._carry_out(effect)
        return out

    def _carry_out(self, effect: FetchEffect) -> list[ev.NodeEffect]:
        match effect:
            case Ask() | Say():
                return [ev.Send(link=effect.link, to=effect.to, to_inc=effect.to_inc, message=effect.message)]
            case PostRead():
                return [start_read(effect)]
            case Fetched():
                want = self._by_id[effect.request]
                self.counters["fetched"] += 1
                self._settle(want, WantState.READY)
                told = {"request": want.id.hex(), "node": want.node, "tokens": want.prompt_tokens - want.have}
                return [ev.Publish(topic="request", event="kv.fetched", data=told)]
            case AttemptFailed():
                failed = self._by_id.get(effect.request)
                return self._fail(failed, effect.cause) if failed is not None else []
        return []

    def _fail(self, want: Want, problem: str) -> list[ev.NodeEffect]:
        self.counters["failed"] += 1
        self._settle(want, WantState.FAILED)
        want.problem = problem
        self._pool.drop(want.blocks, Holder.HELD)
        want.blocks = ()
        data: dict[str, object] = {"request": want.id.hex(), "attempt": 1, "node": want.node, "cause": problem}
        return [ev.Publish(topic="request", event="attempt.failed", data=data)]

    def _settle(self, want: Want, state: WantState) -> None:
        """It fetches no more, if it did."""
        if want.state is WantState.FETCHING and want.blocks:
            self._fetching.less(want.node)
        if state is not WantState.FETCHING:
            want.state = state
