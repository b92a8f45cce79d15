"""A model network of real machines: what can happen next, anywhere, and what it leads to.

A `State` is a handful of small numbers: nodes, messages and reads are interned. A node is only ever copied, told one
thing and interned again, and what it did is remembered, so that the same node told the same thing costs one look-up;
the nodes' own states are few where the network's are many.

Time does not pass. Events happen at time 0 and a timer that fires is moved into the past, alone. A timer costs a
fault where something else could still happen; where nothing else can, renewals and then the earliest other one fire
for free, which is what the clocks would do.

Left out because they change nothing: what comes to a decode node about an attempt that is over and gets no answer,
and what a quarantined read has sampled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import LeaseReleased, LeaseRenew, LeaseRenewed, PrefillFailed, PrefillProgress, StalePeer
from pdbus.connector.attempt import Clock
from pdbus.connector.ledger import Clock as LedgerClock
from pdbus.nodes.replay.explore.interned import Interned, with_one, without
from pdbus.nodes.replay.explore.search import Violation

from tests.sim.nodes import CONFIG, DecodeNode, Hello, Node, Outputs, Packet, PrefillNode, Read, canonical


class State(NamedTuple):
    nodes: tuple[int, ...]  # prefill nodes, then the decode node
    net: tuple[int, ...]  # sorted: order on the way means nothing
    reads: tuple[int, ...] = ()
    faults: int = 0
    costly: int = 0  # faults that may cost an attempt
    renewed: bool = False  # nothing has happened since the last idle renewal but that renewal
    cancelled: bool = False


class Move(NamedTuple):
    """One thing that can happen: a node at this place is told `item`, or `item` is a packet or a read."""

    kind: str
    place: int = -1
    item: int = -1
    faults: int = 0
    costly: int = 0


class Plan(NamedTuple):
    """What is explored."""

    prefill_nodes: int = 2
    prompt_blocks: int = 2
    have: int = 0
    prefill_pool: int = 4
    decode_pool: int = 6
    attempts_max: int = 3
    faults_max: int = 1
    cancel: bool = True
    renew: bool = False  # at any time, as well as when idle
    reborn: bool = False  # a decode node that crashed runs the same request again
    only: tuple[str, ...] = ()  # these kinds of faults; () for all


What = tuple[Any, ...]  # the name of a node's method, and its arguments


class Timer(NamedTuple):
    at: int
    what: int
    costly: bool  # may end an attempt when it fires without need


class Menu(NamedTuple):
    """What a node can do by itself, and go wrong with."""

    work: tuple[int, ...]
    failures: tuple[int, ...]
    renewals: tuple[Timer, ...]
    others: tuple[Timer, ...]
    quarantined: tuple[int, ...]  # open reads that nobody waits for
    clean: bool


class Effect(NamedTuple):
    """What came of telling a node something."""

    node: int
    packets: tuple[int, ...]
    reads: tuple[int, ...]


class Network:
    """All that can happen between one decode node with one request and some prefill nodes."""

    def __init__(
        self, plan: Plan, prefill: type[PrefillNode] = PrefillNode, decode: type[DecodeNode] = DecodeNode
    ) -> None:
        self.plan = plan
        self._prefill, self._decode = prefill, decode
        self.names = [f"p{n}" for n in range(plan.prefill_nodes)] + ["d"]
        self._d = plan.prefill_nodes
        self._nodes: Interned[Node] = Interned()
        self._blobs: list[bytes] = []
        self._menus: list[Menu] = []
        self._packets: Interned[Packet] = Interned()
        self._reads: Interned[Read] = Interned()
        self._whats: Interned[What] = Interned()
        self._deliver: dict[int, tuple[int, int]] = {}  # packet -> (place, what)
        self._told: dict[tuple[int, int], Effect] = {}
        self._inert: dict[tuple[int, int], bool] = {}  # (packet, decode node)

    # ------------------------------------------------------------ states

    def initial(self) -> State:
        nodes = [self._intern(self._new_prefill(name, b"1")) for name in self.names[:-1]]
        nodes.append(self._intern(self._new_decode(b"1")))
        return self._tell(State(nodes=tuple(nodes), net=()), self._d, self._what("start"))

    def prefill(self, state: State, place: int) -> PrefillNode:
        node = self._nodes.values[state.nodes[place]]
        assert isinstance(node, PrefillNode)
        return node

    def decode(self, state: State) -> DecodeNode:
        node = self._nodes.values[state.nodes[-1]]
        assert isinstance(node, DecodeNode)
        return node

    def outcome(self, state: State) -> str:
        """How it ended; '' where something is left anywhere."""
        if state.net or state.reads or not all(self._menus[node].clean for node in state.nodes):
            return ""
        return self.decode(state).outcome

    def _check(self, state: State) -> None:
        """What one fault may cost: at most one attempt, and nothing if it was only a message or a timer.

        An attempt that has to return to a prefill node may do so before it has heard that the node is a new one.
        """
        if self.plan.prefill_nodes <= min(state.faults, self.plan.attempts_max - 1):
            return
        decode = self.decode(state)
        used = decode.attempt + (decode.outcome == "local")
        if used > 1 + (state.costly if state.faults == 1 else state.faults):
            raise Violation(f"{used} attempts after {state.faults} faults, {state.costly} of them costly")

    # ------------------------------------------------------------ what can happen

    def moves(self, state: State) -> list[Move]:
        """Everything that can happen next."""
        moves = [*self._work(state), *self._deliveries(state), *self._read_moves(state)]
        idle = not moves
        if self.plan.cancel and not state.cancelled and not self.decode(state).outcome:
            moves.append(Move("cancel", self._d, self._what("cancel")))
        moves += self._renewals(state, idle)
        moves += self._timeouts(state, idle)
        if state.faults < self.plan.faults_max:
            moves += (move for move in self._faults(state) if self._allowed(move.kind))
        return moves

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
            owner = self.prefill(state, place)
            alive = owner.incarnation == read.incarnation
            if alive:
                yield Move("sample", place, item=item)
            if not alive or owner.epoch != read.epoch:
                yield Move("fail", item=item)

    def _renewals(self, state: State, idle: bool) -> Iterator[Move]:
        """One at a time; when idle, once until something else has happened."""
        said = (LeaseRenew, LeaseRenewed, StalePeer)  # a renewal and its answers
        packets = self._packets.values
        if (state.renewed if idle else not self.plan.renew) or any(
            isinstance(packets[item].message, said) for item in state.net
        ):
            return
        for timer in self._menus[state.nodes[-1]].renewals:
            yield Move("renew when idle" if idle else "renew", self._d, timer.what)

    def _timeouts(self, state: State, idle: bool) -> Iterator[Move]:
        """When idle and renewed the earliest are free; any other at the cost of a fault."""
        free = idle and (state.renewed or not self._menus[state.nodes[-1]].renewals)
        spurious = state.faults < self.plan.faults_max and self._allowed("time out")
        if not free and not spurious:
            return
        timers = [(timer, place) for place, node in enumerate(state.nodes) for timer in self._menus[node].others]
        earliest = min((timer.at for timer, _ in timers), default=0)
        for timer, place in timers:
            if free and timer.at == earliest:
                yield Move("time out", place, timer.what)
            elif spurious:
                yield Move("time out", place, timer.what, 1, timer.costly)

    def _allowed(self, kind: str) -> bool:
        return not self.plan.only or kind in self.plan.only

    def _faults(self, state: State) -> Iterator[Move]:
        for item in dict.fromkeys(state.net):
            if not isinstance(self._packets.values[item].message, Hello):  # said until answered
                yield Move("lose", item=item, faults=1)
                yield Move("double", item=item, faults=1)
        for item in state.reads:
            yield Move("fail", item=item, faults=1, costly=1)
        for place in range(self._d):
            yield Move("crash", place, faults=1, costly=1)
            if state.net:
                yield Move("crash, queues lost", place, faults=1, costly=1)
            yield Move("worker dies", place, self._what("worker_restarted"), 1, 1)
            yield Move("mover dies", place, self._what("mover_restarted"), 1, 1)
            yield Move("silence", self._d, self._what("owner_silent", self.names[place]), 1, 1)
            for what in self._menus[state.nodes[place]].failures:
                yield Move("engine fails", place, what, 1, 1)
        if state.reads:
            yield Move("reader's mover dies", self._d, self._what("mover_restarted"), 1, 1)
        yield Move("crash", self._d, faults=1, costly=1)

    # ------------------------------------------------------------ what it leads to

    def apply(self, state: State, move: Move) -> State:
        """The state after a move. Raises Violation."""
        after = self._after(state, move)
        self._check(after)
        return after

    def _after(self, state: State, move: Move) -> State:
        kind, item, net, reads = move.kind, move.item, state.net, state.reads
        place, what = move.place, item
        if kind in ("deliver", "lose"):
            net = without(net, item)
            place, what = self._deliver[item]
        elif kind == "double":
            net = with_one(net, item)
        elif kind == "sample":
            read = self._sampled(item, self.prefill(state, place))
            reads = with_one(without(reads, item), read)
        elif kind in ("land", "fail"):
            reads = without(reads, item)
            place, what = self._d, self._what(kind, self._reads.values[item])
        elif kind == "reader's mover dies" or (kind == "crash" and place == self._d):
            reads = ()
        renewed = kind == "renew when idle" or (state.renewed and kind == "deliver" and self._is_renewal(item))
        faults, costly = state.faults + move.faults, state.costly + move.costly
        after = State(state.nodes, net, reads, faults, costly, renewed, state.cancelled or kind == "cancel")
        if kind in ("lose", "double", "sample"):
            return after
        if kind in ("crash", "crash, queues lost"):
            return self._crash(after, place, keep=kind == "crash")
        return self._tell(after, place, what)

    def describe(self, move: Move) -> str:
        """In words, for a trace."""
        words = [self.names[move.place]] if move.place >= 0 else []
        words.append(move.kind)
        if move.kind in ("deliver", "lose", "double"):
            words.append(str(self._packets.values[move.item]))
        elif move.kind in ("land", "fail", "sample"):
            words.append(f"read {self._reads.values[move.item].read}")
        elif move.item >= 0:
            words += [_word(part) for part in self._whats.values[move.item]]
        return " ".join(words) + (" (fault)" if move.faults else "")

    def _tell(self, state: State, place: int, what: int) -> State:
        """One node is told one thing; its messages and reads are under way afterwards."""
        effect = self._told.get((state.nodes[place], what)) or self._run(state.nodes[place], what)
        nodes = (*state.nodes[:place], effect.node, *state.nodes[place + 1 :])
        net = tuple(sorted(state.net + effect.packets)) if effect.packets else state.net
        reads = tuple(sorted(state.reads + effect.reads)) if effect.reads else state.reads
        return self._trimmed(State(nodes, net, reads, *state[3:]))

    def _run(self, node_id: int, what: int) -> Effect:
        method, *arguments = self._whats.values[what]
        node = pickle.loads(self._blobs[node_id])
        try:
            outputs: Outputs = getattr(node, method)(*arguments)
        except (LocalProtocolError, AssertionError, KeyError) as e:
            raise Violation(f"{method}: {e}") from e
        packets = tuple(self._packet(packet) for packet in outputs.packets)
        reads = tuple(self._reads.id(read, read) for read in outputs.reads)
        effect = self._told[node_id, what] = Effect(self._intern(node), packets, reads)
        return effect

    def _sampled(self, item: int, owner: PrefillNode) -> int:
        read = self._reads.values[item]
        return self._read_with(item, tuple(owner.memory.get(block) for block in read.source))

    def _read_with(self, item: int, content: tuple[Any, ...]) -> int:
        read = self._reads.values[item]._replace(content=content)
        return self._reads.id(read, read)

    def _garbage(self, item: int) -> int:
        return self._read_with(item, (None,) * len(self._reads.values[item].target))

    def _trimmed(self, state: State) -> State:
        """Without what changes nothing any more."""
        net, reads = state.net, state.reads
        if net:
            net = tuple(packet for packet in net if not self._is_inert(packet, state.nodes[-1]))
        if reads and (left := self._menus[state.nodes[-1]].quarantined):
            reads = tuple(sorted(self._garbage(r) if self._reads.values[r].read in left else r for r in reads))
        return State(state.nodes, net, reads, *state[3:]) if (net, reads) != (state.net, state.reads) else state

    def _is_inert(self, packet: int, node: int) -> bool:
        """About an attempt that is over, and the real machine agrees that it changes nothing and needs no answer."""
        inert = self._inert.get((packet, node))
        if inert is None:
            decode = self._nodes.values[node]
            assert isinstance(decode, DecodeNode)
            inert = _is_of_the_past(self._packets.values[packet], decode)
            if inert:
                try:
                    inert = self._run(node, self._deliver[packet][1]) == Effect(node, (), ())
                except Violation:
                    inert = False  # to be found by delivering it
            self._inert[packet, node] = inert
        return inert

    def _is_renewal(self, item: int) -> bool:
        return isinstance(self._packets.values[item].message, (LeaseRenew, LeaseRenewed))

    def _crash(self, state: State, place: int, keep: bool) -> State:
        """A new life says hello; what was on its way to or from the old one is kept or lost."""
        name = self.names[place]
        incarnation = str(int(self._nodes.values[state.nodes[place]].incarnation) + 1).encode()
        others = self.names[:-1] if place == self._d else ["d"]
        node: Node = self._new_prefill(name, incarnation)
        if place == self._d:
            node = self._new_decode(incarnation, "" if self.plan.reborn else "error")
        packets = self._packets.values
        kept = [p for p in state.net if keep or name not in (packets[p].to, packets[p].from_)]
        hellos = [self._packet(Packet(other, b"", name, incarnation, Hello())) for other in others]
        nodes = (*state.nodes[:place], self._intern(node), *state.nodes[place + 1 :])
        state = self._trimmed(state._replace(nodes=nodes, net=tuple(sorted((*kept, *hellos)))))
        return self._tell(state, place, self._what("start")) if place == self._d and self.plan.reborn else state

    # ------------------------------------------------------------ numbers for things

    def _what(self, *what: Any) -> int:
        return self._whats.id(what, what)

    def _packet(self, packet: Packet) -> int:
        number = self._packets.id(packet, packet)
        if number not in self._deliver:
            self._deliver[number] = self.names.index(packet.to), self._what("deliver", packet)
        return number

    def _intern(self, node: Node) -> int:
        number = self._nodes.id(canonical(node), node)
        if number == len(self._blobs):
            self._blobs.append(pickle.dumps(node, pickle.HIGHEST_PROTOCOL))
            self._menus.append(self._menu(node))
        return number

    def _menu(self, node: Node) -> Menu:
        named = node.timers().items()
        timers = {name: Timer(at, self._what("fire", name), _may_cost(node, name)) for name, at in named}
        return Menu(
            work=tuple(self._what(*what) for what in node.work()),
            failures=tuple(self._what(*what) for what in node.failures()),
            renewals=tuple(timer for name, timer in timers.items() if name[0] == "renew"),
            others=tuple(timer for name, timer in timers.items() if name[0] != "renew"),
            quarantined=tuple(node.quarantined()),
            clean=node.clean(),
        )

    def _new_prefill(self, name: str, incarnation: bytes) -> PrefillNode:
        return self._prefill(name=name, incarnation=incarnation, blocks=self.plan.prefill_pool)

    def _new_decode(self, incarnation: bytes, outcome: str = "") -> DecodeNode:
        plan = self.plan
        return self._decode(
            incarnation=incarnation,
            blocks=plan.decode_pool,
            prompt_blocks=plan.prompt_blocks,
            attempts_max=plan.attempts_max,
            owners=dict.fromkeys(self.names[:-1], (b"1", 1)),
            have=plan.have,
            outcome=outcome,
        )

    def sizes(self) -> str:
        return f"{len(self._blobs)} node states, {len(self._told)} node steps, {len(self._deliver)} messages"


def _is_of_the_past(packet: Packet, decode: DecodeNode) -> bool:
    """What is said about an attempt that is over, but for what has to be answered by a cancel."""
    message = packet.message
    if packet.to != "d" or not isinstance(message, (PrefillProgress, PrefillFailed, LeaseReleased, LeaseRenewed)):
        return False
    tries = [entry.try_ for entry in message.entries] if isinstance(message, LeaseRenewed) else [message.try_]
    over = bool(decode.outcome)
    return all(over or t.attempt < decode.attempt or t.incarnation != decode.incarnation for t in tries)


def _may_cost(node: Node, timer: tuple[str, Any]) -> bool:
    """Whether a timer that fires without need may end an attempt. Repeats do not; nor does forgetting the dead."""
    group, key = timer
    if isinstance(node, PrefillNode):
        return key[0] is not LedgerClock.TOMBSTONE
    fetch = next(iter(node.fetches._fetches.values()), None)
    if group == "cancel" or fetch is None:
        return False
    if group == "attempt" and key[0] is Clock.ANSWER:
        return fetch.asks > 1
    if group == "attempt" and key[0] is Clock.CLAIM:
        return fetch.claims > CONFIG.claim_repeats
    return True


def _word(part: Any) -> str:
    if isinstance(part, tuple):
        return " ".join(_word(p) for p in part)
    if isinstance(part, Enum):
        return str(part.value)
    return f"attempt {part.attempt}" if hasattr(part, "attempt") else str(part)
