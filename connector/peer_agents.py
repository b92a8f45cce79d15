"""Who can be reached and read: membership's decisions, and which peers' memory the mover has loaded."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from pdbus.bus import members as ms
from pdbus.bus.compatibility import PREFILL_ROLES
from pdbus.bus.membership import Membership

from . import events as ev
from .handoff import (
    FetchEvent,
    OfferEvent,
    OwnerEpoch,
    OwnerGone,
    OwnerWatched,
    PostRead,
    ReaderCame,
    ReaderGone,
    ReaderWatched,
)
from .timers import earliest

RELOAD_NS = 30_000_000_000  # an agent that could not be loaded is tried again so much later: a network may heal

News = FetchEvent | OfferEvent

OF_MEMBERSHIP: dict[type[ev.NodeEvent], Callable[[Any], ms.MembershipEvent]] = {  # what it alone decides about
    ev.LinkOpened: lambda e: ms.LinkOpened(address=e.address, link=e.link),
    ev.LinkFailed: lambda e: ms.LinkFailed(address=e.address, problem=e.problem),
    ev.LinkLost: lambda e: ms.LinkLost(link=e.link, reason=e.reason),
    ev.JoinAsked: lambda e: ms.JoinAsked(address=e.address),
    ev.WatchChanged: lambda e: ms.WatchChanged(peer=e.peer, watched=e.watched),
}


class PeerAgents:
    """Membership, and beside it the state of each peer's agent in our mover."""

    def __init__(self, membership: Membership, *, reads: bool) -> None:
        """`reads`: this node decodes, and so reads from prefill nodes."""
        self._membership = membership
        self._reads = reads
        self._agents: dict[str, ev.AddPeer] = {}  # by peer key: what the mover knows or is to know
        self._ready: dict[str, str] = {}  # by peer key: '' when it can be read from, else why not
        self._reload_ns: dict[str, int] = {}  # by peer key: when to try again
        self._mover_up = False
        self._busy: frozenset[str] = frozenset()
        self.drain_asked = False

    # ------------------------------------------------------------ membership

    def handle(self, event: ms.MembershipEvent, now: int) -> tuple[list[ev.NodeEffect], list[News], bool]:
        """Effects to carry out, news for the halves of the hand-off, and whether the event was accepted."""
        effects: list[ev.NodeEffect] = []
        news: list[News] = []
        accepted = True
        for effect in self._membership.handle(event, now):
            accepted = accepted and not isinstance(effect, ms.Rejected)
            self._translate(effect, effects, news)
        return effects, news, accepted

    def get(self, name: str) -> ms.Peer | None:
        """Who has said hello to us under that name, or answered ours."""
        return self._membership.peer(name)

    def _translate(self, effect: ms.MembershipEffect, out: list[ev.NodeEffect], news: list[News]) -> None:
        match effect:
            case ms.OpenLink():
                out.append(ev.OpenLink(address=effect.address))
            case ms.CloseLink():
                out.append(ev.CloseLink(link=effect.link, flush=effect.flush))
            case ms.SendOn():
                out.append(
                    ev.Send(
                        link=effect.link, to=effect.to, to_inc=effect.to_inc, message=effect.message, cause=effect.cause
                    )
                )
            case ms.PeerUp():
                news.append(ReaderCame(node=effect.peer.name, incarnation=effect.peer.incarnation))
                out.append(_node_event("node.up", effect.peer))
            case ms.PeerAgent():
                self._agent(effect, out, news)
            case ms.PeerWatched(peer=peer, watched=watched):
                news.append(OwnerWatched(node=peer.name, incarnation=peer.incarnation, watched=watched))
                news.append(ReaderWatched(node=peer.name, incarnation=peer.incarnation, watched=watched))
            case ms.PeerDown():
                self._down(effect, out, news)
            case ms.CallFailed() | ms.TurnedAway():
                event = "node.unreachable" if isinstance(effect, ms.CallFailed) else "node.refused"
                data: dict[str, object] = {"node": effect.name, "address": effect.address, "reason": effect.reason}
                out.append(ev.Publish(topic="node", event=event, data=data))
            case ms.DrainAsked():
                self.drain_asked = True

    def _agent(self, effect: ms.PeerAgent, out: list[ev.NodeEffect], news: list[News]) -> None:
        peer, agent = effect.peer, effect.agent
        news.append(OwnerEpoch(node=peer.name, incarnation=peer.incarnation, epoch=agent.epoch))
        geometry = peer.hello.geometry if peer.hello else None
        if not self._reads or peer.role not in PREFILL_ROLES or geometry is None:
            return
        key = peer_key(peer.name, peer.incarnation, agent.epoch)
        self._forget(peer.name, peer.incarnation, out, but=key)
        if len(peer.agents) < geometry.ranks:  # those of its other ranks will follow
            return
        add = ev.AddPeer(peer=key, geometry=geometry, agents=peer.agents)
        if self._agents.get(key) != add:
            self._agents[key] = add
            if self._mover_up:
                out.append(add)

    def _down(self, effect: ms.PeerDown, out: list[ev.NodeEffect], news: list[News]) -> None:
        peer = effect.peer
        news.append(OwnerGone(node=peer.name, incarnation=peer.incarnation, proven=effect.proven))
        if effect.proven:
            news.append(ReaderGone(node=peer.name, incarnation=peer.incarnation))
            self._forget(peer.name, peer.incarnation, out)
        out.append(_node_event("node.down", peer, reason=effect.reason, proven=effect.proven))

    def _forget(self, name: str, incarnation: bytes, out: list[ev.NodeEffect], but: str = "") -> None:
        """Tell the mover that agents of this life are over, but for one epoch's."""
        life = peer_key(name, incarnation, "")
        self._agents_over(life, but)
        for key in [k for k in self._agents if k.startswith(life) and k != but]:
            del self._agents[key]
            self._ready.pop(key, None)
            self._reload_ns.pop(key, None)
            if self._mover_up:  # it has been told of this one, loaded or not yet
                out.append(ev.RemovePeer(peer=key))

    def _agents_over(self, life: str, but: str) -> None:
        """For those who keep more by peer key: keys that begin with `life` are over, all but one."""

    def next_deadline(self) -> int | None:
        return earliest(self._membership.next_deadline(), *self._reload_ns.values())

    def prefill_peers(self) -> list[ms.Peer]:
        """Those that a decode node may send a new prompt to."""
        return self._membership.prefill_peers()

    def members(self) -> list[ms.Peer]:
        return self._membership.members()

    def busy_changes(self, busy: Set[str]) -> list[ms.BusyChanged]:
        """What membership has to hear so that heartbeats go along the links in use."""
        if busy == self._busy:
            return []
        changed = sorted(busy ^ self._busy)
        self._busy = frozenset(busy)
        return [ms.BusyChanged(peer=name, busy=name in busy) for name in changed]

    # ------------------------------------------------------------ the mover's side

    def mover_lost(self) -> None:
        self._mover_up = False
        self._ready.clear()
        self._reload_ns.clear()

    def mover_up(self) -> list[ev.NodeEffect]:
        """A new mover knows nobody."""
        self._mover_up = True
        return list(self._agents.values())

    def added(self, peer: str, problem: str, now: int) -> None:
        if peer in self._agents:
            self._ready[peer] = problem
            if problem:
                self._reload_ns[peer] = now + RELOAD_NS

    def tick(self, now: int) -> list[ev.NodeEffect]:
        due = [key for key, at in self._reload_ns.items() if at <= now]
        for key in due:
            del self._reload_ns[key]
        return [self._agents[key] for key in due]

    def readable(self, peer: ms.Peer) -> bool:
        """Whether its memory can be read now."""
        return self._ready.get(peer_key(peer.name, peer.incarnation, peer.epoch), "?") == ""


def peer_key(name: str, incarnation: bytes, epoch: int | str) -> str:
    """Node, incarnation and epoch in one string: what the mover calls a peer. Never reused."""
    return f"{name}/{incarnation.hex()}/{epoch}"


def start_read(read: PostRead) -> ev.StartRead:
    """What the mover is told of it."""
    return ev.StartRead(
        read=read.read,
        peer=peer_key(read.node, read.incarnation, read.epoch),
        begin=read.begin,
        end=read.end,
        source=read.source,
        target=read.target,
        request=read.request,
    )


def _node_event(event: str, peer: ms.Peer, **data: object) -> ev.Publish:
    return ev.Publish(topic="node", event=event, data={"node": peer.name, "role": peer.role, **data})
