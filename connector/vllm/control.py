"""The shell around the core, in a thread of vLLM's scheduler process: bus, movers, clock. Each rank has a slab and a
mover; the core knows of one.

Decisions are made under a lock, by whichever thread has something to tell: vLLM's scheduler must not wait for another
thread's turn. What they lead to is done by the loop's thread alone, in the order decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pdbus import __version__
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import Broken, ConfigError, PdError
from pdbus.bus.keyring import Keyring, node_keyring
from pdbus.bus.members import MembershipConfig, Peer
from pdbus.bus.membership import Membership
from pdbus.bus.messages import EventsSnapshot, Hello, KVLayout, Message
from pdbus.bus.publisher import Publisher

from .. import events as ev
from .. import ipc
from ..handoff import HandoffConfig
from ..key_watch import KeyWatch
from ..layout import node_block_bytes
from ..movers import MoverShell, Said
from ..readable import unreadable
from ..recording import TurnRecorder
from ..run_directory import RunDirectory
from ..scratch import scratch_bytes
from ..slab import Slab, check_available
from .copies import SlabAt
from .core import PairConfig, PairCore
from .events import EngineEvent
from .model import KvShape
from .recording import recorder
from .report import answer_to
from .settings import MIB, WHERE, Settings
from .wants import Want

S = 1_000_000_000
START_WAIT_S = 30.0  # for the bus to be bound
STOP_WAIT_S = 10.0  # for the mover to end in good order
FLUSH_MS = 500  # what last words get to leave
RENEWALS = 6  # in a lease's time, as on a node: some may be lost
TICK_MIN_S = 0.001
REST_S = 0.005  # of vLLM's scheduler, when it has nothing but requests that wait for KV; new ones wait until it ends
REST_MAX_S = 0.1  # as waiting goes on: after each rest all workers step for nothing, and take cores that others need

log = logging.getLogger("vllm.pdbus")


class Control:
    """One server's. `start` returns when the bus is bound; after `stop`, or a mistake of ours, nothing is handed over
    and vLLM computes every prompt itself."""

    def __init__(self, settings: Settings, shape: KvShape) -> None:
        """Raises ConfigError when the slab would hold less than two blocks, or cannot be had."""
        block_bytes = node_block_bytes(shape.geometry)
        self._blocks = settings.kv_memory_mib * MIB // block_bytes
        if self._blocks < 2:
            raise ConfigError(
                f"{WHERE}.kv_memory_mib", f"{settings.kv_memory_mib} MiB hold {self._blocks} blocks of {block_bytes} "
                "bytes; at least 2"
            )  # fmt: skip
        self._settings, self._shape = settings, shape
        self._layouts = shape.layouts(self._blocks)
        self._slabs = _slabs(self._layouts, reads=settings.role == "decode")
        self.slabs = tuple(SlabAt(path=s.path, size_bytes=s.size_bytes, blocks=self._blocks) for s in self._slabs)
        self.address = ""  # of the bus, once it is bound
        self._incarnation = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._core: PairCore | None = None  # None: not started, or over
        self._recorder: TurnRecorder | None = None
        self._keys: KeyWatch | None = None
        self._effects: deque[ev.NodeEffect] = deque()
        self._draining = False
        self._settled = threading.Event()  # since the last rest, for some request
        self._rest_s = REST_S
        self._bound = threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="pdbus", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ from vLLM's thread

    def start(self) -> None:
        """Raises ConfigError for an address that cannot be had, Broken where nothing works."""
        self._thread.start()
        if not self._bound.wait(START_WAIT_S):
            raise Broken(f"the bus was not bound within {START_WAIT_S:.0f} s")
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """Say goodbye, end the mover."""
        if self._thread.is_alive():
            self.tell(ev.LeaveAsked())
            self._thread.join(STOP_WAIT_S)

    def tell(self, event: ev.NodeEvent | EngineEvent) -> None:
        """Let the core decide, now; what follows is done soon, by the loop's thread."""
        with self._lock:
            if self._core is None:
                return
            try:
                self._effects.extend(self._turn(self._core, event, time.monotonic_ns()))
            except Exception as e:
                self._core = None
                self._problem = e
                log.exception("nothing is handed over any more: this is a mistake in pdbus")
        if threading.current_thread() is self._thread:
            self._drain()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._drain)

    def _turn(self, core: PairCore, event: ev.NodeEvent | EngineEvent, now: int) -> list[ev.NodeEffect]:
        recorder = self._recorder
        return core.handle(event, now) if recorder is None else recorder.record(core.handle, event, now)

    def prompt_blocks(self, request: str) -> tuple[int, ...]:
        with self._lock:
            return self._core.prompt_blocks(request) if self._core is not None else ()

    def want(self, request: str) -> Want | None:
        with self._lock:
            return self._core.want(request) if self._core is not None else None

    def rest(self) -> None:
        """Wait until some KV is there or will not come, or for about as long as it has been awaited."""
        settled = self._settled.wait(self._rest_s)
        self._settled.clear()
        self._rest_s = REST_S if settled else min(2 * self._rest_s, REST_MAX_S)

    @property
    def mover_pids(self) -> tuple[int, ...]:
        """By rank; 0 while none runs."""
        return self._mover.pids

    # ------------------------------------------------------------ the loop's thread

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._main())
        except Exception as e:
            self._problem = e
            if self._bound.is_set():
                log.exception("nothing is handed over any more")
        finally:
            with self._lock:
                self._core = None
            if self._recorder is not None:
                self._recorder.close()
            self._bound.set()
            for slab in self._slabs:
                slab.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        keyring = self._keyring()
        directory = RunDirectory()
        self._endpoint = Endpoint(
            self._settings.name, self._incarnation, self._on_message, keyring=keyring,
            on_link_lost=self._on_link_lost, on_link_refused=self._on_link_lost,
        )  # fmt: skip
        self._publisher = Publisher(
            self._settings.name, self._incarnation, context=self._endpoint.context, keyring=keyring
        )
        if keyring is not None:
            self._keys = KeyWatch(keyring, self._endpoint, self._publisher, peer=self._peer, tell=self.tell)
        self._mover = MoverShell(
            self._slabs, self._layouts, directory.path, name=self._settings.name, incarnation=self._incarnation,
            listen=self._settings.listen, tell=self.tell, spawn=self._spawn, on_said=self._on_mover,
            on_broken=self._end, log=log,
        )  # fmt: skip
        try:
            self.address = address = self._endpoint.bind(self._settings.listen, setting=f"{WHERE}.listen")
            events = self._publisher.bind(address.rpartition(":")[0] + ":0", setting=f"{WHERE}.listen")
            self._make_core(self._pair_config(), self._membership(address, events))
            if self._keys is not None:
                self._keys.start(address)
            await self._mover.start(1)
            for join in self._settings.join:
                self.tell(ev.JoinAsked(address=join))
            s = self._settings
            log.info("pdbus %s: %s node %s, %d blocks to hand over", address, s.role, s.name, self._blocks)
            self._spawn(self._endpoint.serve())
            self._bound.set()
            await self._ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._keys is not None:
                self._keys.stop()
            await self._mover.stop()
            self._publisher.close()
            self._endpoint.close(linger_ms=FLUSH_MS)
            directory.close()

    def _keyring(self) -> Keyring | None:
        s = self._settings
        return node_keyring(s.keys, s.name, s.role, setting=f"{WHERE}.keys") if s.keys else None

    def _peer(self, name: str) -> Peer | None:
        return self._core.peers.get(name) if self._core is not None else None

    def _make_core(self, config: PairConfig, membership: MembershipConfig) -> None:
        if self._settings.record:
            folder = Path(self._settings.record).expanduser()
            self._recorder = recorder(folder, config, membership, setting=f"{WHERE}.record")
            log.info("everything heard and decided is recorded to %s", self._recorder.path)
        with self._lock:
            self._core = PairCore(config, Membership(membership, unreadable))

    def _pair_config(self) -> PairConfig:
        s = self._settings
        wait_ns = int(s.pair_wait_s * S)
        handoff = HandoffConfig(
            lease_ns=int(s.lease_s * S), renew_ns=int(s.lease_s * S / RENEWALS), answer_ns=wait_ns + S,
            block_bytes=node_block_bytes(self._shape.geometry),
        )  # fmt: skip
        return PairConfig(
            name=s.name, incarnation=self._incarnation, role=s.role, blocks=self._blocks,
            block_size=self._shape.geometry.block_size, pair_wait_ns=wait_ns, park_ns=int(s.park_s * S),
            fetch_ns=int(s.fetch_s * S), handoff=handoff,
        )  # fmt: skip

    def _membership(self, address: str, events: str) -> MembershipConfig:
        hello = Hello(
            role=self._settings.role, address=address, events=events, version=__version__, epoch=1,
            geometry=self._shape.geometry, fingerprint=self._shape.fingerprint, model=self._shape.model,
            max_model_len=self._shape.max_model_len,
        )  # fmt: skip
        return MembershipConfig(name=self._settings.name, incarnation=self._incarnation, hello=hello)

    def _on_link_lost(self, link: str, reason: str = "") -> None:
        self.tell(ev.LinkLost(link=link, reason=reason))

    def _on_message(self, received: Received) -> None:
        if self._keys is not None:
            received = self._keys.heard(received)
        answer = self._answer_to(received)
        if answer is not None:
            header = received.header
            self._endpoint.tell(received.link, answer, to=header.from_, to_inc=header.from_inc, cause=header.seq)
            return
        self.tell(ev.MessageCame(link=received.link, header=received.header, message=received.message))

    def _answer_to(self, received: Received) -> Message | None:
        """What a tool is told. Raises RequestError."""
        if isinstance(received.message, EventsSnapshot):
            return self._publisher.snapshot(received.message)
        shape = self._shape
        more = {
            "model": shape.model, "max_model_len": shape.max_model_len, "block_bytes": node_block_bytes(shape.geometry),
            "address": self.address, "pids": {"control": os.getpid(), "mover": self._mover.pids[0]},
            "ranks": [{"mover": pid} for pid in self._mover.pids],
        }  # fmt: skip
        with self._lock:
            return answer_to(received.message, self._core, more) if self._core is not None else None

    def _drain(self) -> None:
        """Do what was decided, in order; what that leads to comes behind it."""
        if self._draining:
            return
        self._draining = True
        try:
            while self._effects:
                effect = self._effects.popleft()
                _CARRY_OUT[type(effect)](self, effect)
        except Exception as e:
            self._end(e)
        finally:
            self._draining = False
        if self._core is None:
            self._end(self._problem)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            deadline = self._core.next_deadline() if self._core is not None else None
        if deadline is not None and not self._ended.done():
            wait_s = max((deadline - time.monotonic_ns()) / 1e9, TICK_MIN_S)
            self._timer = self._loop.call_later(wait_s, self.tell, ev.Tick())

    def _end(self, problem: BaseException | None = None) -> None:
        if not self._ended.done():
            self._ended.set_exception(problem) if problem is not None else self._ended.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: None if t.cancelled() or t.exception() is None else self._end(t.exception()))

    def _on_mover(self, message: Said) -> None:
        if isinstance(message, ipc.MoverFailed):
            log.error("mover: %s", message.problem)

    # ------------------------------------------------------------ effects

    def _send(self, e: ev.Send[Any]) -> None:
        self._endpoint.tell(e.link, e.message, to=e.to, to_inc=e.to_inc, cause=e.cause)

    def _open_link(self, e: ev.OpenLink) -> None:
        try:
            link = self._endpoint.connect(e.address)
        except PdError as problem:
            self.tell(ev.LinkFailed(address=e.address, problem=str(problem)))
        else:
            self.tell(ev.LinkOpened(address=e.address, link=link))

    def _to_mover(self, e: ev.NodeEffect) -> None:
        self._mover.carry_out(e)

    def _publish(self, e: ev.Publish) -> None:
        if e.topic == "node" or e.event == "attempt.failed":
            log.info("%s %s", e.event, " ".join(f"{key}={value}" for key, value in e.data.items()))
        if e.topic == "request":
            self._settled.set()
        self._publisher.publish(e.topic, e.event, e.data)


def _slabs(layouts: Sequence[KVLayout], *, reads: bool) -> list[Slab]:
    """One a rank; who reads has scratch behind it, for what peers' ranks share otherwise. Raises ConfigError."""
    sizes = [layout.region_bytes + (scratch_bytes(layout) if reads else 0) for layout in layouts]
    try:
        check_available(sum(sizes))
        return [Slab.create(size) for size in sizes]
    except ConfigError as e:
        raise ConfigError(f"{WHERE}.kv_memory_mib", e.problem) from None


_CARRY_OUT: dict[type[ev.NodeEffect], Callable[[Control, Any], None]] = {
    ev.Send: Control._send,
    ev.OpenLink: Control._open_link,
    ev.CloseLink: lambda c, e: c._endpoint.close_link(e.link, linger_ms=FLUSH_MS if e.flush else 0),
    ev.AddPeer: Control._to_mover,
    ev.RemovePeer: Control._to_mover,
    ev.StartRead: Control._to_mover,
    ev.AdvertiseLeases: Control._to_mover,
    ev.RestartMover: Control._to_mover,
    ev.Publish: Control._publish,
    ev.Drained: lambda c, e: c._end(),
}
