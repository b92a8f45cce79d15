"""One life of a simulated node: the real NodeCore and Membership, and around them what nodes/control.py does.

Events are handled one after the other, effects carried out at once and in order, and what an effect leads to is heard
after what is being heard now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pdbus.bus.errors import PdError
from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Hello, PrefillRequest, Sampling, TryId
from pdbus.bus.wire import Header
from pdbus.connector.ipc import RowResult
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable
from pdbus.nodes import events as ev
from pdbus.nodes.core import CoreConfig, NodeCore
from pdbus.nodes.replay.driver import Shell
from pdbus.nodes.replay.explore.search import Violation
from pdbus.nodes.report import ledger
from pdbus.nodes.scheduler import Limits

from .cluster_machines import Mover, Worker
from .cluster_world import Link, Packet, S, World

if TYPE_CHECKING:
    from .cluster_sim import Client, Cluster

RESTART_WAIT_NS = S // 10
IDLE_TICKS_MAX = 3  # in a row that leave a deadline in the past: more is spinning


@dataclass
class Answer:
    client: Client
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    sent: int = 0


class SimNode(Shell):
    def __init__(self, cluster: Cluster, name: str, role: str, life: int) -> None:
        plan = cluster.plan
        self.cluster, self.name, self.role, self.life = cluster, name, role, life
        self.world: World = cluster.world
        self.address = f"tcp://{name}:7400"
        self.incarnation = f"{name}#{life}".encode().ljust(16, b".")
        self.block_size = plan.block_size
        self.blocks = plan.prefill_blocks if role == "prefill" else plan.decode_blocks
        self.slab = [0] * (self.blocks * self.block_size)
        super().__init__(self.world, self.new_core())
        self.record: list[tuple[ev.NodeEvent, int, list[ev.NodeEffect]]] = []
        self.worker = Worker(self)
        self.mover = Mover(self)
        self.answers: dict[bytes, Answer] = {}
        self.inbound: dict[str, Link] = {}
        self._links: dict[str, Link] = {}
        self._by_seq: dict[int, Answer] = {}
        self._prompts: dict[TryId, tuple[int, ...]] = {}
        self._idle_ticks = 0
        self._mover_asked = False
        self._leases: dict[tuple[str, int], bool] = {}  # by (request, attempt): whether it has ended

    def new_core(self) -> NodeCore:
        return NodeCore(self._core_config(), Membership(self._membership_config(), unreadable))

    def start(self, join: Sequence[str]) -> None:
        self.cluster.bus.listening[self.address] = self
        self.worker.start()
        self.mover.start(self._agent_name(1), 1)
        for address in join:
            self.post(ev.JoinAsked(address=address))

    def end(self, lose: bool) -> None:
        """The process is gone, with its children and its memory. `lose`: what it said last does not arrive."""
        self.over = True
        self.worker.life += 1
        self.mover.life += 1
        self.cluster.agents.pop(self.mover.agent_name, None)
        if self.cluster.bus.listening.get(self.address) is self:
            del self.cluster.bus.listening[self.address]
        self.cluster.bus.cut_all(self, lose)

    # ------------------------------------------------------------ the loop

    def _turn(self, event: ev.NodeEvent) -> None:
        self.world.note(self.name, event)
        self.world.counters["events"] += 1
        try:
            effects = self.core.handle(event, self.world.now)
        except (PdError, AssertionError, KeyError, IndexError, ValueError) as e:
            raise Violation(f"{self.name}: {type(e).__name__} {e} at {event}") from e
        self.record.append((event, self.world.now, effects))
        for effect in effects:
            self.world.note(self.name, f"  -> {effect}")
            _CARRY_OUT[type(effect)](self, effect)
        self.cluster.heard(self, event.message.KIND if isinstance(event, ev.MessageCame) else type(event).__name__)
        self._watch_ticks(event)
        self._check_nothing_lies()
        self.core.pool.check()
        if self.core.mover.up and self.mover.ready and self.mover.advertised != self.core.offers.held():
            raise Violation(f"{self.name}: {self.mover.advertised} leases advertised of {self.core.offers.held()}")

    def _watch_ticks(self, event: ev.NodeEvent) -> None:
        due = self.core.next_deadline()
        idle = isinstance(event, ev.Tick) and due is not None and due <= self.world.now
        self._idle_ticks = self._idle_ticks + 1 if idle else 0
        if self._idle_ticks > IDLE_TICKS_MAX and not self.over:
            raise Violation(f"{self.name}: {self._idle_ticks} ticks in a row left a deadline in the past")

    def _check_nothing_lies(self) -> None:
        """Whatever can be done now has been begun, unless a step is out, whose end is the next occasion."""
        core, free = self.core, self.core.pool.available()
        if core.scheduler.busy:
            return
        if core.worker_up:
            for s in core.scheduler.sequences():
                if s.remaining and (free or len(s.blocks) * self.block_size > s.computed):
                    raise Violation(f"{self.name}: sequence {s.seq} could run, and no step is out")
        waiting = core.requests._waiting
        if waiting and len(core.requests) - len(waiting) < core.config.running_max:
            if waiting[0].deadline_ns <= self.world.now:
                return  # ended by the tick that is due now
            needed = -(-(waiting[0].prompt_tokens + waiting[0].generated) // self.block_size)
            if needed <= free:
                raise Violation(f"{self.name}: {waiting[0].request!r} waits for {needed} blocks, and {free} are free")

    # ------------------------------------------------------------ the bus

    def hear(self, link: str, packet: Packet) -> None:
        message, hashes = packet.message, ()
        if isinstance(message, PrefillRequest):
            hashes = block_hashes(packet.raw, self.block_size)
            self._prompts[message.try_] = packet.raw
        self.post(ev.MessageCame(link=link, header=packet.header, message=message, block_hashes=hashes))
        self._prompts.clear()

    def lost_link(self, link: Link) -> None:
        if not link.closed:
            self.enter(lambda: self.post(ev.LinkLost(link=link.key)))

    def _send(self, e: ev.Send) -> None:
        link = self._links.get(e.link) or self.inbound.get(e.link)
        if link is None:
            return
        raw = self.answers[e.message.try_.request].prompt if isinstance(e.message, PrefillRequest) else ()
        seq = link.seq[link.opener is self] = link.seq[link.opener is self] + 1
        header = Header(from_=self.name, from_inc=self.incarnation, to=e.to, to_inc=e.to_inc, seq=seq, cause=e.cause)
        self.cluster.bus.send(link, self, Packet(header, e.message, raw))

    def _open_link(self, e: ev.OpenLink) -> None:
        link = self.cluster.bus.open(self, e.address)
        self._links[link.key] = link
        self.post(ev.LinkOpened(address=e.address, link=link.key))

    def _close_link(self, e: ev.CloseLink) -> None:
        link = self._links.pop(e.link, None)
        if link is not None:
            self.cluster.bus.close(link, e.flush)
        self.inbound.pop(e.link, None)

    # ------------------------------------------------------------ clients

    def ask(self, client: Client) -> None:
        """A client's generate, tokenized."""
        self.answers[client.request] = Answer(client, client.prompt, client.sampling)
        self.post(
            ev.GenerateAsked(
                request=client.request,
                link=client.link,
                client=client.link,
                prompt_tokens=len(client.prompt),
                prompt_digest=repr(client.prompt).encode(),
                block_hashes=block_hashes(client.prompt, self.block_size),
                sampling=client.sampling,
                deadline_ns=client.deadline_ns,
                credit=client.credit,
            )
        )

    def _take(self, seq: int, token: int) -> bool:
        answer = self._by_seq.get(seq)
        if answer is None:
            return False
        answer.tokens.append(token)
        return token in answer.sampling.stop_token_ids

    def _emit(self, request: bytes) -> None:
        answer = self.answers[request]
        if not answer.client.tokens_came(answer.tokens[answer.sent :]):
            self.post(ev.ClientGone(link=answer.client.link))
        answer.sent = len(answer.tokens)

    def _end_request(self, e: ev.EndRequest) -> None:
        self.worker.tell(partial(self.worker.close, e.seq))
        self._by_seq.pop(e.seq, None)
        answer = self.answers.pop(e.request)
        if answer.sent < len(answer.tokens):
            answer.client.tokens_came(answer.tokens[answer.sent :])
        answer.client.finished(e)

    # ------------------------------------------------------------ the worker

    def step_done(self, step: int, rows: Sequence[RowResult], took: int) -> None:
        if not self.core.scheduler.busy or step != self.core.scheduler.step:
            return
        ended = tuple(self._row_ended(row) for row in rows)
        self.post(ev.StepEnded(step=step, rows=ended, compute_ns=took))

    def _row_ended(self, row: RowResult) -> ev.StepRowEnded:
        if self.world.chance(self.cluster.plan.failing_rows):
            self.world.counters["failed row"] += 1
            return ev.StepRowEnded(seq=row.seq, problem="the engine failed it")
        if row.token < 0:
            return ev.StepRowEnded(seq=row.seq)
        if self.core.prefills.owns(row.seq):
            return ev.StepRowEnded(seq=row.seq, payload=str(row.token).encode())
        return ev.StepRowEnded(seq=row.seq, stop=self._take(row.seq, row.token))

    def _open_sequence(self, e: ev.OpenSequence) -> None:
        if e.try_ is not None:
            self.worker.tell(partial(self.worker.open, e.seq, self._prompts[e.try_], ()))
            return
        answer = self._by_seq[e.seq] = self.answers[e.request]
        self.worker.tell(partial(self.worker.open, e.seq, answer.prompt, tuple(answer.tokens)))

    def _close_sequence(self, e: ev.CloseSequence) -> None:
        self.worker.tell(partial(self.worker.close, e.seq))

    def _run_step(self, e: ev.RunStep) -> None:
        self.worker.tell(partial(self.worker.step, e.step, e.rows))

    def _take_first_token(self, e: ev.TakeFirstToken) -> None:
        token = int(e.payload)
        stop = self._take(e.seq, token)
        self.worker.tell(partial(self.worker.force, e.seq, token))
        self._emit(e.request)
        self.post(ev.FirstTokenTaken(request=e.request, stop=stop))

    def _emit_token(self, e: ev.EmitToken) -> None:
        self._emit(e.request)

    def _restart_worker(self, e: ev.RestartWorker) -> None:
        self.worker.start(RESTART_WAIT_NS)

    # ------------------------------------------------------------ the mover

    def mover_exited(self, asked: bool) -> None:
        asked, self._mover_asked = asked or self._mover_asked, False
        self.post(ev.MoverLost(problem="ended", asked=asked))

    def _agent_name(self, epoch: int) -> str:
        return f"{self.name}/0/{self.incarnation.hex()}/{epoch}"

    def _restart_mover(self, e: ev.RestartMover) -> None:
        if self.mover.running:
            if not self._mover_asked:
                self._mover_asked = True
                self.mover.stop()
        else:
            self.mover.start(self._agent_name(e.epoch), e.epoch)

    def _add_peer(self, e: ev.AddPeer) -> None:
        self.mover.add_peer(e.peer, e.agents[0])

    def _remove_peer(self, e: ev.RemovePeer) -> None:
        self.mover.remove_peer(e.peer)

    def _start_read(self, e: ev.StartRead) -> None:
        self.mover.read(e.read, e.peer, e.source, e.target)

    def _advertise(self, e: ev.AdvertiseLeases) -> None:
        self.mover.advertised = e.leases

    # ------------------------------------------------------------ the rest

    def _publish(self, e: ev.Publish) -> None:
        """A lease begins once for a try, and ends once."""
        if e.event == "attempt.failed":
            self.world.counters[f"{e.event}: {e.data.get('cause', '')}"] += 1
        if e.topic != "lease":
            return
        key = str(e.data["decode_node"]) + str(e.data["request"]), int(str(e.data["attempt"]))
        began = e.event == "lease.began"
        if self._leases.get(key) is not (None if began else False):
            raise Violation(f"{self.name}: {e.event} of attempt {key[1]} a second time")
        self._leases[key] = not began
        if not began:
            self.world.counters[f"lease {e.data['cause']}"] += 1

    def _drained(self, e: ev.Drained) -> None:
        self.cluster.exited(self)

    def problems(self) -> list[str]:
        """What is left of work that is over, in a node with nothing to do."""
        core = self.core
        clean, table = ledger(core)
        left = {
            "ledger": "" if clean else table,
            "step": core.scheduler.busy and core.scheduler.step,
            "offers": core.offers.rows(),
            "fetches": core.fetches.rows(),
            "prefills": [t for t in (core.prefills._tries, core.prefills._seqs, core.prefills._leases) if t],
            "stopping": core.prefills._stopping,
            "reads": core.fetches.transfers.rows(),
            "fetching": core.requests.fetching_from(),
            "answers": self.answers,
            "leases": [key for key, ended in self._leases.items() if not ended],
            "worker's sequences": self.worker.open_sequences(),
            "mover's peers": [p for p in self.mover.peers if p not in core.peers._agents],
        }
        return [f"{self.name}: {name}: {what}" for name, what in left.items() if what]

    def _core_config(self) -> CoreConfig:
        plan = self.cluster.plan
        return CoreConfig(
            name=self.name,
            incarnation=self.incarnation,
            decodes=self.role != "prefill",
            blocks=self.blocks,
            block_size=self.block_size,
            block_bytes=1,
            max_model_len=64,
            limits=Limits(max_batch_tokens=plan.batch_tokens, prefill_chunk=plan.chunk),
            running_max=plan.running_max,
            skip_sampling=plan.skip_sampling and self.role == "prefill",
        )

    def _membership_config(self) -> MembershipConfig:
        hello = Hello(
            role=self.role,
            address=self.address,
            epoch=1,
            geometry=geometry_for(1, 1, 4, self.block_size, "float32"),
            fingerprint="f",
            version="0.1.0",
        )
        return MembershipConfig(name=self.name, incarnation=self.incarnation, hello=hello)


def block_hashes(prompt: Sequence[int], size: int) -> tuple[bytes, ...]:
    """One for each full block, of all tokens up to its end."""
    return tuple(repr(prompt[:end]).encode() for end in range(size, len(prompt) + 1, size))


_CARRY_OUT: dict[type[ev.NodeEffect], Callable[[SimNode, Any], None]] = {
    ev.Send: SimNode._send,
    ev.OpenLink: SimNode._open_link,
    ev.CloseLink: SimNode._close_link,
    ev.OpenSequence: SimNode._open_sequence,
    ev.CloseSequence: SimNode._close_sequence,
    ev.RunStep: SimNode._run_step,
    ev.TakeFirstToken: SimNode._take_first_token,
    ev.EmitToken: SimNode._emit_token,
    ev.EndRequest: SimNode._end_request,
    ev.AddPeer: SimNode._add_peer,
    ev.RemovePeer: SimNode._remove_peer,
    ev.StartRead: SimNode._start_read,
    ev.AdvertiseLeases: SimNode._advertise,
    ev.RestartMover: SimNode._restart_mover,
    ev.RestartWorker: SimNode._restart_worker,
    ev.Publish: SimNode._publish,
    ev.Drained: SimNode._drained,
}
