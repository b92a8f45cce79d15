"""Faults as they happen, and which links they leave alone.

A link that no fault is about to touch is watched: no heartbeat and no renewal goes along it. It is watched no longer
shortly before a fault begins there, so that peers are found silent as they would have been, and again some time after
it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING

from ... import events as ev
from .bus import Packet
from .faults import Fault

if TYPE_CHECKING:
    from .cluster import SimCluster
    from .node import SimNode

LEAD_NS = 2_000_000_000  # two heartbeats
AGAIN_NS = (5_000_000_000, 60_000_000_000)  # beyond a lease after the end of a fault: none is left that should expire
STANDSTILL = 1e-9  # of a link's bandwidth, while a process at its end stands still
OF_MESSAGES = ("drop", "duplicate", "delay")
LOSABLE = ("prefill.", "transfer.", "lease.", "heartbeat")


class Trouble:
    def __init__(self, cluster: SimCluster, faults: Iterable[Fault], seed: int) -> None:
        self._cluster = cluster
        self._faults = tuple(faults)
        self._random = Random(seed)
        self._near: dict[Fault, None] = {}  # about to begin, under way, or just over
        self._rules: dict[Fault, None] = {}  # those of messages that are under way
        self._begin: dict[str, Callable[[Fault], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "worker": lambda fault: self._node(fault).enter(self._node(fault).worker_lost),
            "mover": lambda fault: self._node(fault).enter(self._node(fault).mover.die),
            "drain": lambda fault: self._node(fault).enter(self._node(fault).post, ev.DrainAsked()),
            "cut": self._cut,
            "slow": self._slow,
        }

    def schedule(self) -> None:
        """From now on."""
        driver = self._cluster.driver
        for fault in self._faults:
            begin_ns = driver.now + fault.at_ns
            driver.at(begin_ns - LEAD_NS, self._come_near, fault)
            driver.at(begin_ns, self._happen, fault)

    def calm(self, node: str, peer: str) -> bool:
        """Whether no fault is near the link between these two."""
        return not any(fault.concerns(node, peer) for fault in self._near)

    # ------------------------------------------------------------ a fault's time

    def _come_near(self, fault: Fault) -> None:
        self._near[fault] = None
        self._watch(fault, False)

    def _happen(self, fault: Fault) -> None:
        self._cluster.counters[f"fault: {fault.kind}"] += 1
        if fault.kind in OF_MESSAGES:
            self._rules[fault] = None
            self._cluster.bus.fate = self._fate
        else:
            self._begin[fault.kind](fault)
        if fault.for_ns:
            self._cluster.driver.after(fault.for_ns, self._end, fault)
        elif fault.kind in ("worker", "mover", "cut"):
            self._over(fault)

    def _end(self, fault: Fault) -> None:
        if fault.kind in OF_MESSAGES:
            del self._rules[fault]
            if not self._rules:
                self._cluster.bus.fate = None
        elif fault.kind == "kill":
            self._cluster.begin(fault.node)
        elif fault.kind == "slow":
            self._slow(fault._replace(value=1.0))
        self._over(fault)

    def _over(self, fault: Fault) -> None:
        for wait_ns in AGAIN_NS:
            self._cluster.driver.after(self._cluster.plan.handoff.lease_ns + wait_ns, self._far, fault)

    def _far(self, fault: Fault) -> None:
        self._near.pop(fault, None)
        self._watch(fault, True)

    def _watch(self, fault: Fault, watched: bool) -> None:
        """Who is not up cannot be watched: the core says so, and nothing changes."""
        if not self._cluster.watches:
            return
        nodes = self._cluster.nodes
        for node in nodes.values():
            for peer in [p.name for p in node.core.peers.members() if fault.concerns(node.name, p.name)]:
                if peer and (not watched or self.calm(node.name, peer)) and not node.over:
                    node.enter(node.post, ev.WatchChanged(peer=peer, watched=watched))

    # ------------------------------------------------------------ nodes

    def _node(self, fault: Fault) -> SimNode:
        return self._cluster.nodes[fault.node]

    def _kill(self, fault: Fault) -> None:
        if not self._node(fault).over:
            self._node(fault).end()

    def _freeze(self, fault: Fault) -> None:
        node, cluster = self._node(fault), self._cluster
        node.freeze(cluster.driver.now + fault.for_ns)
        cluster.fabric.slow(node.name, STANDSTILL)
        cluster.driver.at(node.frozen_until, cluster.fabric.slow, node.name, 1.0)

    # ------------------------------------------------------------ links

    def _slow(self, fault: Fault) -> None:
        for name in self._cluster.nodes if fault.node == "*" else (fault.node,):
            self._cluster.fabric.slow(name, fault.value)

    def _cut(self, fault: Fault) -> None:
        nodes = self._cluster.nodes
        for node in list(nodes.values()) if fault.node == "*" else (nodes[fault.node],):
            for link in self._cluster.bus.between(node, fault.peer.replace("*", "")):
                self._cluster.bus.cut(link)

    def _fate(self, sender: SimNode, receiver: SimNode, packet: Packet) -> tuple[int, int]:
        """How many copies of a message come, and how much later than they should."""
        copies, late_ns = 1, 0
        if not packet.message.KIND.startswith(LOSABLE):
            return copies, late_ns
        for fault in self._rules:
            if not fault.concerns(sender.name, receiver.name):
                continue
            if fault.kind == "delay":
                late_ns += int(fault.value)
            elif self._random.random() < fault.value:
                copies = 0 if fault.kind == "drop" else 2 * copies
        return copies, late_ns
