"""A whole cluster of real NodeCores in one thread, under a seed: clients, faults, and what must be true in the end.

`run(seed)` draws a plan and plays it; a Violation names the seed. `python -m tests.sim.cluster_sim SEED` plays one
seed and prints everything that happened, and `--long N` goes through N seeds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from pdbus.bus.messages import Sampling, Timeline
from pdbus.nodes import events as ev
from pdbus.nodes.replay.explore.search import Violation

from .cluster_machines import VOCABULARY, Mover, oracle
from .cluster_node import SimNode
from .cluster_world import MS, Bus, S, Weather, World

END_WITHIN_NS = 40 * S  # a lease that is not renewed any more costs 24 s, all else a few; then a local prefill
SETTLE_NS = 45 * S  # the longest lease, and the latest read
PROBE_NS = 5 * S
DEADLINE_NS = 300 * S
FAULTS = ("crash", "worker", "mover", "cut", "freeze", "drain", "leave", "remove")
MOMENTS = (
    "hello", "agent", "prefill.request", "prefill.accepted", "prefill.progress", "prefill.done", "prefill.cancel",
    "transfer.done", "lease.released", "GenerateAsked", "FirstTokenTaken", "StepEnded", "ReadEnded", "PeerAddEnded",
    "WorkerUp", "WorkerLost", "MoverUp", "MoverLost",
)  # fmt: skip


class Fault(NamedTuple):
    """What goes wrong: at a time, or right after something is heard for the nth time."""

    kind: str
    node: str = ""  # '': the one that has heard it
    at_ns: int = 0
    after: str = ""
    nth: int = 1


class Plan(NamedTuple):
    prefill_nodes: int = 2
    decode_nodes: int = 1
    both: bool = False  # the decode nodes prefill too, for each other
    requests: int = 6
    block_size: int = 4
    prefill_blocks: int = 40
    decode_blocks: int = 40
    batch_tokens: int = 16
    chunk: int = 8
    running_max: int = 8
    skip_sampling: bool = False
    step_ms: int = 10  # a step takes as long at most, and 1 ms for four tokens
    faults: tuple[Fault, ...] = ()
    warm_ns: int = S  # before the first request
    horizon_ns: int = 4 * S  # nothing is asked and nothing goes wrong afterwards
    weather: Weather = Weather()
    slow_reads: float = 0.0
    stuck_reads: float = 0.0  # until either mover ends
    failing_reads: float = 0.0
    failing_adds: float = 0.0  # of a peer's agent
    failing_rows: float = 0.0
    rude: float = 0.0  # clients that cancel, vanish, do not read, or have little time

    def calm(self) -> Plan:
        return self._replace(slow_reads=0.0, stuck_reads=0.0, failing_reads=0.0, failing_adds=0.0, failing_rows=0.0)


class Client:
    """One request, what came of it, and what must come of it."""

    def __init__(self, cluster: Cluster, number: int, prompt: tuple[int, ...], rude: bool) -> None:
        random = cluster.world.random
        self.cluster = cluster
        self.request = f"request {number}".encode().ljust(16, b".")
        self.link = f"client:{number}"
        self.prompt = prompt
        stops = tuple(random.randrange(VOCABULARY) for _ in range(VOCABULARY // 20)) if random.random() < 0.5 else ()
        self.sampling = Sampling(max_tokens=random.randint(1, 12), stop_token_ids=stops)
        self.rude = random.choice(("cancel", "vanish", "slow", "hasty")) if rude else ""
        self.deadline_ns = cluster.world.between_ms(5, 1500) if self.rude == "hasty" else DEADLINE_NS
        self.credit = random.randint(1, 3) if self.rude == "slow" else 100
        self.node: SimNode | None = None
        self.gone = False
        self.tokens: list[int] = []
        self.end: ev.EndRequest | None = None
        self.lost = False  # its node has crashed, or was never there

    @property
    def over(self) -> bool:
        return self.lost or self.end is not None

    def ask(self, node: SimNode) -> None:
        self.node = node
        node.ask(self)
        patience = self.cluster.world.between_ms(1, 500)
        if self.rude == "cancel":
            cancel = ev.CancelAsked(client=self.link)
            self.cluster.world.after(patience, lambda: node.enter(lambda: node.post(cancel)))
        elif self.rude == "vanish":
            self.cluster.world.after(patience, self._vanish)

    def _vanish(self) -> None:
        self.gone = True

    def tokens_came(self, tokens: list[int]) -> bool:
        """Whether it could be reached."""
        self.tokens += tokens
        node, index = self.node, len(self.tokens)
        if self.rude != "slow" and not self.gone and node is not None:
            given = ev.CreditGiven(client=self.link, index=index)
            self.cluster.world.after_ms(0.2, 5, lambda: node.enter(lambda: node.post(given)))
        return not self.gone

    def finished(self, end: ev.EndRequest) -> None:
        if self.end is not None:
            raise Violation(f"{self.link} ends twice")
        self.end = end
        counters, timeline = self.cluster.world.counters, end.timeline
        counters[f"{end.reason} {end.code}"] += 1
        if end.completion_tokens:
            counters[f"after {timeline.attempts} attempts {'remote' if timeline.remote else 'local'}"] += 1

    def problem(self, codes: frozenset[str]) -> str:
        """What is wrong with its answer, '' if nothing is."""
        right, reason = oracle(self.prompt, self.sampling)
        if self.tokens != right[: len(self.tokens)]:
            return f"{self.link}: wrong tokens {self.tokens}, must be {right}"
        end = self.end
        if end is None:
            return "" if self.lost else f"{self.link}: never ended"
        if end.completion_tokens != len(self.tokens) or end.prompt_tokens != len(self.prompt):
            return f"{self.link}: {len(self.tokens)} tokens came, but {end} says otherwise"
        if problem := _problem_of(end.timeline):
            return f"{self.link}: {problem} in {end}"
        if end.reason in ("stop", "length"):
            good = (self.tokens, end.reason) == (right, reason)
            return "" if good else f"{self.link}: {end}, must be {right} {reason}"
        if end.reason == "cancelled":
            return "" if self.rude in ("cancel", "vanish") else f"{self.link}: cancelled by nobody"
        return "" if end.code in codes | ERRORS_OF.get(self.rude, frozenset()) else f"{self.link}: {end}"


ERRORS_OF = {"slow": frozenset(("slow_client",)), "hasty": frozenset(("deadline",))}


def _problem_of(timeline: Timeline) -> str:
    phases = {f: getattr(timeline, f) for f in timeline.__struct_fields__ if f.endswith("_ns")}
    for name, ns in phases.items():
        if ns < 0 or (name != "mover_ns" and ns > timeline.total_ns):
            return name
    return "remote" if timeline.remote and not (timeline.prefill_node and timeline.confirm_ns) else ""


class Cluster:
    def __init__(self, seed: int, plan: Plan, tracing: bool = False) -> None:
        self.plan = plan
        self.world = World(seed, tracing)
        self.bus = Bus(self.world, plan.weather)
        self.agents: dict[str, Mover] = {}
        self.agent_names: dict[str, None] = {}  # all that were ever used
        self.nodes: dict[str, SimNode] = {}
        self.lives: list[SimNode] = []  # all that ever were
        self.clients: list[Client] = []
        self.codes: frozenset[str] = frozenset(("engine",)) if plan.failing_rows else frozenset()
        self._heard: Counter[str] = Counter()
        self._prefills = [f"p{n + 1}" for n in range(plan.prefill_nodes)]
        self._decodes = [f"d{n + 1}" for n in range(plan.decode_nodes)]

    # ------------------------------------------------------------ the play

    def play(self) -> None:
        """Everything, from the start to the last check."""
        world, plan = self.world, self.plan
        for name in self._prefills + self._decodes:
            self._start(name, 1)
        texts = [self._tokens(30) for _ in range(3)]
        for _ in range(plan.requests):
            self._arrive_later(texts)
        for fault in plan.faults:
            if not fault.after:
                world.after(fault.at_ns, partial(self._break, fault.kind, fault.node))
        world.run(plan.horizon_ns)
        self.plan, self.bus.weather = plan.calm(), Weather()
        for node in self.nodes.values():
            node.mover.unstick()
        world.run(self._awake_ns() + END_WITHIN_NS, self._all_over)
        self._judge()
        world.run(self._awake_ns() + SETTLE_NS)
        self._judge()
        self._judge_rest()
        self._probe()

    def _awake_ns(self) -> int:
        """From when on no node pauses."""
        return max(self.world.now, *(node.frozen_until for node in self.nodes.values()))

    def _all_over(self) -> bool:
        return all(client.over for client in self.clients)

    def _start(self, name: str, life: int) -> None:
        role = "prefill" if name in self._prefills else "both" if self.plan.both else "decode"
        node = self.nodes[name] = SimNode(self, name, role, life)
        self.lives.append(node)
        others = self._decodes if self.plan.both else []
        node.start([f"tcp://{p}:7400" for p in self._prefills + others if p != name] if role != "prefill" else [])

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.world.random.randrange(VOCABULARY) for _ in range(count))

    def _arrive_later(self, texts: list[tuple[int, ...]]) -> None:
        world, plan = self.world, self.plan
        prompt = world.random.choice(texts)[: world.random.randint(1, 30)]
        if world.chance(0.3):
            prompt += self._tokens(world.random.randint(1, 6))
        client = Client(self, len(self.clients), prompt, world.chance(plan.rude))
        self.clients.append(client)
        name = world.random.choice(self._decodes)
        at_ns = world.random.randint(plan.warm_ns, plan.warm_ns + (plan.horizon_ns - plan.warm_ns) * 3 // 4)
        world.after(at_ns, lambda: self._arrive(client, name))

    def _arrive(self, client: Client, name: str) -> None:
        node = self.nodes[name]
        if node.over:
            client.lost = True
        else:
            node.enter(lambda: client.ask(node))
            client.node = node

    # ------------------------------------------------------------ faults

    def heard(self, node: SimNode, what: str) -> None:
        self._heard[what] += 1
        for fault in self.plan.faults:
            if (fault.after, fault.nth) == (what, self._heard[what]):
                wait_ms = self.world.random.choice((0, 1, 10))
                self.world.after_ms(0, wait_ms, partial(self._break, fault.kind, fault.node or node.name))

    def _break(self, kind: str, name: str) -> None:
        world, node = self.world, self.nodes[name]
        if node.over or world.now > self.plan.horizon_ns:
            return
        world.counters["faults"] += 1
        world.counters[f"fault {kind}"] += 1
        world.note("fault", f"{kind} {node.name}")
        faults: dict[str, Callable[[SimNode], None]] = {
            "crash": self._crash,
            "worker": self._worker,
            "mover": lambda n: n.mover.die(),
            "cut": self._cut,
            "freeze": self._freeze,
            "drain": lambda n: self._drain(n, ev.DrainAsked()),
            "leave": lambda n: self._drain(n, ev.LeaveAsked()),
            "remove": self._remove,
        }
        faults[kind](node)

    def _crash(self, node: SimNode) -> None:
        node.end(lose=self.world.chance(0.5))
        self._gone(node)

    def exited(self, node: SimNode) -> None:
        """In good order: its last words arrive."""
        node.over = True
        self.world.after(5 * MS, lambda: node.end(lose=False))
        self._gone(node)

    def _gone(self, node: SimNode) -> None:
        for client in self.clients:
            client.lost |= client.node is node and client.end is None
        self.world.after_ms(50, 3000, lambda: self._start(node.name, node.life + 1))

    def _worker(self, node: SimNode) -> None:
        self.codes |= {"engine"}
        node.worker.die()

    def _cut(self, node: SimNode) -> None:
        links = [link for link in self.bus.links if node in (link.opener, link.listener)]
        if links:
            self.bus.cut(self.world.random.choice(links))

    def _freeze(self, node: SimNode) -> None:
        most_ms = 40_000 if self.world.chance(0.1) else 8000  # as long as a lease, or as it takes to be called dead
        node.freeze(self.world.now + self.world.between_ms(100, most_ms))

    def _drain(self, node: SimNode, event: ev.NodeEvent) -> None:
        self.codes |= {"draining", "shutdown"}
        node.enter(lambda: node.post(event))

    def _remove(self, node: SimNode) -> None:
        """An operator takes a prefill node out, and in again."""
        name = self.world.random.choice(self._prefills)
        for decode in (self.nodes[d] for d in self._decodes):
            self._post(decode, ev.RemoveAsked(target=name))
        join = ev.JoinAsked(address=f"tcp://{name}:7400")
        for d in self._decodes:
            self.world.after_ms(1, 3000, lambda d=d: self._post(self.nodes[d], join))

    def _post(self, node: SimNode, event: ev.NodeEvent) -> None:
        node.enter(lambda: node.post(event))

    # ------------------------------------------------------------ what must be true

    def _judge(self) -> None:
        """Every request has ended once, with the right tokens or for a reason."""
        for client in self.clients:
            if problem := client.problem(self.codes):
                raise Violation(problem)
            end = client.end
            if end is not None and end.timeline.attempts > 1 + self._mishaps():
                raise Violation(f"{client.link}: {end.timeline.attempts} attempts after {self._mishaps()} mishaps")

    def _mishaps(self) -> int:
        """How often something went wrong that may cost an attempt."""
        names = ("faults", "weather", "slow read", "stuck read", "failed read", "failed row")
        counters = self.world.counters
        return sum(counters[name] for name in names) + counters["attempt.failed: no_room"]

    def _judge_rest(self) -> None:
        """Nothing is left of what is over."""
        problems = [problem for node in self.nodes.values() for problem in node.problems()]
        if problems:
            raise Violation("; ".join(problems))

    def _probe(self) -> None:
        """Whatever has happened: a prompt that comes now is prefilled remotely, at the first attempt."""
        probes = []
        for name in self._decodes:
            client = Client(self, len(self.clients), self._tokens(9), rude=False)
            self.clients.append(client)
            probes.append(client)
            self._arrive(client, name)
        self.world.run(self.world.now + PROBE_NS, self._all_over)
        for client in probes:
            end = client.end
            problem = client.problem(frozenset())
            if problem or end is None or end.timeline.attempts != 1 or not end.timeline.prefill_node:
                assert client.node is not None
                peers = client.node.core.peers
                members = [(p.name, p.state.value, p.reason, peers.problem(p)) for p in peers.members()]
                raise Violation(f"{problem or 'not fetched'}: {end}; {members}")


def plan_of(seed: int) -> Plan:
    """A plan, drawn by the seed."""
    r = World(seed).random
    warm_ns = r.choice((0, S, S))
    plan = Plan(
        prefill_nodes=r.randint(1, 3),
        decode_nodes=r.randint(1, 2),
        both=r.random() < 0.2,
        requests=r.choice((2, 5, 8, 16)),
        prefill_blocks=r.choice((12, 24, 40)),
        decode_blocks=r.choice((12, 16, 40)),
        batch_tokens=r.choice((3, 16, 64)),
        chunk=r.choice((1, 5, 8, 64)),
        running_max=r.choice((2, 8)),
        skip_sampling=r.random() < 0.2,
        step_ms=r.choice((5, 10, 40)),
        warm_ns=warm_ns,
        horizon_ns=warm_ns + r.choice((S // 4, S, 3 * S)),
        weather=r.choice((Weather(), Weather(0.05, 0.05, 0.05))),
        slow_reads=r.choice((0.0, 0.2)),
        stuck_reads=r.choice((0.0, 0.0, 0.05)),
        failing_reads=r.choice((0.0, 0.1)),
        failing_adds=r.choice((0.0, 0.2)),
        failing_rows=r.choice((0.0, 0.0, 0.02)),
        rude=r.choice((0.0, 0.4)),
    )
    return plan._replace(faults=tuple(_fault(plan, r) for _ in range(r.randint(0, 6))))


def _fault(plan: Plan, r: Random) -> Fault:
    kind = r.choice(FAULTS)
    name = r.choice([f"p{n + 1}" for n in range(plan.prefill_nodes)] + [f"d{n + 1}" for n in range(plan.decode_nodes)])
    if r.random() < 0.4:
        return Fault(kind, name, at_ns=r.randint(plan.warm_ns, plan.horizon_ns))
    return Fault(kind, name if r.random() < 0.5 else "", after=r.choice(MOMENTS), nth=r.randint(1, 6))


def run(seed: int, plan: Plan | None = None, tracing: bool = False) -> Cluster:
    """Play one seed. Raises Violation."""
    cluster = Cluster(seed, plan or plan_of(seed), tracing)
    try:
        cluster.play()
    except Violation as e:
        raise Violation(f"seed {seed}: {e}") from e
    finally:
        if tracing:
            print("\n".join(cluster.world.trace))
    return cluster


def main(argv: list[str]) -> int:
    if argv[:1] != ["--long"]:
        print(plan_of(int(argv[0])))
        run(int(argv[0]), tracing=True)
        return 0
    total: Counter[str] = Counter()
    bad = 0
    first, count = (int(argv[1]), int(argv[2])) if len(argv) > 2 else (0, int(argv[1]))
    for seed in range(first, first + count):
        try:
            total += run(seed).world.counters
        except Violation as e:
            bad += 1
            print(str(e)[:700], flush=True)
    print(dict(sorted(total.items())))
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
