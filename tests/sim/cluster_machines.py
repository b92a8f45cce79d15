"""The worker and the mover of a simulated node, over an abstract slab.

A slot of the slab holds a number that stands for the prefix whose last token's KV was written there, and the next
token is a function of all numbers that the worker reads through its block table. So KV that is wrong, stale or of
somebody else makes a wrong token. Steps and reads take time, and write at any moment of it: whoever gave a block away
too early is caught in the act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdbus.bus.messages import Agent, Sampling
from pdbus.bus.wire import unpack_u32
from pdbus.connector.handoff import Holder
from pdbus.connector.ipc import RowResult, StepRow
from pdbus.nodes import events as ev
from pdbus.nodes.replay.explore.search import Violation

from .cluster_world import MS, S, World

if TYPE_CHECKING:
    from .cluster_node import SimNode

VOCABULARY = 1009


def prefixes(tokens: Sequence[int], known: list[int]) -> list[int]:
    """The number of every prefix of `tokens`, `known` being that of the first ones."""
    numbers = list(known)
    for token in tokens[len(numbers) :]:
        numbers.append(hash((numbers[-1] if numbers else 0, token)))
    return numbers


def next_token(read: Sequence[int]) -> int:
    """What follows, by the KV read."""
    return hash(tuple(read)) % VOCABULARY


def oracle(prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], str]:
    """The whole answer as one node without any failure gives it, and how it ends."""
    numbers = prefixes(prompt, [])
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        answer.append(next_token(numbers))
        numbers = prefixes([*prompt, *answer], numbers)
        if answer[-1] in sampling.stop_token_ids:
            return answer, "stop"
    return answer, "length"


# ---------------------------------------------------------------- the worker


@dataclass
class Tokens:
    """A worker's sequence."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Worker:
    """Obeys ipc.py to the letter, and calls a Violation whatever a real engine could not do."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.world: World = node.world
        self.life = 0
        self.ready = False
        self.running = False
        self._sequences: dict[int, Tokens] = {}
        self._stepping = False
        self._told: list[Callable[[], None]] = []  # while a step runs

    def start(self, wait_ns: int = 0) -> None:
        self.life += 1
        life = self.life
        self.running = True

        def come_up() -> None:
            if self.life == life and self.running:
                self.ready = True
                self.node.post(ev.WorkerUp())

        self.world.after(wait_ns + self.world.between_ms(20, 400), lambda: self.node.enter(come_up))

    def die(self, problem: str = "killed") -> None:
        """At once; control learns of it when it has reaped it."""
        if not self.running:
            return
        self.running = self.ready = self._stepping = False
        self.life += 1
        self._sequences.clear()
        self._told.clear()
        self.world.after_ms(0.1, 10, lambda: self.node.enter(lambda: self._reaped(problem)))

    def _reaped(self, problem: str) -> None:
        """What nobody holds is worth nothing afterwards."""
        self.node.post(ev.WorkerLost(problem=problem))
        pool, size = self.node.core.pool, self.node.block_size
        for block in range(pool.blocks):
            if not pool.holders(block):
                self.node.slab[block * size : (block + 1) * size] = [0] * size

    # ------------------------------------------------------------ messages

    def tell(self, do: Callable[[], None]) -> None:
        """Messages before it is ready are lost; those that come while a step runs wait for its end."""
        if self.ready:
            self._told.append(do)
            self._obey()

    def _obey(self) -> None:
        while self._told and not self._stepping:
            self._told.pop(0)()

    def open(self, seq: int, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        if seq in self._sequences:
            raise Violation(f"{self.node.name}: sequence {seq} is opened twice")
        self._sequences[seq] = Tokens([*prompt, *tokens])

    def force(self, seq: int, token: int) -> None:
        self._sequences[seq].tokens.append(token)

    def close(self, seq: int) -> None:
        self._sequences.pop(seq, None)

    def open_sequences(self) -> list[int]:
        return list(self._sequences)

    def step(self, step: int, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._check(row)
        self._stepping = True
        life, begin = self.life, self.world.between_ms(0.1, 2)
        took = (
            begin + self.world.between_ms(1, self.node.cluster.plan.step_ms) + sum(row.count for row in rows) * MS // 4
        )
        for row in rows:
            self.world.after(self.world.random.randint(begin, took), lambda r=row: self._alive(life, self._write, r))
        self.world.after(took, lambda: self._alive(life, self._finish, step, rows, took))

    def _alive(self, life: int, do: Callable[..., None], *arguments: object) -> None:
        if self.life == life:
            do(*arguments)

    def _check(self, row: StepRow) -> None:
        """The row is possible, and the table is the scheduler's."""
        sequence = self._sequences.get(row.seq)
        if sequence is None:
            raise Violation(f"{self.node.name}: a step of sequence {row.seq}, which is not open")
        if row.reset:
            self.world.counters["computed again"] += bool(sequence.table)
            sequence.table.clear()
        sequence.table += unpack_u32(row.new_blocks)
        end, known = row.start + row.count, len(sequence.tokens)
        planned = self.node.core.scheduler.get(row.seq)
        if planned is None or planned.blocks != sequence.table:
            raise Violation(f"{self.node.name}: the worker's table of {row.seq} is not the scheduler's")
        if row.start < 0 or row.count < 1 or end > known or (row.sample and end != known):
            raise Violation(f"{self.node.name}: {row} is impossible with {known} tokens known")
        if end > len(sequence.table) * self.node.block_size:
            raise Violation(f"{self.node.name}: {row} has no blocks for its positions")

    def _write(self, row: StepRow) -> None:
        sequence = self._sequences[row.seq]
        sequence.numbers = prefixes(sequence.tokens, sequence.numbers)
        pool, size = self.node.core.pool, self.node.block_size
        for position in range(row.start, row.start + row.count):
            block = sequence.table[position // size]
            if not pool.holders(block).get(Holder.IN_STEP):
                raise Violation(f"{self.node.name}: a step wrote block {block} after it was given away")
            if pool._hash[block] is not None:
                raise Violation(f"{self.node.name}: a step wrote block {block}, which is shared")
            self.node.slab[block * size + position % size] = sequence.numbers[position]

    def _finish(self, step: int, rows: Sequence[StepRow], took: int) -> None:
        results = tuple(self._result(row) for row in rows)
        self._stepping = False
        self._obey()
        self.node.enter(lambda: self.node.step_done(step, results, took))

    def _result(self, row: StepRow) -> RowResult:
        sequence = self._sequences[row.seq]
        if not row.sample:
            return RowResult(seq=row.seq)
        end, size, slab = row.start + row.count, self.node.block_size, self.node.slab
        read = [slab[sequence.table[p // size] * size + p % size] for p in range(end)]
        if read != sequence.numbers[:end]:
            wrong = next(p for p in range(end) if read[p] != sequence.numbers[p])
            if self.node.core.scheduler.get(row.seq) is not None:
                raise Violation(f"{self.node.name}: sequence {row.seq}: wrong KV at position {wrong} of {end}")
            self.world.counters["wrong KV of a sequence that is over"] += 1
        token = next_token(read)
        sequence.tokens.append(token)
        return RowResult(seq=row.seq, token=token)


# ---------------------------------------------------------------- the mover


class Mover:
    """Reads block by block: each is sampled at the owner at one time and lands here at a later one."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.world: World = node.world
        self.agents: dict[str, Mover] = node.cluster.agents
        self.life = 0
        self.running = False
        self.ready = False
        self.agent_name = ""
        self.advertised = 0
        self.peers: dict[str, str] = {}  # by what control calls it: its agent's name
        self._reads: dict[int, str] = {}
        self._stopping = False
        self._stuck = False  # a read of this life will never end

    def start(self, agent_name: str, epoch: int, wait_ns: int = 0) -> None:
        self.life += 1
        life = self.life
        self.running, self._stopping, self._stuck = True, False, False
        self.agent_name, self.advertised = agent_name, 0

        def come_up() -> None:
            if self.life == life and self.running:
                if agent_name in self.node.cluster.agent_names:
                    raise Violation(f"the agent name {agent_name} is used twice")
                self.node.cluster.agent_names[agent_name] = None
                self.agents[agent_name] = self
                self.ready = True
                self.node.post(ev.MoverUp(agents=(Agent(epoch=epoch, name=agent_name, blocks=self.node.blocks),)))

        self.world.after(wait_ns + self.world.between_ms(10, 200), lambda: self.node.enter(come_up))

    def die(self, asked: bool = False) -> None:
        """Its reads write no more from now on; control learns of it when it has reaped it."""
        if not self.running:
            return
        self.running = self.ready = self._stopping = False
        self.life += 1
        self.agents.pop(self.agent_name, None)
        self.peers.clear()
        self._reads.clear()
        self.world.after_ms(0.1, 10, lambda: self.node.enter(lambda: self.node.mover_exited(asked)))

    def stop(self) -> None:
        """In good order: as soon as its own reads allow, after 2 s at the latest."""
        self._stopping = True
        life = self.life
        self.world.after(2 * S, lambda: self.die(asked=True) if self.life == life else None)
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._stopping and not self._reads:
            life = self.life
            self.world.after_ms(0.1, 5, lambda: self.die(asked=True) if self.life == life else None)

    # ------------------------------------------------------------ messages

    def add_peer(self, peer: str, agent: Agent) -> None:
        if not self.ready:
            return
        if peer in self.peers:
            raise Violation(f"{self.node.name}: the mover is told of {peer} twice")
        life, alive = (
            self.life,
            agent.name in self.agents and not self.world.chance(self.node.cluster.plan.failing_adds),
        )
        self.peers[peer] = agent.name

        def added() -> None:
            if self.life != life or peer not in self.peers:
                return
            problem = "" if alive or self.world.chance(0.5) else "cannot be reached"
            if problem:
                del self.peers[peer]
            self.node.enter(lambda: self.node.post(ev.PeerAddEnded(peer=peer, problem=problem)))

        self.world.after_ms(*((1, 30) if alive else (500, 1000)), added)

    def remove_peer(self, peer: str) -> None:
        self.peers.pop(peer, None)

    def read(self, read: int, peer: str, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        if not self.ready:
            return
        owner_name = self.peers.get(peer)
        if owner_name is None or self._stopping:
            self._tell(ev.ReadEnded(read=read, problem="no such peer"))
            return
        self._reads[read] = owner_name
        world, plan = self.world, self.node.cluster.plan
        begin = world.between_ms(0.1, 2)
        end = begin + world.between_ms(0.5, 20)
        if world.chance(plan.slow_reads):
            world.counters["slow read"] += 1
            end += world.between_ms(1000, 6000)
            if world.chance(0.3):
                world.after(world.random.randint(begin, end), lambda: self._doubt(read))
        if world.chance(plan.stuck_reads):
            world.counters["stuck read"] += 1
            self._stuck = True
            return
        pairs: deque[tuple[int, int]] = deque(zip(source, target, strict=True))
        fails = world.chance(plan.failing_reads)
        world.after(begin, lambda: self._piece(self.life, read, pairs, end - begin, fails))

    # ------------------------------------------------------------ a read's progress

    def _piece(self, life: int, read: int, pairs: deque[tuple[int, int]], left_ns: int, fails: bool) -> None:
        """Sample one block, land it later, go on."""
        if self.life != life or read not in self._reads:
            return
        owner = self.agents.get(self._reads[read])
        if owner is None or (fails and len(pairs) == 1):
            self.world.counters["failed read"] += 1
            self.world.after_ms(0.1, 300, lambda: self._end(life, read, "remote disconnect"))
            return
        source, target = pairs.popleft()
        size = self.node.block_size
        sampled = owner.node.slab[source * size : (source + 1) * size]
        wait = self.world.random.randint(0, left_ns)

        def land() -> None:
            if self.life != life:
                return
            if not self.node.core.pool.holders(target).get(Holder.IN_FLIGHT):
                raise Violation(f"{self.node.name}: a read wrote block {target} after it was given away")
            self.node.slab[target * size : (target + 1) * size] = sampled
            if pairs:
                self._piece(life, read, pairs, left_ns - wait, fails)
            else:
                self._end(life, read, "")

        self.world.after(wait, land)

    def _end(self, life: int, read: int, problem: str) -> None:
        if self.life == life and self._reads.pop(read, None) is not None:
            self._tell(ev.ReadEnded(read=read, problem=problem, bytes=1, transfer_ns=1))
            self._stop_if_idle()

    def unstick(self) -> None:
        """Nothing but the end of this mover ends what is stuck."""
        if self._stuck:
            self.die()

    def _doubt(self, read: int) -> None:
        if read in self._reads:
            self._tell(ev.ReadDoubtful(read=read, problem="something odd"))

    def _tell(self, event: ev.NodeEvent) -> None:
        life = self.life
        self.world.after_ms(
            0.05, 0.5, lambda: self.node.enter(lambda: self.node.post(event) if self.life == life else None)
        )
