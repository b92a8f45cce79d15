"""A node of the model: the real core, and around it the least that a node needs besides: engine, mover, clients.

Its memory is abstract: the content of a block says which token of which prompt it is, so that a step that computes on
anything else is seen. A block that is free and not cached may be overwritten at any time, so its content counts as
lost at once. Blocks are one token long, and every chunk is one block. A staged node has two memories, and copies
between them take place at the last moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pdbus.bus.errors import PdError
from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import (
    Agent,
    Geometry,
    Heartbeat,
    Hello,
    LeaseId,
    LeaseReleased,
    Message,
    PrefillRequest,
    Sampling,
)
from pdbus.bus.wire import Header, unpack_u32
from pdbus.connector.handoff import HandoffConfig, Holder
from pdbus.connector.ipc import StepRow
from pdbus.connector.readable import unreadable
from pdbus.connector.staging import Way

from ... import events as ev
from ...core import CoreConfig, NodeCore
from ...decode import State
from ...report import ledger
from ...scheduler import Limits
from .keys import Keys
from .scenario import Scenario
from .search import Violation
from .things import Answer, Content, Outputs, Packet, Read, Turn, prompt_hashes, request_id, request_number

NEVER_NS = 1 << 60  # the timers of a membership in which nobody is silent
CREDIT = 1024
TOMBSTONE_NS = HandoffConfig().tombstone_ns
HELD = -1
REQUEST_NS = 300_000_000_000
TAKEN = (State.RUNNING, State.STAGING)  # its KV counts as valid
TICKS_MAX = 4  # in a row that leave a deadline in the past: more is spinning


class Shell:
    def __init__(self, scenario: Scenario, name: str, life: int) -> None:
        self.scenario, self.name, self.life = scenario, name, life
        self.decodes = name.startswith("d")
        self.incarnation = f"{name}#{life}".encode().ljust(16, b".")
        self.address = f"tcp://{name}:1"
        self.now = 0
        self.core = NodeCore(*self.configs())
        self.worker_up = self.mover_up = self.stopping = False
        self.starts_worker = self.starts_mover = True
        self.mover_epoch = 1
        self.step: ev.RunStep | None = None
        self.tables: dict[int, list[int]] = {}  # the worker's
        self.prompts: dict[int, int] = {}  # by sequence: whose prompt
        self.memory: dict[int, Content] = {}  # where reads begin and land
        self.device: dict[int, Content] = {} if scenario.staged else self.memory  # where steps compute
        self.copies: list[ev.StartCopy] = []
        self.answers: dict[bytes, Answer] = {}
        self.leases: dict[tuple[Any, ...], int] = {}  # by try: when it has ended, HELD before
        self.links = 0
        self.open: tuple[str, ...] = ()  # links of ours
        self._closing: list[int] = []  # sequences, as soon as the step that is out has ended
        self._queue: deque[ev.NodeEvent] = deque()
        self._out: dict[str, list[Any]] = {}
        self._reads_end = False
        self.log: list[Turn] | None = None

    def configs(self) -> tuple[CoreConfig, Membership]:
        return self.core_config(), Membership(self.membership_config(), unreadable)

    def core_config(self) -> CoreConfig:
        return CoreConfig(
            name=self.name, incarnation=self.incarnation, decodes=self.decodes,
            blocks=self.scenario.pool(self.decodes), block_size=1, block_bytes=1, max_model_len=64,
            limits=Limits(prefill_chunk=1), handoff=HandoffConfig(staged=self.scenario.staged),
        )  # fmt: skip

    def membership_config(self) -> MembershipConfig:
        role = "decode" if self.decodes else "prefill"
        hello = Hello(role=role, address=self.address, epoch=1, geometry=Geometry(layers=1, block_size=1))
        return MembershipConfig(
            name=self.name, incarnation=self.incarnation, hello=hello, heartbeat_ns=NEVER_NS, suspect_ns=NEVER_NS,
            dead_ns=NEVER_NS, in_use_ns=NEVER_NS, idle_ns=NEVER_NS,
        )  # fmt: skip

    # ------------------------------------------------------------ what can be told

    def join(self, address: str) -> Outputs:
        return self._hear(ev.JoinAsked(address=address))

    def worker_comes(self) -> Outputs:
        self.worker_up, self.starts_worker = True, False
        return self._hear(ev.WorkerUp())

    def mover_comes(self) -> Outputs:
        self.mover_up, self.starts_mover = True, False
        name = f"{self.name}/{self.life}/{self.mover_epoch}"
        agent = Agent(epoch=self.mover_epoch, name=name, blocks=self.core.pool.blocks)
        return self._hear(ev.MoverUp(agents=(agent,)))

    def deliver(self, packet: Packet) -> Outputs:
        message = packet.message
        if not packet.inbound and packet.link not in self.open:
            return Outputs()
        asked = isinstance(message, PrefillRequest)
        hashes = prompt_hashes(self.scenario, request_number(message.try_.request)) if asked else ()
        link = f"in:{packet.link}" if packet.inbound else packet.link
        return self._hear(ev.MessageCame(link=link, header=packet.header, message=message, block_hashes=hashes))

    def ask(self, number: int) -> Outputs:
        hashes, request = prompt_hashes(self.scenario, number), request_id(number, self.life)
        self.answers[request] = Answer()
        return self._hear(
            ev.GenerateAsked(
                request=request, link="client", client=f"client:{number}", prompt_tokens=len(hashes),
                prompt_digest=hashes[-1], block_hashes=hashes, sampling=Sampling(max_tokens=self.scenario.tokens),
                deadline_ns=REQUEST_NS, credit=CREDIT,
            )
        )  # fmt: skip

    def cancel(self, number: int) -> Outputs:
        return self._hear(ev.CancelAsked(client=f"client:{number}"))

    def tick(self) -> Outputs:
        """The clock goes to the next timer."""
        self.now = max(self.now, self.core.next_deadline() or 0)
        return self._hear(ev.Tick())

    def wait(self, ns: int) -> Outputs:
        """The clock goes on, and nothing happens."""
        self.now += ns
        return Outputs()

    def step_ends(self, failed: int | None = None) -> Outputs:
        """The step has written what it computed, but for a sequence that the engine failed."""
        step, self.step = self.step, None
        assert step is not None
        rows = tuple(
            ev.StepRowEnded(seq=row.seq, problem="the engine failed it") if row.seq == failed else self._compute(row)
            for row in step.rows
        )
        for seq in self._closing:
            self._close_sequence(seq)
        self._closing.clear()
        return self._hear(ev.StepEnded(step=step.step, rows=rows, compute_ns=1))

    def land(self, read: Read) -> Outputs:
        """The bytes arrive, all of them, and the mover says so."""
        assert read.content is not None
        self._write(read, read.content)
        return self._hear(ev.ReadEnded(read=read.read, bytes=1, transfer_ns=1))

    def fail(self, read: Read) -> Outputs:
        """Some bytes arrive; then it is certain that no more will."""
        self._write(read, (None,) * len(read.target))
        return self._hear(ev.ReadEnded(read=read.read, problem="remote disconnect"))

    def copy_ends(self) -> Outputs:
        """It takes place now, and the fence behind it is passed."""
        copy = self.copies.pop(0)
        source, target = (self.device, self.memory) if copy.way is Way.DOWN else (self.memory, self.device)
        for block in copy.blocks:
            if not self.core.pool.holders(block).get(Holder.IN_COPY):
                raise Violation(f"{self.name}: a copy went {copy.way} to block {block} after it was given away")
            target[block] = source.get(block)
        return self._hear(ev.CopyEnded(copy=copy.copy))

    def worker_dies(self) -> Outputs:
        """Whatever it was writing is garbage, and all of a memory of its own is lost."""
        for row in self.step.rows if self.step else ():
            for block in self._written(row):
                self.device[block] = None
        for copy in self.copies:
            for block in copy.blocks if copy.way is Way.DOWN else ():
                self.memory[block] = None
        if self.scenario.staged:
            self.device.clear()
        self.worker_up, self.step = False, None
        for of_worker in (self.tables, self.prompts, self._closing, self.copies):
            of_worker.clear()
        return self._hear(ev.WorkerLost(problem="killed"))

    def mover_dies(self) -> Outputs:
        return self._mover_ends(asked=self.stopping)

    def mover_stops(self) -> Outputs:
        return self._mover_ends(asked=True)

    def _mover_ends(self, asked: bool) -> Outputs:
        self.mover_up = self.stopping = False
        self._reads_end = True
        return self._hear(ev.MoverLost(problem="ended", asked=asked))

    # ------------------------------------------------------------ what can happen, how it stands

    def work(self) -> list[tuple[Any, ...]]:
        """What this node's processes can do next."""
        can = {
            "step_ends": self.step is not None,
            "copy_ends": bool(self.copies),
            "worker_comes": self.starts_worker and not self.worker_up,
            "mover_comes": self.starts_mover and not self.mover_up,
            "mover_stops": self.stopping,
        }
        return [(what,) for what, possible in can.items() if possible]

    def rows(self) -> list[int]:
        """Sequences in the step that is out."""
        return [row.seq for row in self.step.rows] if self.step else []

    def timer(self) -> int | None:
        """How long until the next timer."""
        due = self.core.next_deadline()
        return None if due is None or due - self.now > NEVER_NS >> 1 else max(0, due - self.now)

    def clean(self) -> bool:
        """Nothing of any request is left."""
        core = self.core
        left = core.offers.rows() or core.fetches.rows() or core.scheduler.busy
        up = self.worker_up and self.mover_up
        return up and ledger(core)[0] and not left and all(answer.outcome for answer in self.answers.values())

    def key(self) -> Any:
        return (
            self.name, self.life, self.worker_up, self.mover_up, self.stopping, self.starts_worker, self.starts_mover,
            self.mover_epoch, self.step, Keys(self.now).of(self.tables), frozenset(self.prompts.items()),
            frozenset(self.memory.items()), frozenset(self.device.items()), tuple(self.copies),
            Keys(self.now).of(self.answers), self.open, tuple(self._closing),
            frozenset((key, self.now - at if at != HELD else HELD) for key, at in self._remembered().items()),
            Keys(self.now).of(self.core),
        )  # fmt: skip

    # ------------------------------------------------------------ turns

    def _hear(self, event: ev.NodeEvent) -> Outputs:
        """The core hears it, and what follows at once: ticks that are due, answers of its own processes."""
        self._out = {"packets": [], "reads": [], "done": [], "valid": []}
        ticks = 0
        self._queue.append(event)
        while self._queue:
            self._turn(self._queue.popleft())
            due = self.core.next_deadline()
            if not self._queue and due is not None and due <= self.now:
                ticks += 1
                self._queue.append(ev.Tick())
                if ticks > TICKS_MAX:
                    raise Violation(f"{self.name}: {ticks} ticks in a row left a deadline in the past")
        self._forget_free()
        out, self._out = {name: tuple(items) for name, items in self._out.items()}, {}
        reads_end, self._reads_end = self._reads_end, False
        return Outputs(**out, reads_end=reads_end)

    def _turn(self, event: ev.NodeEvent) -> None:
        fetching = [r.request for r in self.core.requests.all() if r.state is State.FETCHING]
        try:
            effects = self.core.handle(event, self.now)
        except (PdError, AssertionError, LookupError, ValueError, TypeError, AttributeError) as e:
            if self.log is not None:
                self.log.append(Turn(event, self.now, [], e))
            raise Violation(f"{self.name}: {type(e).__name__}: {e}") from e
        if self.log is not None:
            self.log.append(Turn(event, self.now, effects))
        self._check_pool()
        for effect in effects:
            carry_out = _CARRY_OUT.get(type(effect))
            if carry_out is not None:
                carry_out(self, effect)
        for request in fetching:
            self._check_fetched(event, request, effects)

    def _check_pool(self) -> None:
        try:
            self.core.pool.check()
        except AssertionError as e:
            raise Violation(f"{self.name}: the pool's books disagree: {e}") from e

    def _check_fetched(self, event: ev.NodeEvent, request: bytes, effects: list[ev.NodeEffect]) -> None:
        """KV is taken as valid on the prefill node's word alone, and is then the right KV."""
        r = self.core.requests.get(request)
        if r is None or r.state not in TAKEN or any(_is_failure(effect, request) for effect in effects):
            return
        message: Any = event.message if isinstance(event, ev.MessageCame) else None
        said = isinstance(message, LeaseReleased) and message.valid
        if not said or (message.try_.request, message.try_.attempt) != (request, r.attempts):
            raise Violation(f"{self.name}: KV was taken as valid without being confirmed")
        self._out["valid"].append(message.lease)
        sequence = self.core.scheduler.get(r.seq)
        blocks = sequence.blocks if sequence else r.blocks
        hashes = prompt_hashes(self.scenario, request_number(request))
        for place, (block, right) in enumerate(zip(blocks, hashes, strict=False)):
            if place >= r.have and self.memory.get(block) != right:
                raise Violation(f"{self.name}: KV was taken as valid with wrong bytes at position {place}")

    def _forget_free(self) -> None:
        pool = self.core.pool
        for memory in (self.memory, self.device):
            for block, content in list(memory.items()):
                if content is None or not (pool._holders[block] or pool._hash[block] is not None):
                    del memory[block]

    # ------------------------------------------------------------ engine and mover

    def _compute(self, row: StepRow) -> ev.StepRowEnded:
        wanted = self.core.scheduler.get(row.seq) is not None
        table = self.tables[row.seq]
        for place in range(row.start + row.count):
            right = self._right(row.seq, place)
            if place >= row.start:
                self._put(table[place], right)
            elif wanted and self.device.get(table[place]) != right:
                raise Violation(f"{self.name}: a step computes on wrong KV at position {place}")
        if not row.sample:
            return ev.StepRowEnded(seq=row.seq)
        token = f"token after {self.prompts[row.seq]}".encode()
        return ev.StepRowEnded(seq=row.seq, payload=token if self.core.prefills.owns(row.seq) else None)

    def _put(self, block: int, content: Content) -> None:
        pool = self.core.pool
        if not pool.holders(block).get(Holder.IN_STEP):
            raise Violation(f"{self.name}: a step wrote block {block} after it was given away")
        if pool._hash[block] is not None:
            raise Violation(f"{self.name}: a step wrote block {block}, which is shared")
        self.device[block] = content

    def _right(self, seq: int, place: int) -> bytes:
        hashes = prompt_hashes(self.scenario, self.prompts[seq])
        return hashes[place] if place < len(hashes) else f"answer {self.prompts[seq]}.{place}".encode()

    def _written(self, row: StepRow) -> list[int]:
        return self.tables[row.seq][row.start : row.start + row.count]

    def _write(self, read: Read, contents: tuple[Content, ...]) -> None:
        for block, content in zip(read.target, contents, strict=True):
            if not self.core.pool.holders(block).get(Holder.IN_FLIGHT):
                raise Violation(f"{self.name}: a read wrote block {block} after it was given away")
            self.memory[block] = content

    # ------------------------------------------------------------ effects

    def _send(self, e: ev.Send[Message]) -> None:
        if isinstance(e.message, Heartbeat):
            return
        inbound = not e.link.startswith("in:")
        link = e.link.removeprefix("in:")
        header = Header(from_=self.name, from_inc=self.incarnation, to=e.to, to_inc=e.to_inc, seq=1, cause=0)
        to = link.partition(">")[2].partition("#")[0] if inbound else link.partition(">")[0]
        self._out["packets"].append(Packet(to, link, inbound, header, e.message))

    def _open_link(self, e: ev.OpenLink) -> None:
        self.links += 1
        listener = e.address.removeprefix("tcp://").partition(":")[0]
        link = f"{self.name}>{listener}#{self.life}.{self.links}"
        self.open += (link,)
        self._queue.append(ev.LinkOpened(address=e.address, link=link))

    def _open_sequence(self, e: ev.OpenSequence) -> None:
        if self.worker_up:
            self.prompts[e.seq] = request_number(e.try_.request if e.try_ else e.request)
            self.tables[e.seq] = []

    def _close_link(self, e: ev.CloseLink) -> None:
        self.open = tuple(link for link in self.open if link != e.link)

    def _close_sequence(self, seq: int) -> None:
        """The worker obeys between steps."""
        if seq in self.rows():
            self._closing.append(seq)
            return
        self.prompts.pop(seq, None)
        self.tables.pop(seq, None)

    def _run_step(self, e: ev.RunStep) -> None:
        if not self.worker_up:
            return
        for row in e.rows:
            if row.seq not in self.tables:
                raise Violation(f"{self.name}: a step of sequence {row.seq}, which is not open")
            table = [] if row.reset else self.tables[row.seq]
            self.tables[row.seq] = [*table, *unpack_u32(row.new_blocks)]
            if row.start + row.count > len(self.tables[row.seq]):
                raise Violation(f"{self.name}: a step has no blocks for position {row.start + row.count - 1}")
        self.step = e

    def _take_first_token(self, e: ev.TakeFirstToken) -> None:
        answer = self.answers[e.request]
        if answer.first or answer.tokens:
            raise Violation(f"{self.name}: a second first token is sent")
        answer.first, answer.tokens = True, 1
        self._queue.append(ev.FirstTokenTaken(request=e.request, stop=False))

    def _emit(self, e: ev.EmitToken) -> None:
        self.answers[e.request].tokens += 1

    def _end_request(self, e: ev.EndRequest) -> None:
        answer = self.answers[e.request]
        if answer.outcome:
            raise Violation(f"{self.name}: a request ends as {e.reason!r} after it ended as {answer.outcome!r}")
        if answer.tokens != e.completion_tokens:
            raise Violation(f"{self.name}: a request ends with {e.completion_tokens} tokens, {answer.tokens} came")
        answer.outcome = f"{e.reason} {e.code}".rstrip()
        answer.attempts = max(answer.attempts, e.timeline.attempts)
        self._close_sequence(e.seq)

    def _add_peer(self, e: ev.AddPeer) -> None:
        if self.mover_up:
            self._queue.append(ev.PeerAddEnded(peer=e.peer))

    def _start_read(self, e: ev.StartRead) -> None:
        if not self.mover_up or self.stopping:
            self._queue.append(ev.ReadEnded(read=e.read, problem="no such peer"))
            return
        owner, incarnation, epoch = e.peer.split("/")
        read = Read(self.name, e.read, owner, bytes.fromhex(incarnation), int(epoch), e.source, e.target)
        self._out["reads"].append(read)

    def _start_copy(self, e: ev.StartCopy) -> None:
        self.copies.append(e)

    def _restart_mover(self, e: ev.RestartMover) -> None:
        if self.mover_up:
            self.stopping = True
        else:
            self.starts_mover, self.mover_epoch = True, e.epoch

    def _restart_worker(self, e: ev.RestartWorker) -> None:
        self.starts_worker = True

    def _publish(self, e: ev.Publish) -> None:
        data: Any = e.data
        if e.event == "attempt.failed":
            answer = self.answers[bytes.fromhex(data["request"])]
            answer.failed += 1
            answer.attempts = data["attempt"]
        if e.topic != "lease":
            return
        key, began = (data["decode_node"], data["request"], data["attempt"]), e.event == "lease.began"
        self.leases = self._remembered()
        if began is (key in self.leases) or (not began and self.leases[key] != HELD):
            raise Violation(f"{self.name}: {e.event} of attempt {key[2]} a second time")
        self.leases[key] = HELD if began else self.now
        if not began and data["cause"] == "done":
            lease = LeaseId(
                node=self.name, incarnation=self.incarnation, epoch=data["epoch"], generation=data["generation"]
            )
            self._out["done"].append(lease)

    def _remembered(self) -> dict[tuple[Any, ...], int]:
        """The leases of which their ledger knows."""
        return {key: at for key, at in self.leases.items() if at == HELD or self.now - at < TOMBSTONE_NS}


def _is_failure(effect: ev.NodeEffect, request: bytes) -> bool:
    return (
        isinstance(effect, ev.Publish) and effect.event == "attempt.failed" and effect.data["request"] == request.hex()
    )


_CARRY_OUT: dict[type[Any], Callable[[Shell, Any], None]] = {
    ev.Send: Shell._send,
    ev.OpenLink: Shell._open_link,
    ev.CloseLink: Shell._close_link,
    ev.OpenSequence: Shell._open_sequence,
    ev.CloseSequence: lambda shell, e: shell._close_sequence(e.seq),
    ev.RunStep: Shell._run_step,
    ev.TakeFirstToken: Shell._take_first_token,
    ev.EmitToken: Shell._emit,
    ev.EndRequest: Shell._end_request,
    ev.AddPeer: Shell._add_peer,
    ev.StartRead: Shell._start_read,
    ev.StartCopy: Shell._start_copy,
    ev.RestartMover: Shell._restart_mover,
    ev.RestartWorker: Shell._restart_worker,
    ev.Publish: Shell._publish,
}
