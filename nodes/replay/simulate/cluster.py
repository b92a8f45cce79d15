"""A simulated cluster: its nodes, who asks whom, and what came of it all."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from ... import events as ev
from ..driver import Driver
from ..workload import Workload
from .asks import Ask, asks_of
from .bus import Bus
from .fabric import Fabric
from .mover import Mover
from .node import SimNode, address_of
from .plan import Plan
from .policies import policy_of
from .profile import NS_PER_MS, StepTimes
from .trouble import Trouble

JOIN_WITHIN_NS = 60_000_000_000  # a handshake is some round trips; many wait for their turn
FOREVER_NS = 1 << 62
UNREACHABLE = "unreachable"


class SimCluster:
    """Plays one workload on one plan, once. `record`: a folder for what every node heard and decided;
    then every heartbeat and renewal is said, too."""

    def __init__(self, plan: Plan, record: Path | None = None) -> None:
        profile = plan.profile
        self.plan = plan
        self.record = record
        self.driver = Driver()
        self.bus = Bus(self.driver, int(profile.message_ms * NS_PER_MS))
        self.fabric = Fabric(self.driver, plan.link_gb_per_s * 1e9)
        self.times = StepTimes(profile)
        self.read_ns = int(profile.read_ms * NS_PER_MS)
        self.agents: dict[str, Mover] = {}
        self.nodes: dict[str, SimNode] = {}
        self.on_end: Callable[[], None] = lambda: None  # a request has ended
        self.asks: list[Ask] = []  # in the order of the workload, as they come due
        self.ended = 0
        self.counters: Counter[str] = Counter()
        self.computed_tokens: Counter[str] = Counter()  # of prompts, by node
        self.busy_ns: Counter[str] = Counter()  # of workers, by node
        self.loaded = 0  # agents that decode nodes have loaded, one for each link
        self.prefills = [f"p{n}" for n in range(plan.prefill)]
        self.decodes = [f"d{n}" for n in range(plan.decode)]
        self._lives: Counter[str] = Counter()
        self._request_ns = int(profile.request_ms * NS_PER_MS)
        self.answer_ns = int(profile.answer_ms * NS_PER_MS)
        self.began_ns = 0
        self._policy = policy_of(plan.policy)
        self._trouble = Trouble(self, plan.faults, plan.seed)
        self._sessions: dict[int, deque[Ask]] = {}  # who waits in a session, the one under way first

    # ------------------------------------------------------------ the play

    def play(self, workload: Workload) -> None:
        """From the start of the nodes until the last request has ended."""
        for name in (*self.prefills, *self.decodes):
            self.begin(name)
        links = sum(len(self.reach(name)) for name in self.decodes)
        self.driver.run(JOIN_WITHIN_NS, lambda: self.loaded >= links)
        self.began_ns = self.driver.now
        self._trouble.schedule()
        self._next(asks_of(workload, self.plan.block_size))
        total = len(workload.requests)
        self.driver.run(FOREVER_NS, lambda: self.ended >= total)
        for node in self.nodes.values():
            node.close()

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
            self.driver.at(self.began_ns + ask.asked.at_ns, self._due, ask, asks)

    def _due(self, ask: Ask, asks: Iterator[Ask]) -> None:
        """Of a session only the first is sent at its time; each later one so long after the end of the one before."""
        self.asks.append(ask)
        session = ask.asked.session
        if session:
            waiting = self._sessions.setdefault(session, deque())
            waiting.append(ask)
        if not session or len(waiting) == 1:
            self._send(ask)
        self._next(asks)

    def _send(self, ask: Ask) -> None:
        ask.sent_ns = self.driver.now
        if ask.prompt_tokens + ask.sampling.max_tokens > self.plan.max_model_len:
            self._over(ask, "too_long")
            return
        alive = [node for name in self.decodes if not (node := self.nodes[name]).over]
        if not alive:
            self._over(ask, UNREACHABLE)
            return
        node = self._recorded_node(ask) or self._policy.choose(alive, ask)
        ask.node = node.name
        node.sent[ask.number] = ask
        self.driver.after(self._request_ns, node.enter, node.ask, ask)

    def _recorded_node(self, ask: Ask) -> SimNode | None:
        sent_to = self.plan.sent_to
        node = self.nodes[self.decodes[sent_to[ask.number]]] if ask.number < len(sent_to) else None
        return node if node is not None and not node.over else None

    def answered(self, node: SimNode, ask: Ask, end: ev.EndRequest) -> None:
        """Its one end has been told to the client."""
        del node.sent[ask.number]
        ask.end = end
        self._over(ask, end.code if end.reason == "error" else "")

    def lost(self, node: SimNode, ask: Ask) -> None:
        """Its node has gone."""
        del node.sent[ask.number]
        self._over(ask, UNREACHABLE)

    def _over(self, ask: Ask, cause: str) -> None:
        self.ended += 1
        self.on_end()
        ask.cause = cause
        ask.ended_ns = self.driver.now
        waiting = self._sessions.get(ask.asked.session) if ask.asked.session else None
        if waiting:
            waiting.popleft()
            if waiting:
                self.driver.after(waiting[0].asked.think_ns, self._send, waiting[0])

    # ------------------------------------------------------------ what nodes say

    @property
    def watches(self) -> bool:
        """Whether links need no heartbeats: none is recorded, and nobody goes by what they say."""
        return self.record is None and self.plan.prefill_policy != "auto"

    def published(self, node: SimNode, e: ev.Publish) -> None:
        if e.event == "node.up":
            peer = str(e.data["node"])
            if self.watches and self._trouble.calm(node.name, peer):
                node.post(ev.WatchChanged(peer=peer, watched=True))
        elif e.event in ("attempt.failed", "lease.ended"):
            self.counters[f"{e.event}: {e.data['cause']}"] += 1

    def drained(self, node: SimNode) -> None:
        node.end()
