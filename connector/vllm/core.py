"""PairCore: the decisions of one vLLM server's connector, all behind one door, like a node's core.

It composes membership, both halves of the hand-off and the slab's blocks. The engine's scheduler is not here: it tells
what it has and wants (events.py), and looks up where KV goes to or comes from (`prompt_blocks`, `want`). Nothing here
blocks, and nothing here owns the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pdbus.bus import members as ms
from pdbus.bus.membership import Membership
from pdbus.bus.messages import (
    Message,
    PrefillRequest,
)
from pdbus.bus.wire import Declared

from .. import events as ev
from .. import handoff as ho
from ..fetch import Fetches
from ..offer import Offers
from ..peer_agents import PeerAgents
from ..pool import BlockPool
from ..timers import earliest
from .events import EngineEvent, KvWanted, PromptCame, PromptSaved, RequestLeft
from .prompts import Asked, Prompts
from .shelf import Shelf
from .wants import Want, Wants

Role = Literal["prefill", "decode"]


class PairConfig(Declared):
    name: str
    incarnation: bytes
    role: Role
    blocks: int  # of the slab
    block_size: int
    pair_wait_ns: int
    park_ns: int
    fetch_ns: int
    handoff: ho.HandoffConfig


class PairCore:
    """One server. A prefill server's requests are prompts to offer, a decode server's are KV to fetch."""

    def __init__(self, config: PairConfig, membership: Membership) -> None:
        self.config = config
        self.epoch = 1
        self.mover_up = False
        self.healing = False
        self.pool = BlockPool(config.blocks, config.block_size)
        shelf = Shelf(self.pool)
        self.shelf = shelf
        self.offers = Offers(config.name, config.incarnation, self.epoch, shelf, config.handoff)
        self.fetches = Fetches(config.name, config.incarnation, self.pool, config.handoff)
        self.prompts = Prompts(shelf, self.offers, pair_wait_ns=config.pair_wait_ns, park_ns=config.park_ns)
        self.wants = Wants(self.pool, self.fetches, fetch_ns=config.fetch_ns)
        self.peers = PeerAgents(membership, reads=config.role == "decode")

    # ------------------------------------------------------------ the door

    def handle(self, event: ev.NodeEvent | EngineEvent, now: int) -> list[ev.NodeEffect]:
        out: list[ev.NodeEffect] = []
        _HANDLERS[type(event)](self, event, now, out)
        self._serve(now, out)
        return out

    def next_deadline(self) -> int | None:
        return earliest(self.peers.next_deadline(), self.prompts.next_deadline(), self.fetches.next_deadline())

    # ------------------------------------------------------------ what the engine looks up

    def prompt_blocks(self, request: str) -> tuple[int, ...]:
        """Where that prompt's KV is to be saved, by position; () for nowhere."""
        prompt = self.shelf.of_request(request)
        return prompt.blocks if prompt is not None else ()

    def want(self, request: str) -> Want | None:
        """How far that request's KV is, and where."""
        return self.wants.get(request)

    # ------------------------------------------------------------ the rest of a turn

    def _serve(self, now: int, out: list[ev.NodeEffect]) -> None:
        if self.peers.drain_asked and not self.offers.draining:
            self._drain(ev.DrainAsked(), now, out)
        if self.wants.reads and not self.mover_up:
            self._reads_are_over(now, out)
        if self.mover_up and not self.healing and self.fetches.transfers.hold_too_much(self.config.blocks):
            self.healing = True
            self._raise_epoch(now, out)
            out.append(ev.RestartMover(epoch=self.epoch))
        busy = self.wants.fetching_from().keys() | self.prompts.readers().keys()
        for change in self.peers.busy_changes(busy):
            self._membership(change, now, out)

    # ------------------------------------------------------------ the engine

    def _prompt_came(self, event: PromptCame, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.prompts.came(event, now)

    def _prompt_saved(self, event: PromptSaved, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.prompts.saved(event, now)

    def _wanted(self, event: KvWanted, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.wants.wanted(event, self._source(event.node), now)

    def _left(self, event: RequestLeft, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.prompts.left(event.request, now)
        out += self.wants.left(event.request, now)

    def _source(self, node: str) -> ms.Peer | None:
        """The one that is named, or the only one there is; and only if it can be read now."""
        if self.healing or not self.mover_up:
            return None
        peers = [p for p in self.peers.prefill_peers() if node in ("", p.name)]
        if len(peers) != 1 or not self.peers.readable(peers[0]):
            return None
        return None if self.fetches.peer_blocked(peers[0].name, peers[0].incarnation) else peers[0]

    # ------------------------------------------------------------ the bus

    def _message(self, event: ev.MessageCame[Message], now: int, out: list[ev.NodeEffect]) -> None:
        message, header = event.message, event.header
        if not self._membership(ms.event_of(event.link, header, message), now, out):
            return
        if isinstance(message, PrefillRequest):
            out += self.prompts.asked(Asked(event.link, header, message), now)
            return
        match ho.said(event.link, header, message):
            case ho.ReaderSaid() as said:
                out += self.prompts.hear(said, now)
            case ho.OwnerSaid() as said:
                out += self.wants.hear(said, now)

    def _membership(self, event: ms.MembershipEvent, now: int, out: list[ev.NodeEffect]) -> bool:
        effects, news, accepted = self.peers.handle(event, now)
        out += effects
        for item in news:
            if isinstance(item, ho.FetchEvent):
                out += self.wants.hear(item, now)
            else:
                out += self.prompts.hear(item, now)
        return accepted

    def _of_membership(self, event: ev.NodeEvent, now: int, out: list[ev.NodeEffect]) -> None:
        self._membership(_OF_MEMBERSHIP[type(event)](event), now, out)

    # ------------------------------------------------------------ the mover

    def _mover_came(self, event: ev.MoverUp, now: int, out: list[ev.NodeEffect]) -> None:
        if any(agent.epoch != self.epoch for agent in event.agents):  # of an epoch that ended meanwhile
            out.append(ev.RestartMover(epoch=self.epoch))
            return
        self.mover_up = True
        for agent in event.agents:
            self._membership(ms.OwnAgentChanged(agent=agent), now, out)
        out += self.peers.mover_up()
        out.append(ev.AdvertiseLeases(leases=self.offers.held()))

    def _mover_lost(self, event: ev.MoverLost, now: int, out: list[ev.NodeEffect]) -> None:
        """Reaped, so none of its reads writes any more. Every lease was of its agent, and ends with it."""
        self.mover_up = self.healing = False
        self.peers.mover_lost()
        if not event.asked:
            self._raise_epoch(now, out)
        self._reads_are_over(now, out)
        out.append(ev.RestartMover(epoch=self.epoch))

    def _raise_epoch(self, now: int, out: list[ev.NodeEffect]) -> None:
        self.epoch += 1
        out += self.prompts.hear(ho.EpochBegan(epoch=self.epoch, pool_reset=False), now)

    def _reads_are_over(self, now: int, out: list[ev.NodeEffect]) -> None:
        self.wants.reads.clear()
        out += self.wants.hear(ho.MoverReaped(), now)

    def _peer_added(self, event: ev.PeerAddEnded, now: int, out: list[ev.NodeEffect]) -> None:
        self.peers.added(event.peer, event.problem, now)

    def _read_ended(self, event: ev.ReadEnded, now: int, out: list[ev.NodeEffect]) -> None:
        self.wants.reads.pop(event.read, None)
        failed = event.problem and ho.ReadFailed(read=event.read, problem=event.problem)
        out += self.wants.hear(failed or ho.ReadDone(read=event.read), now)

    def _read_doubtful(self, event: ev.ReadDoubtful, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.wants.hear(ho.ReadOverdue(read=event.read, problem=event.problem), now)

    # ------------------------------------------------------------ time, the end

    def _tick(self, event: ev.Tick, now: int, out: list[ev.NodeEffect]) -> None:
        load = ms.OwnLoadChanged(
            waiting_prefill_tokens=0, running=len(self.wants) + len(self.shelf), free_blocks=self.pool.available()
        )
        self._membership(load, now, out)
        self._membership(ms.Tick(), now, out)
        out += self.peers.tick(now)
        out += self.prompts.tick(now)
        out += self.wants.hear(ho.FetchTick(), now)

    def _drain(self, event: ev.DrainAsked, now: int, out: list[ev.NodeEffect]) -> None:
        """Nothing new is offered; the engine itself goes on."""
        self._membership(ms.DrainStarted(), now, out)
        out += self.prompts.hear(ho.DrainBegan(), now)

    def _leave(self, event: ev.LeaveAsked, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.prompts.hear(ho.ShutdownBegan(), now)
        self._membership(ms.Leaving(reason="shutdown"), now, out)
        out.append(ev.Drained())


_OF_MEMBERSHIP: dict[type[ev.NodeEvent], Callable[[Any], ms.MembershipEvent]] = {
    ev.LinkOpened: lambda e: ms.LinkOpened(address=e.address, link=e.link),
    ev.LinkFailed: lambda e: ms.LinkFailed(address=e.address, problem=e.problem),
    ev.LinkLost: lambda e: ms.LinkLost(link=e.link, reason=e.reason),
    ev.JoinAsked: lambda e: ms.JoinAsked(address=e.address),
}

_Handler = Callable[[PairCore, Any, int, list[ev.NodeEffect]], None]

_HANDLERS: dict[type[ev.NodeEvent] | type[EngineEvent], _Handler] = {
    PromptCame: PairCore._prompt_came,
    PromptSaved: PairCore._prompt_saved,
    KvWanted: PairCore._wanted,
    RequestLeft: PairCore._left,
    ev.MessageCame: PairCore._message,
    ev.LinkOpened: PairCore._of_membership,
    ev.LinkFailed: PairCore._of_membership,
    ev.LinkLost: PairCore._of_membership,
    ev.JoinAsked: PairCore._of_membership,
    ev.MoverUp: PairCore._mover_came,
    ev.MoverLost: PairCore._mover_lost,
    ev.PeerAddEnded: PairCore._peer_added,
    ev.ReadEnded: PairCore._read_ended,
    ev.ReadDoubtful: PairCore._read_doubtful,
    ev.DrainAsked: PairCore._drain,
    ev.LeaveAsked: PairCore._leave,
    ev.Tick: PairCore._tick,
}
