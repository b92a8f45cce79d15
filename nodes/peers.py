"""Whom this node can ask: the peers whose memory it can read, and how they did when asked before."""

from __future__ import annotations

from collections.abc import Callable

from pdbus.bus import members as ms
from pdbus.bus.compatibility import PREFILL_ROLES
from pdbus.bus.membership import Membership
from pdbus.connector.handoff import AttemptFailed
from pdbus.connector.peer_agents import RELOAD_NS, News, PeerAgents, peer_key

from . import events as ev
from .circuits import Circuits, CircuitState
from .decode import Source

__all__ = ["LOADING", "RELOAD_NS", "News", "Peers", "peer_key"]

LOADING = "its memory cannot be read yet"


class Peers(PeerAgents):
    """Beside each peer's agent, its circuit; and the choice of whom to ask."""

    def __init__(self, membership: Membership, *, reads: bool) -> None:
        """`reads`: this node decodes, and so reads from prefill nodes."""
        super().__init__(membership, reads=reads)
        self.circuits = Circuits()
        self._last = ""  # round robin: the name chosen last

    def _agents_over(self, life: str, but: str) -> None:
        self.circuits.forget(life, but)

    def circuit(self, peer: ms.Peer) -> CircuitState:
        return self.circuits.state(key_of(peer))

    def problem(self, peer: ms.Peer) -> str:
        """Why its memory cannot be read, '' when it can or need not."""
        if not self._reads or peer.role not in PREFILL_ROLES:
            return ""
        return self._ready.get(key_of(peer), LOADING)

    def awaited(self, peer: ms.Peer) -> str:
        """What a peer that is LOADING waits for, and on which side."""
        if not self._mover_up:
            return "this node's own mover is still starting"
        if key_of(peer) not in self._agents:
            return f"{peer.name} is still starting"
        return f"this node's mover is still connecting to the memory of {peer.name}"

    # ------------------------------------------------------------ choosing

    def next_source(self, request: bytes, now: int, eligible: Callable[[ms.Peer], bool]) -> Source | None:
        """Round robin over the prefill nodes that can be asked and read now; those that just failed come last."""
        peers = self._sources(now, eligible)
        return self.ask(request, peers[0]) if peers else None

    def good_sources(self, now: int, eligible: Callable[[ms.Peer], bool]) -> list[ms.Peer]:
        """Those that can be asked and read now, in turn; one that just failed only where there is no other."""
        peers = self._sources(now, eligible)
        return [p for p in peers if not self.circuits.comes_last(key_of(p), now)] or peers

    def ask(self, request: bytes, peer: ms.Peer) -> Source:
        """The request's next attempt goes there."""
        self._last = peer.name
        self.circuits.asked(request, key_of(peer))
        return _source(peer)

    def _sources(self, now: int, eligible: Callable[[ms.Peer], bool]) -> list[ms.Peer]:
        names = sorted(self._membership.prefill_names(), key=lambda name: (name <= self._last, name))
        peers = [peer for name in names if (peer := self._membership.peer(name)) is not None]
        peers = [p for p in peers if not self.problem(p) and eligible(p) and self.circuits.admits(key_of(p), now)]
        return sorted(peers, key=lambda p: self.circuits.comes_last(key_of(p), now))

    def attempt_failed(self, failed: AttemptFailed, now: int) -> list[ev.NodeEffect]:
        if not failed.peer_suspect:
            self.circuits.undecided(failed.request)
            return []
        open_ns = self.circuits.failed(failed.request, now)
        data: dict[str, object] = {"node": failed.node, "for_ms": open_ns // 1_000_000, "cause": failed.cause}
        return [ev.Publish(topic="node", event="circuit.opened", data=data)] if open_ns else []

    def fetched(self, request: bytes, node: str) -> list[ev.NodeEffect]:
        closed = self.circuits.fetched(request)
        return [ev.Publish(topic="node", event="circuit.closed", data={"node": node})] if closed else []


def _source(peer: ms.Peer) -> Source:
    return Source(
        node=peer.name,
        incarnation=peer.incarnation,
        epoch=peer.epoch,
        link=peer.link,
        block_size=peer.hello.geometry.block_size if peer.hello and peer.hello.geometry else 1,
    )


def key_of(peer: ms.Peer) -> str:
    return peer_key(peer.name, peer.incarnation, peer.epoch)
