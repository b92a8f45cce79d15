"""PairCore: the decisions of one vLLM server's connector, all behind one door, like a node's core.

It composes membership, both halves of the hand-off and the slab's blocks. The engine's scheduler is not here: it tells
what it has and wants (events.py), and looks up where KV goes to or comes from (`prompt_blocks`, `want`). Nothing here
blocks, and nothing here owns the engine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from pdbus.bus import members as ms
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Message, PrefillRequest
from pdbus.bus.wire import Declared

from .. import events as ev
from .. import handoff as ho
from ..fetch import Fetches
from ..offer import Offers
from ..own_mover import MoverState, OwnMover, Told
from ..peer_agents import OF_MEMBERSHIP, PeerAgents
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
        self.pool = BlockPool(config.blocks, config.block_size)
        shelf = Shelf(self.pool)
        self.shelf = shelf
        self.fetches = Fetches(config.name, config.incarnation, self.pool, config.handoff)
        self.peers = PeerAgents(membership, reads=config.role == "decode")
        self.mover = OwnMover(self.peers, self.fetches.transfers, config.blocks)
        self.offers = Offers(config.name, config.incarnation, self.mover.epoch, shelf, config.handoff)
        self.prompts = Prompts(shelf, self.offers, pair_wait_ns=config.pair_wait_ns, park_ns=config.park_ns)
        self.wants = Wants(self.pool, self.fetches, fetch_ns=config.fetch_ns)

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
        self._pass_on(self.mover.look(), now, out)
        busy = self.wants.fetching_from().keys() | self.prompts.readers().keys()
        self._pass_on(self.peers.busy_changes(busy), now, out)

    def _pass_on(self, told: Iterable[Told], now: int, out: list[ev.NodeEffect]) -> None:
        """To whom each of it concerns."""
        for item in told:
            match item:
                case ho.FetchEvent():
                    out += self.wants.handle(item, now)
                case ho.OfferEvent():
                    out += self.prompts.handle(item, now)
                case ms.MembershipEvent():
                    self._membership(item, now, out)
                case ev.NodeEffect():
                    out.append(item)

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
        if self.mover.state is not MoverState.UP:
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
                out += self.prompts.handle(said, now)
            case ho.OwnerSaid() as said:
                out += self.wants.handle(said, now)

    def _membership(self, event: ms.MembershipEvent, now: int, out: list[ev.NodeEffect]) -> bool:
        effects, news, accepted = self.peers.handle(event, now)
        out += effects
        self._pass_on(news, now, out)
        return accepted

    def _of_membership(self, event: ev.NodeEvent, now: int, out: list[ev.NodeEffect]) -> None:
        self._membership(OF_MEMBERSHIP[type(event)](event), now, out)

    # ------------------------------------------------------------ the mover

    def _mover_came(self, event: ev.MoverUp, now: int, out: list[ev.NodeEffect]) -> None:
        self._pass_on(self.mover.came(event.agents, self.offers.held(), announce=True), now, out)

    def _mover_lost(self, event: ev.MoverLost, now: int, out: list[ev.NodeEffect]) -> None:
        self._pass_on(self.mover.lost(asked=event.asked), now, out)

    def _peer_added(self, event: ev.PeerAddEnded, now: int, out: list[ev.NodeEffect]) -> None:
        self.peers.added(event.peer, event.problem, now)

    def _read_ended(self, event: ev.ReadEnded, now: int, out: list[ev.NodeEffect]) -> None:
        failed = event.problem and ho.ReadFailed(read=event.read, problem=event.problem)
        out += self.wants.handle(failed or ho.ReadDone(read=event.read), now)

    def _read_doubtful(self, event: ev.ReadDoubtful, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.wants.handle(ho.ReadOverdue(read=event.read, problem=event.problem), now)

    # ------------------------------------------------------------ time, the end

    def _tick(self, event: ev.Tick, now: int, out: list[ev.NodeEffect]) -> None:
        load = ms.OwnLoadChanged(
            waiting_prefill_tokens=0, running=len(self.wants) + len(self.shelf), free_blocks=self.pool.available()
        )
        self._membership(load, now, out)
        self._membership(ms.Tick(), now, out)
        out += self.peers.tick(now)
        out += self.prompts.tick(now)
        out += self.wants.handle(ho.FetchTick(), now)

    def _drain(self, event: ev.DrainAsked, now: int, out: list[ev.NodeEffect]) -> None:
        """Nothing new is offered; the engine itself goes on."""
        self._membership(ms.DrainStarted(), now, out)
        out += self.prompts.handle(ho.DrainBegan(), now)

    def _leave(self, event: ev.LeaveAsked, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.prompts.handle(ho.ShutdownBegan(), now)
        self._membership(ms.Leaving(reason="shutdown"), now, out)
        out.append(ev.Drained())


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
