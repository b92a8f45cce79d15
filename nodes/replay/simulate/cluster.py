"""A simulated cluster: its nodes, who asks whom, and what came of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ... import events as ev
from ..driver import Driver
from ..workload import Workload
from .asks import Ask, asks_of
from .bus import Bus
from .fabric import Fabric
from .mover import Mover
from .node import SimNode, address_of
from .plan import Plan
from .policies import Policy, policy_of
from .profile import NS_PER_MS, StepTimes

JOIN_WITHIN_NS = 60_000_000_000  # a handshake is some round trips; many wait for their turn
END_WITHIN_NS = 40_000_000_000  # after the last deadline: the longest lease


class SimCluster:
    """Plays one workload on one plan, once."""

    def __init__(self, plan: Plan) -> None:
        profile = plan.profile
        self.plan = plan
        self.driver = Driver()
        self.bus = Bus(self.driver, int(profile.message_ms * NS_PER_MS))
        self.fabric = Fabric(self.driver, profile.link_gb_per_s * 1e9)
        self.times = StepTimes(profile)
        self.read_ns = int(profile.read_ms * NS_PER_MS)
        self.agents: dict[str, Mover] = {}
        self.nodes: dict[str, SimNode] = {}
        self.ends: list[tuple[Ask, ev.EndRequest]] = []
        self.counters: Counter[str] = Counter()
        self.loaded = 0  # agents that decode nodes have loaded, one for each link
        self.prefills = [f"p{n}" for n in range(plan.prefill)]
        self.decodes = [f"d{n}" for n in range(plan.decode)]
        self._lives: Counter[str] = Counter()
        self._request_ns = int((profile.request_ms + profile.message_ms) * NS_PER_MS)
        self._answer_ns = int((profile.answer_ms + profile.message_ms) * NS_PER_MS)
        self._asked = 0
        self._began_ns = 0
        self._policy: Policy

    # ------------------------------------------------------------ the play

    def play(self, workload: Workload) -> None:
        """From the start of the nodes until the last request has ended."""
        for name in (*self.prefills, *self.decodes):
            self.begin(name)
        links = sum(len(self.reach(name)) for name in self.decodes)
        self.driver.run(JOIN_WITHIN_NS, lambda: self.loaded >= links)
        self._began_ns = self.driver.now
        self._policy = policy_of(self.plan.policy, [self.nodes[name] for name in self.decodes])
        asks = asks_of(workload, self.plan.block_size, self.plan.max_model_len)
        self._next(asks)
        total = len(workload.requests)
        self.driver.run(1 << 62, lambda: len(self.ends) >= total)

    def begin(self, name: str) -> None:
        """A node starts, for the first time or again."""
        role = "prefill" if name in self.prefills else "decode"
        self._lives[name] += 1
        node = self.nodes[name] = SimNode(self, name, role, self._lives[name])
        node.start([address_of(p) for p in self.reach(name)])

    def reach(self, name: str) -> list[str]:
        """The prefill nodes that this node is told to join: spread evenly when there are more than `reach`."""
        if not name.startswith("d"):
            return []
        count, most = len(self.prefills), self.plan.reach or len(self.prefills)
        if count <= most:
            return self.prefills
        first = int(name[1:]) * count // len(self.decodes)
        return [self.prefills[(first + i * count // most) % count] for i in range(most)]

    # ------------------------------------------------------------ requests

    def _next(self, asks: Iterator[Ask]) -> None:
        ask = next(asks, None)
        if ask is not None:
            self.driver.at(self._began_ns + ask.at_ns, self._send, ask, asks)

    def _send(self, ask: Ask, asks: Iterator[Ask]) -> None:
        ask.sent_ns = self.driver.now
        node = self._policy.choose(ask)
        ask.node = node.name
        node.open_asks += 1
        self.driver.after(self._request_ns, node.enter, node.ask, ask)
        self._next(asks)

    def ended(self, node: SimNode, ask: Ask, end: ev.EndRequest) -> None:
        node.open_asks -= 1
        self.ends.append((ask, end))

    # ------------------------------------------------------------ what nodes say

    def published(self, node: SimNode, e: ev.Publish) -> None:
        if e.event == "node.up":
            node.post(ev.WatchChanged(peer=str(e.data["node"]), watched=True))
        elif e.event in ("attempt.failed", "lease.ended"):
            self.counters[f"{e.event}: {e.data['cause']}"] += 1

    def drained(self, node: SimNode) -> None:
        node.end()
