"""A few whole nodes and the network between them as a model: what can happen next, anywhere, and what it leads to.

A state is a handful of small numbers: nodes, messages and reads are interned. A node is only ever copied, told one
thing and interned again, and what came of it is remembered, so that the same node told the same thing costs one
look-up; the nodes' own states are few where the cluster's are many.

Each node has a clock of its own. Events take no time; a clock moves when a timer fires. Where something else could
still happen that costs a fault: either this clock runs ahead, or everything else is late. Where nothing else can, time
goes on for all nodes alike to the earliest timer. A handshake happens at one go once its hello has arrived.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

from pdbus.bus.messages import (
    Agent,
    Hello,
    LeaseReleased,
    LeaseRenewed,
    PrefillFailed,
    PrefillProgress,
    Welcome,
)

from .interned import Interned, with_one, without
from .scenario import Scenario
from .search import Violation
from .shell import Shell
from .things import Outputs, Packet, Read, request_id

GREETINGS = (Hello, Welcome, Agent)

What = tuple[Any, ...]  # the name of a shell's method, and its arguments


class State(NamedTuple):
    nodes: tuple[int, ...]  # prefill nodes, then decode nodes
    net: tuple[int, ...] = ()  # sorted: order on the way means nothing
    reads: tuple[int, ...] = ()
    done: tuple[int, ...] = ()  # leases that ended so
    asked: int = 0  # requests
    faults: int = 0
    costly: int = 0  # faults that may cost an attempt
    cancelled: bool = False


class Move(NamedTuple):
    """One thing that can happen: the node at this place is told `item`, or `item` is a packet or a read."""

    kind: str
    place: int = -1
    item: int = -1
    faults: int = 0
    costly: int = 0


class Effect(NamedTuple):
    """What came of telling a node something."""

    node: int
    packets: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    valid: tuple[int, ...] = ()
    reads_end: bool = False


class Menu(NamedTuple):
    """What a node can do by itself, and how it stands."""

    work: tuple[int, ...]
    step_fails: tuple[int, ...]
    timer: int | None
    clean: bool
    quarantined: tuple[int, ...]  # open reads that nobody waits for


class Cluster:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.names = [f"p{n}" for n in range(scenario.prefill)] + [f"d{n}" for n in range(scenario.decode)]
        self._nodes: Interned[Shell] = Interned()
        self._blobs: list[bytes] = []
        self._menus: list[Menu] = []
        self._packets: Interned[Packet] = Interned()
        self._reads: Interned[Read] = Interned()
        self._leases: Interned[Any] = Interned()
        self._whats: Interned[What] = Interned()
        self._deliver: dict[int, tuple[int, int]] = {}  # packet -> (place, what)
        self._told: dict[tuple[int, int], Effect] = {}
        self._inert: dict[tuple[int, int], bool] = {}  # (packet, decode node)

    # ------------------------------------------------------------ states

    def initial(self) -> State:
        """All nodes have met, and the first request is asked."""
        state = State(tuple(self._intern(self._born(name, 1)) for name in self.names))
        for d in range(self.scenario.prefill, len(self.names)):
            for p in range(self.scenario.prefill):
                state = self._settle(state, d, self._what("join", self.shell(state, p).address))
        return self.apply(state, self._ask(state))

    def shell(self, state: State, place: int) -> Shell:
        return self._nodes.values[state.nodes[place]]

    def outcome(self, state: State) -> str:
        over = not state.net and not state.reads and state.asked == self.scenario.requests
        if not over or not all(self._menus[node].clean for node in state.nodes):
            return ""
        return ", ".join(self._ended(state, number) or "lost" for number in range(state.asked))

    def _ended(self, state: State, number: int) -> str:
        """How a request ended, '' when it has not, or its node died with it."""
        shell = self.shell(state, self._asks(number))
        answer = shell.answers.get(request_id(number, shell.life))
        return answer.outcome if answer else ""

    def _asks(self, number: int) -> int:
        """The place of the decode node that a request goes to."""
        return self.scenario.prefill + number % self.scenario.decode

    # ------------------------------------------------------------ what can happen

    def moves(self, state: State) -> list[Move]:
        moves = [*self._work(state), *self._deliveries(state), *self._read_moves(state)]
        if state.asked < self.scenario.requests:
            moves.append(self._ask(state))
        idle = not moves
        moves += self._ticks(state, idle)
        if self.scenario.cancel and not state.cancelled and self._is_live(state, 0):
            moves.append(Move("cancel", self._asks(0), self._what("cancel", 0)))
        if state.faults < self.scenario.faults:
            moves += self._faults(state)
        return moves

    def _ask(self, state: State) -> Move:
        return Move("ask", self._asks(state.asked), self._what("ask", state.asked))

    def _is_live(self, state: State, number: int) -> bool:
        shell = self.shell(state, self._asks(number))
        answer = shell.answers.get(request_id(number, shell.life))
        return answer is not None and not answer.outcome

    def _work(self, state: State) -> Iterator[Move]:
        for place, node in enumerate(state.nodes):
            for what in self._menus[node].work:
                yield Move("work", place, what)

    def _deliveries(self, state: State) -> Iterator[Move]:
        for packet in dict.fromkeys(state.net):
            yield Move("deliver", item=packet)

    def _read_moves(self, state: State) -> Iterator[Move]:
        for item in state.reads:
            read = self._reads.values[item]
            if read.content is not None:
                yield Move("land", item=item)
                continue
            place = self.names.index(read.owner)
            owner = self.shell(state, place)
            if owner.incarnation == read.incarnation and owner.mover_up and owner.mover_epoch == read.epoch:
                yield Move("sample", place, item)
            else:
                yield Move("fail", item=item)

    def _ticks(self, state: State, idle: bool) -> Iterator[Move]:
        """When idle the earliest are free; any other at the cost of a fault."""
        timers = [(timer, place) for place, node in enumerate(state.nodes) if (timer := self._timer(node)) is not None]
        if not timers:
            return
        earliest = min(timers)[0]
        spurious = state.faults < self.scenario.faults and "expiry" in self.scenario.kinds
        for timer, place in timers:
            if idle and timer == earliest:
                yield Move("time passes", place, timer)
            elif spurious:
                yield Move("expiry", place, self._what("tick"), 1, 1)

    def _timer(self, node: int) -> int | None:
        return self._menus[node].timer

    def _faults(self, state: State) -> Iterator[Move]:
        kinds = self.scenario.kinds
        for item in dict.fromkeys(state.net):
            if not isinstance(self._packets.values[item].message, (Hello, Agent)):  # said until answered
                if "drop" in kinds:
                    yield Move("drop", item=item, faults=1)
                if "duplicate" in kinds:
                    yield Move("duplicate", item=item, faults=1)
        for item in state.reads if "read" in kinds else ():
            yield Move("fail", item=item, faults=1, costly=1)
        for place, node in enumerate(state.nodes):
            yield from self._deaths(state, place)
            for what in self._menus[node].step_fails if "step" in kinds else ():
                yield Move("step fails", place, what, 1, 1)

    def _deaths(self, state: State, place: int) -> Iterator[Move]:
        kinds, shell = self.scenario.kinds, self.shell(state, place)
        if "crash" in kinds and (state.net or "restart" not in kinds):
            yield Move("crash", place, faults=1, costly=1)
        if "restart" in kinds:
            yield Move("restart", place, faults=1, costly=1)
        if "worker" in kinds and shell.worker_up:
            yield Move("worker dies", place, self._what("worker_dies"), 1, 1)
        if "mover" in kinds and shell.mover_up and (place < self.scenario.prefill or state.reads):
            yield Move("mover dies", place, self._what("mover_dies"), 1, 1)

    # ------------------------------------------------------------ what it leads to

    def apply(self, state: State, move: Move) -> State:
        """The state after a move. Raises Violation."""
        return self._checked(self._after(state, move))

    def _after(self, state: State, move: Move) -> State:
        kind, place, item = move.kind, move.place, move.item
        state = state._replace(faults=state.faults + move.faults, costly=state.costly + move.costly)
        match kind:
            case "deliver":
                place, what = self._deliver[item]
                state = state._replace(net=without(state.net, item))
                greets = isinstance(self._packets.values[item].message, Hello)
                return self._settle(state, place, what) if greets else self._tell(state, place, what)
            case "drop":
                return state._replace(net=without(state.net, item))
            case "duplicate":
                return state._replace(net=tuple(sorted((*state.net, item))))
            case "sample":
                return state._replace(reads=with_one(without(state.reads, item), self._sampled(item, state, place)))
            case "land" | "fail":
                read = self._reads.values[item]
                state = state._replace(reads=without(state.reads, item))
                return self._tell(state, self.names.index(read.reader), self._what(kind, read))
            case "crash" | "restart":
                return self._reborn(state, place, keep=kind == "restart")
            case "time passes":
                return self._pass(state, place, item)
            case "ask":
                state = state._replace(asked=state.asked + 1)
            case "cancel":
                state = state._replace(cancelled=True)
        return self._tell(state, place, item)

    def _checked(self, state: State) -> State:
        """What a fault may cost: one attempt, and nothing if it was only a message."""
        allowed = state.costly if state.faults == 1 else state.faults
        for place in range(self.scenario.prefill, len(self.names)):
            for answer in self.shell(state, place).answers.values():
                if answer.failed > allowed:
                    cost = f"{state.faults} faults, {state.costly} of them costly"
                    raise Violation(f"{answer.failed} attempts failed after {cost}")
        return state

    def _pass(self, state: State, place: int, ns: int) -> State:
        """Time goes on for all, and a timer fires on one."""
        for other in range(len(self.names)) if ns else ():
            state = self._tell(state, other, self._what("wait", ns))
        return self._tell(state, place, self._what("tick"))

    def _tell(self, state: State, place: int, what: int) -> State:
        """One node is told one thing; its messages and reads are under way afterwards."""
        effect = self._effect(state.nodes[place], what)
        return self._trimmed(self._merged(state, place, effect, effect.packets))

    def _settle(self, state: State, place: int, what: int) -> State:
        """One node is told one thing, and the handshake that follows happens at once."""
        pending = [(place, what)]
        while pending:
            place, what = pending.pop(0)
            effect = self._effect(state.nodes[place], what)
            greetings = [p for p in effect.packets if isinstance(self._packets.values[p].message, GREETINGS)]
            state = self._merged(state, place, effect, tuple(p for p in effect.packets if p not in greetings))
            pending += [self._deliver[packet] for packet in greetings]
        return self._trimmed(state)

    def _merged(self, state: State, place: int, effect: Effect, packets: tuple[int, ...]) -> State:
        nodes = (*state.nodes[:place], effect.node, *state.nodes[place + 1 :])
        net = tuple(sorted(state.net + packets)) if packets else state.net
        reads = tuple(sorted(state.reads + effect.reads)) if effect.reads else state.reads
        if effect.reads_end:
            reads = self._without_reader(reads, self.names[place])
        done = tuple(sorted({*state.done, *effect.done})) if effect.done else state.done
        for lease in effect.valid:
            if lease not in done:
                raise Violation("KV was taken as valid under a lease that was not held when its claim came")
        return state._replace(nodes=nodes, net=net, reads=reads, done=done)

    def _without_reader(self, reads: tuple[int, ...], name: str) -> tuple[int, ...]:
        return tuple(read for read in reads if self._reads.values[read].reader != name)

    def _reborn(self, state: State, place: int, keep: bool) -> State:
        """A new life comes up and says hello; what was on its way to the old one reaches it, or is lost."""
        name = self.names[place]
        shell = self._born(name, self.shell(state, place).life + 1)
        nodes = (*state.nodes[:place], self._intern(shell), *state.nodes[place + 1 :])
        packets = self._packets.values
        net = state.net if keep else tuple(p for p in state.net if name not in (packets[p].to, packets[p].header.from_))
        state = state._replace(nodes=nodes, net=net, reads=self._without_reader(state.reads, name))
        others = range(self.scenario.prefill, len(self.names)) if not shell.decodes else range(self.scenario.prefill)
        for other in others:
            state = self._tell(state, place, self._what("join", self.shell(state, other).address))
        return self._trimmed(state)

    def _sampled(self, item: int, state: State, place: int) -> int:
        owner, read = self.shell(state, place), self._reads.values[item]
        content = tuple(owner.memory.get(block) for block in read.source)
        return self._reads.id(read._replace(content=content), read._replace(content=content))

    # ------------------------------------------------------------ what changes nothing any more

    def _trimmed(self, state: State) -> State:
        net = tuple(p for p in state.net if not self._is_lost(state, p)) if state.net else ()
        reads = state.reads
        for place in range(self.scenario.prefill, len(self.names)) if reads else ():
            left = self._menus[state.nodes[place]].quarantined
            if left:
                reads = tuple(sorted(self._garbage(read, self.names[place], left) for read in reads))
        return state if (net, reads) == (state.net, state.reads) else state._replace(net=net, reads=reads)

    def _garbage(self, item: int, name: str, left: tuple[int, ...]) -> int:
        """What a quarantined read has sampled is nobody's business."""
        read = self._reads.values[item]
        if read.reader != name or read.read not in left:
            return item
        garbage = read._replace(content=(None,) * len(read.target))
        return self._reads.id(garbage, garbage)

    def _is_lost(self, state: State, item: int) -> bool:
        """On a link that its opener has closed or took with it, or about an attempt that is over."""
        packet, place = self._packets.values[item], self._deliver[item][0]
        if not packet.inbound and packet.link not in self.shell(state, place).open:
            return True
        return self._is_inert(item, state.nodes[place])

    def _is_inert(self, item: int, node: int) -> bool:
        """The real machine agrees that it changes nothing and needs no answer."""
        inert = self._inert.get((item, node))
        if inert is None:
            inert = _is_of_the_past(self._packets.values[item], self._nodes.values[node])
            if inert:
                try:
                    inert = self._run(node, self._deliver[item][1]) == Effect(node)
                except Violation:
                    inert = False  # to be found by delivering it
            self._inert[item, node] = inert
        return inert

    # ------------------------------------------------------------ numbers for things

    def _effect(self, node: int, what: int) -> Effect:
        """What comes of telling a node something; once found it is remembered."""
        return self._told.get((node, what)) or self._run(node, what)

    def _run(self, node: int, what: int) -> Effect:
        shell = self._copy(node)
        outputs = self._do(shell, what)
        packets = tuple(self._packet(packet) for packet in outputs.packets)
        reads = tuple(self._reads.id(read, read) for read in outputs.reads)
        done = tuple(self._leases.id(lease, lease) for lease in outputs.done)
        valid = tuple(self._leases.id(lease, lease) for lease in outputs.valid)
        effect = Effect(self._intern(shell), packets, reads, done, valid, outputs.reads_end)
        self._told[node, what] = effect
        return effect

    def _copy(self, node: int) -> Shell:
        return pickle.loads(self._blobs[node])  # type: ignore[no-any-return]  # noqa: S301 (our own)

    def _do(self, shell: Shell, what: int) -> Outputs:
        method, *arguments = self._whats.values[what]
        return getattr(shell, method)(*arguments)  # type: ignore[no-any-return]

    def _what(self, *what: Any) -> int:
        return self._whats.id(what, what)

    def _packet(self, packet: Packet) -> int:
        number = self._packets.id(packet, packet)
        if number not in self._deliver:
            self._deliver[number] = self.names.index(packet.to), self._what("deliver", packet)
        return number

    def _intern(self, shell: Shell) -> int:
        number = self._nodes.id(self._key(shell), shell)
        if number == len(self._blobs):
            self._blobs.append(pickle.dumps(shell, pickle.HIGHEST_PROTOCOL))
            self._menus.append(self._menu(shell))
        return number

    def _key(self, shell: Shell) -> Any:
        return shell.key()

    def _menu(self, shell: Shell) -> Menu:
        rows = shell.core.fetches.transfers.rows()
        return Menu(
            work=tuple(self._what(*what) for what in shell.work()),
            step_fails=tuple(self._what("step_ends", seq) for seq in shell.rows()),
            timer=shell.timer(),
            clean=shell.clean(),
            quarantined=tuple(row["read"] for row in rows if row["state"] == "quarantined"),
        )

    def _born(self, name: str, life: int) -> Shell:
        """A life whose own processes are up."""
        shell = self._new(name, life)
        shell.worker_comes()
        shell.mover_comes()
        return shell

    def _new(self, name: str, life: int) -> Shell:
        return Shell(self.scenario, name, life)

    def describe(self, move: Move) -> str:
        """In words, for a trace."""
        words = [self.names[move.place]] if move.place >= 0 else []
        words.append(move.kind)
        if move.kind in ("deliver", "drop", "duplicate"):
            words.append(str(self._packets.values[move.item]))
        elif move.kind in ("land", "fail", "sample"):
            read = self._reads.values[move.item]
            words.append(f"read {read.read} of {read.reader}")
        elif move.kind == "time passes":
            words.append(f"{move.item / 1e9:g} s")
        elif move.item >= 0:
            words += [str(part) for part in self._whats.values[move.item]]
        return " ".join(words) + (" (fault)" if move.faults else "")


def _is_of_the_past(packet: Packet, shell: Shell) -> bool:
    """What is said about an attempt that is over, but for what has to be answered by a cancel."""
    message = packet.message
    if not isinstance(message, (PrefillProgress, PrefillFailed, LeaseReleased, LeaseRenewed)):
        return False
    tries = [entry.try_ for entry in message.entries] if isinstance(message, LeaseRenewed) else [message.try_]
    for try_ in tries:
        r = shell.core.requests.get(try_.request)
        if r is not None and r.attempts <= try_.attempt:
            return False
    return True
