"""A node's mover: loads peers' agents, and reads over the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdbus.bus.messages import Agent

from ... import events as ev
from .fabric import Flow

if TYPE_CHECKING:
    from .node import SimNode

START_NS = 300_000_000
LOAD_NS = 20_000_000  # of a peer's agent
BREAK_NS = 100_000_000  # until a read notices that its owner has gone


class Mover:
    """`agents` of the cluster: whose mover an agent name belongs to."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._agents = node.cluster.agents
        self._life = 0
        self._running = False
        self._name = ""
        self._peers: dict[str, str] = {}  # by what control calls it: its agent's name
        self._reads: dict[int, Flow] = {}

    def start(self, epoch: int, wait_ns: int = 0) -> None:
        self._life += 1
        self._running = True
        agent = self._node.agent(epoch)
        self._name = agent.name
        if wait_ns:
            self._node.driver.after(wait_ns, self._node.enter, self._up, self._life, agent)
        else:
            self._up(self._life, agent)

    def _up(self, life: int, agent: Agent) -> None:
        if life == self._life and self._running:
            self._agents[agent.name] = self
            self._node.post(ev.MoverUp(agents=(agent,)))

    def restart(self, epoch: int) -> None:
        """As the effect says: end the one that runs; if none runs, start one."""
        if self._running:
            self.end()
            self._node.driver.after(0, self._node.enter, self._node.post, ev.MoverLost(problem="restart", asked=True))
        else:
            self.start(epoch, START_NS)

    def die(self) -> None:
        if self._running:
            self.end()
            self._node.post(ev.MoverLost(problem="killed", asked=False))

    def end(self) -> None:
        """Its reads write no more, and what others read from it comes no more."""
        self._life += 1
        self._running = False
        self._agents.pop(self._name, None)
        self._peers.clear()
        fabric = self._node.cluster.fabric
        for flow in self._reads.values():
            fabric.stop(flow)
        self._reads.clear()
        fabric.owner_gone(self._node.name)

    # ------------------------------------------------------------ messages

    def add_peer(self, peer: str, agent: Agent) -> None:
        self._peers[peer] = agent.name
        self._node.driver.after(LOAD_NS, self._node.enter, self._added, self._life, peer)

    def _added(self, life: int, peer: str) -> None:
        if life != self._life or peer not in self._peers:
            return
        problem = "" if self._peers[peer] in self._agents else "cannot be reached"
        if problem:
            del self._peers[peer]
        self._node.cluster.loaded += not problem
        self._node.post(ev.PeerAddEnded(peer=peer, problem=problem))

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def read(self, read: int, peer: str, blocks: int) -> None:
        self._node.driver.after(self._node.cluster.read_ns, self._begin, self._life, read, peer, blocks)

    def _begin(self, life: int, read: int, peer: str, blocks: int) -> None:
        if life != self._life:
            return
        owner = self._agents.get(self._peers.get(peer, ""))
        if owner is None:
            self._end(life, read, "no such peer", 0, 0)
            return
        size, began = blocks * self._node.plan.block_bytes, self._node.driver.now
        enter = self._node.enter

        def done() -> None:
            enter(self._end, life, read, "", size, self._node.driver.now - began)

        def lost() -> None:
            self._node.driver.after(BREAK_NS, enter, self._end, life, read, "remote disconnect", 0, 0)

        self._reads[read] = self._node.cluster.fabric.start(owner._node.name, self._node.name, size, done, lost)

    def _end(self, life: int, read: int, problem: str, size: int, took_ns: int) -> None:
        if life == self._life:
            self._reads.pop(read, None)
            self._node.post(ev.ReadEnded(read=read, problem=problem, bytes=size, transfer_ns=took_ns))
