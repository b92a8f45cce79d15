"""A simulated node: the real core in a shell whose engine, mover, clients and clock are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pdbus import __version__
from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Agent, Hello, PrefillRequest
from pdbus.bus.wire import Header
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable

from ... import events as ev
from ...core import CoreConfig, NodeCore
from ...recording import NodeRecorder
from ...scheduler import Limits
from ..driver import Shell
from .asks import Ask
from .bus import Link, Packet
from .engine import Engine
from .mover import Mover
from .plan import DEADLINE_NS

if TYPE_CHECKING:
    from .cluster import SimCluster

WORKER_START_NS = 5_000_000_000  # another worker, which loads its model anew
PORT = ":7400"


class SimNode(Shell):
    def __init__(self, cluster: SimCluster, name: str, role: str, life: int) -> None:
        self.cluster, self.name, self.role = cluster, name, role
        self.plan, self.times = cluster.plan, cluster.times
        self.address = address_of(name)
        self.incarnation = f"{name}/{life}".encode().ljust(16, b".")[:16]
        core, membership = self._core_config(), self._membership_config()
        recorder = NodeRecorder(cluster.record, core, membership) if cluster.record else None
        super().__init__(cluster.driver, NodeCore(core, Membership(membership, unreadable)), recorder)
        self.engine = Engine(self)
        self.mover = Mover(self)
        self.inbound: dict[str, Link] = {}
        self.asks: dict[bytes, Ask] = {}
        self.sent: dict[int, Ask] = {}  # here by clients, and not ended
        self._links: dict[str, Link] = {}

    def start(self, join: Sequence[str]) -> None:
        self.cluster.bus.listening[self.address] = self
        self.post(ev.WorkerUp())
        self.mover.start(1)
        for address in join:
            self.post(ev.JoinAsked(address=address))

    def end(self) -> None:
        """The process is gone, with its children and its memory."""
        self.over = True
        self.close()
        self.engine.life += 1
        self.mover.end()
        if self.cluster.bus.listening.get(self.address) is self:
            del self.cluster.bus.listening[self.address]
        self.cluster.bus.process_ended(self)
        for ask in list(self.sent.values()):
            self.cluster.lost(self, ask)

    def close(self) -> None:
        """Nothing more is recorded."""
        if self._recorder is not None:
            self._recorder.close()

    def settled(self) -> None:
        self.engine.look()

    # ------------------------------------------------------------ the bus

    def hear(self, link: str, packet: Packet) -> None:
        self.post(
            ev.MessageCame(link=link, header=packet.header, message=packet.message, block_hashes=packet.block_hashes)
        )

    def lost_link(self, link: Link) -> None:
        if not link.closed:
            self.enter(self.post, ev.LinkLost(link=link.key))

    def _send(self, e: ev.Send[Any]) -> None:
        link = self._links.get(e.link)
        if link is not None:
            link.sent += 1
            seq = link.sent
        elif (link := self.inbound.get(e.link)) is not None:
            link.answered += 1
            seq = link.answered
        else:
            return
        message = e.message
        hashes = self.asks[message.try_.request].block_hashes if isinstance(message, PrefillRequest) else ()
        header = Header(from_=self.name, from_inc=self.incarnation, to=e.to, to_inc=e.to_inc, seq=seq, cause=e.cause)
        self.cluster.bus.send(link, self, Packet(header, message, hashes))

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

    def ask(self, ask: Ask) -> None:
        """A client's request, tokenized."""
        self.asks[ask.request] = ask
        self.post(
            ev.GenerateAsked(
                request=ask.request,
                link=ask.client,
                client=ask.client,
                prompt_tokens=ask.prompt_tokens,
                prompt_digest=ask.request,
                block_hashes=ask.block_hashes,
                sampling=ask.sampling,
                deadline_ns=DEADLINE_NS,
                credit=ask.sampling.max_tokens,
            )
        )

    def _take_first_token(self, e: ev.TakeFirstToken) -> None:
        self.asks[e.request].sampled(1, 0, self.driver.now)
        self.post(ev.FirstTokenTaken(request=e.request, stop=False))

    def _emit_token(self, e: ev.EmitToken) -> None:
        self.asks[e.request].sampled(self.engine.tokens, self.engine.each_ns, self.driver.now)

    def _end_request(self, e: ev.EndRequest) -> None:
        self.cluster.answered(self, self.asks.pop(e.request), e)

    # ------------------------------------------------------------ worker and mover

    def _run_step(self, e: ev.RunStep) -> None:
        self.engine.run(e)

    def worker_lost(self) -> None:
        self.engine.life += 1
        self.post(ev.WorkerLost(problem="killed"))

    def _restart_worker(self, e: ev.RestartWorker) -> None:
        self.driver.after(WORKER_START_NS, self.enter, self.post, ev.WorkerUp())

    def _restart_mover(self, e: ev.RestartMover) -> None:
        self.mover.restart(e.epoch)

    def _add_peer(self, e: ev.AddPeer) -> None:
        self.mover.add_peer(e.peer, e.agents[0])

    def _remove_peer(self, e: ev.RemovePeer) -> None:
        self.mover.remove_peer(e.peer)

    def _start_read(self, e: ev.StartRead) -> None:
        self.mover.read(e.read, e.peer, len(e.target))

    def agent(self, epoch: int) -> Agent:
        name = f"{self.name}/0/{self.incarnation.hex()}/{epoch}"
        return Agent(epoch=epoch, name=name, blocks=self.core.config.blocks)

    # ------------------------------------------------------------ the rest

    def _publish(self, e: ev.Publish) -> None:
        if e.topic != "kv":
            self.cluster.published(self, e)

    def _drained(self, e: ev.Drained) -> None:
        self.cluster.drained(self)

    def _ignore(self, e: ev.NodeEffect) -> None:
        """What only a real worker, mover or publisher needs."""

    CARRY_OUT: ClassVar[Mapping[type[ev.NodeEffect], Callable[[Any, Any], None]]] = {
        ev.Send: _send,
        ev.OpenLink: _open_link,
        ev.CloseLink: _close_link,
        ev.OpenSequence: _ignore,
        ev.CloseSequence: _ignore,
        ev.RunStep: _run_step,
        ev.TakeFirstToken: _take_first_token,
        ev.EmitToken: _emit_token,
        ev.EndRequest: _end_request,
        ev.AddPeer: _add_peer,
        ev.RemovePeer: _remove_peer,
        ev.StartRead: _start_read,
        ev.AdvertiseLeases: _ignore,
        ev.RestartMover: _restart_mover,
        ev.RestartWorker: _restart_worker,
        ev.Publish: _publish,
        ev.Drained: _drained,
    }

    def _core_config(self) -> CoreConfig:
        plan, prefills = self.plan, self.role == "prefill"
        return CoreConfig(
            name=self.name,
            incarnation=self.incarnation,
            decodes=not prefills,
            blocks=plan.prefill_blocks if prefills else plan.decode_blocks,
            block_size=plan.block_size,
            block_bytes=plan.block_bytes,
            max_model_len=plan.max_model_len,
            limits=Limits(max_batch_tokens=plan.max_batch_tokens, prefill_chunk=plan.prefill_chunk),
            running_max=plan.max_running,
            skip_sampling=plan.skip_sampling and prefills,
            prefill_policy=plan.prefill_policy,
            handoff=plan.handoff,
        )

    def _membership_config(self) -> MembershipConfig:
        hello = Hello(
            role=self.role,
            address=self.address,
            version=__version__,
            epoch=1,
            geometry=geometry_for(1, 1, 4, self.plan.block_size, "float32"),
            max_model_len=self.plan.max_model_len,
        )
        calls = len(self.cluster.reach(self.name)) if self.role != "prefill" else 1
        # Nodes call whom they are told to, and none that a welcome names: at some thousand nodes that is all of them.
        return MembershipConfig(name=self.name, incarnation=self.incarnation, hello=hello, addresses_max=max(1, calls))


def address_of(name: str) -> str:
    return f"tcp://{name}{PORT}"
