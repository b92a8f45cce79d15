"""The control process of a node: the shell around its core. It owns sockets, children, clock and token values.

Everything that happens becomes one event, handled to its end before the next; every effect is carried out at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from pdbus.bus.endpoint import Received
from pdbus.bus.errors import Broken, ConfigError
from pdbus.bus.keyring import Keyring
from pdbus.bus.membership import Membership
from pdbus.bus.messages import FirstToken, Message, PrefillRequest, TryId
from pdbus.bus.wire import decode, encode, pack_u32, replace
from pdbus.connector import ipc
from pdbus.connector.key_watch import KeyWatch
from pdbus.connector.movers import MoverShell, Said
from pdbus.connector.process import Exit, keep_what_is_loaded
from pdbus.connector.ranks import Starts
from pdbus.connector.readable import unreadable
from pdbus.connector.run_directory import RunDirectory
from pdbus.connector.slab import Slab, check_available
from pdbus.connector.wakeups import wake_at_once

from . import events as ev
from . import report
from .binding import bind_bus, make_bus
from .checks import check_first_tokens, checked_prompt
from .children import HttpServer
from .config import NodeConfig
from .core import NodeCore
from .intake import Intake
from .kv_checks import wrong_digest
from .logs import set_up_logs
from .machine_config import core_config, membership_config
from .measures import Measures
from .rank_children import workers
from .recording import NodeRecorder
from .setup import Setup, set_up
from .spans import NodeSpans
from .tokenizer import load_tokenizer
from .tracing import tracer_of

TICK_MIN_S = 0.001
FLUSH_MS = 500  # what goodbyes and last answers get to leave

log = logging.getLogger("pdbus")


def run_node(config: NodeConfig) -> int:
    """Run a node until it has drained. Returns the exit status; raises ConfigError for what cannot work."""
    set_up_logs(config.name, config.log_format)
    wake_at_once()
    setup = set_up(config)
    status: int = uvloop.run(_run(config, setup))
    return status


async def _run(config: NodeConfig, setup: Setup) -> int:
    check_available(sum(setup.slab_bytes) + setup.device_bytes)
    slabs = [Slab.create(size) for size in setup.slab_bytes]
    directory = RunDirectory(config.run_dir)
    try:
        control = Control(config, setup, slabs, directory.path)
        try:
            return await control.run()
        finally:
            await control.close()
    finally:
        directory.close()
        for slab in slabs:
            slab.close()


class Control:
    """One node's process. `run` returns when the node has drained, or raises what ended it."""

    def __init__(self, config: NodeConfig, setup: Setup, slabs: Sequence[Slab], directory: Path) -> None:
        self.config = config
        self.setup = setup
        self.incarnation = secrets.token_bytes(16)
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._queue: deque[ev.NodeEvent] = deque()
        self._turning = False
        self._timer: asyncio.TimerHandle | None = None
        self._prompts: dict[TryId, bytes] = {}  # of the prefill.request being handled
        self._starts = Starts("worker")
        self._signals = 0
        self._ready, self._loaded = False, ""  # what the log says of it
        self._tasks: set[asyncio.Task[Any]] = set()
        self.measures = Measures()
        tracer = tracer_of(config.name)
        self.spans = NodeSpans(tracer, config.name, setup.model) if tracer is not None else None
        self.endpoint, self.publisher = make_bus(config, self.incarnation, self._on_message, self._on_link_lost)
        self.address, self.events = bind_bus(config, self.endpoint, self.publisher)
        self._keys = self._key_watch(self.endpoint.keyring) if self.endpoint.keyring is not None else None
        self._http = HttpServer(config, self.address, self.endpoint.public) if config.http_port else None
        of_core = core_config(config, setup, self.incarnation)
        of_membership = membership_config(
            config, setup, self.incarnation, address=self.address, http=self.http, events=self.events
        )
        self.core = NodeCore(of_core, Membership(of_membership, unreadable))
        self._recorder = (
            NodeRecorder(
                Path(config.record),
                of_core,
                of_membership,
                tokens=config.record_tokens,
                total_bytes_max=config.record_max,
            )
            if config.record
            else None
        )
        self.publisher.provide("kv", lambda: {"hashes": [h.hex() for h in self.core.pool.shareable()]})
        self.intake = Intake(self, load_tokenizer(config.engine, setup.folder, config.coded_vocab))
        self._directory = directory
        self._worker_lives = 0
        self._checks = 0
        self._checking: dict[int, ev.CheckKv] = {}  # by number, what the workers digest now
        self.worker = workers(config, setup, slabs, directory, on_message=self._on_worker, on_exit=self._on_worker_exit)
        self.mover = MoverShell(
            slabs, setup.layouts, directory, name=config.name, incarnation=self.incarnation, listen=config.listen,
            tell=self._tell_of_mover, spawn=self._spawn, on_said=self._on_mover, on_broken=self.fail, log=log,
        )  # fmt: skip

    def _key_watch(self, keyring: Keyring) -> KeyWatch:
        return KeyWatch(
            keyring, self.endpoint, self.publisher, peer=lambda name: self.core.peers.get(name), tell=self.post,
            gone=lambda link: self.post(ev.ClientGone(link=link)),
        )  # fmt: skip

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Start everything, serve, drain. Returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        await self._start_worker()
        await self.mover.start(1)
        if self._http is not None:
            await self._http.start()
        log.info("bus %s%s", self.address, f", HTTP {self.http}" if self.http else "")
        log.info(
            "model %s, %d KV blocks of %d tokens, at most %d tokens a request",
            self.setup.model, self.setup.blocks, self.config.block_size, self.setup.max_model_len,
        )  # fmt: skip
        if (ranks := self.setup.geometry.ranks) > 1:
            log.info("%d ranks, a worker and a mover each", ranks)
        for address in self.config.join:
            self.post(ev.JoinAsked(address=address))
        if self._keys is not None:
            self._keys.start(self.address)
        keep_what_is_loaded()
        serving = self._loop.create_task(self.endpoint.serve())
        serving.add_done_callback(lambda t: None if t.cancelled() else self.fail(t.exception()))
        return await self._ended

    async def close(self) -> None:
        """End the children, then the sockets, so that the last words have left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._keys is not None:
            self._keys.stop()
        self.intake.farewell()
        await asyncio.gather(self.worker.stop(), self.mover.stop(), *([self._http.stop()] if self._http else []))
        self.intake.close()
        self.publisher.close()
        self.endpoint.close(linger_ms=FLUSH_MS)
        if self._recorder is not None:
            self._recorder.close()
        if self.spans is not None:
            self.spans.close()

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)

    def fail(self, problem: BaseException | None) -> None:
        """A mistake of ours, or a child that cannot be: the node ends loudly."""
        if problem is not None and not self._ended.done():
            self._ended.set_exception(problem)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.info("ending now")
        self.post(ev.DrainAsked() if self._signals == 1 else ev.LeaveAsked())

    @property
    def http(self) -> str:
        return self._http.url if self._http is not None else ""

    # ------------------------------------------------------------ the loop

    def post(self, event: ev.NodeEvent) -> None:
        """Let the core hear it, after what it is hearing now."""
        self._queue.append(event)
        if self._turning or self._ended.done():
            return
        self._turning = True
        try:
            while self._queue:
                self._turn(self._queue.popleft())
        except Exception as e:
            self.fail(e)
        finally:
            self._turning = False
        self._arm()

    def _turn(self, event: ev.NodeEvent) -> None:
        now = time.monotonic_ns()
        recorder, was = self._recorder, self.core.drain_until
        effects = recorder.turn(self.core, event, now) if recorder else self.core.handle(event, now)
        self.measures.turn(event, effects)
        if self.spans is not None:
            self.spans.decided(effects)
        if was is None and self.core.drain_until is not None:  # a signal's doing, or a client's
            log.info("draining")
        if self._ready is bool(report.not_ready(self.core)):
            self._ready = not self._ready
            if self._ready:
                log.info("is ready: %s", self._loaded)
        for effect in effects:
            _CARRY_OUT[type(effect)](self, effect)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and not self._ended.done():
            wait_s = max((deadline - time.monotonic_ns()) / 1e9, TICK_MIN_S)
            self._timer = self._loop.call_later(wait_s, self.post, ev.Tick())

    # ------------------------------------------------------------ the bus

    def _on_message(self, received: Received) -> None:
        if self._keys is not None:
            received = self._keys.heard(received)
        if self.intake.takes(received):
            return
        message = received.message
        if isinstance(message, PrefillRequest):
            prompt, hashes = checked_prompt(received, self.setup)
            message = self._untraced(message)
            self._prompts[message.try_] = prompt
            self.post(ev.MessageCame(link=received.link, header=received.header, message=message, block_hashes=hashes))
            self._prompts.pop(message.try_, None)
        else:
            check_first_tokens(message, self.setup)
            self.post(ev.MessageCame(link=received.link, header=received.header, message=message))

    def _untraced(self, message: PrefillRequest) -> PrefillRequest:
        """As the core hears it, and as it is recorded."""
        if not message.traceparent:
            return message
        if self.spans is not None:
            self.spans.asked(message.try_, message.traceparent)
        return replace(message, traceparent="")

    def _on_link_lost(self, link: str, reason: str = "") -> None:
        self.post(ev.LinkLost(link=link, reason=reason))

    def _send(self, e: ev.Send[Message]) -> None:
        if isinstance(e.message, PrefillRequest):
            self._send_prefill(e, e.message)
        else:
            self.endpoint.tell(e.link, e.message, to=e.to, to_inc=e.to_inc, cause=e.cause)

    def _send_prefill(self, e: ev.Send[Message], message: PrefillRequest) -> None:
        request = message.try_.request
        if traceparent := self.intake.traceparent(request):
            message = replace(message, traceparent=traceparent)
        raw = (pack_u32(self.intake.prompt(request)),)
        self.endpoint.tell(e.link, message, raw, to=e.to, to_inc=e.to_inc, cause=e.cause)
        self._warm()

    def _open_link(self, e: ev.OpenLink) -> None:
        try:
            link = self.endpoint.connect(e.address)
        except ConfigError as problem:
            self.post(ev.LinkFailed(address=e.address, problem=problem.problem))
        else:
            self.post(ev.LinkOpened(address=e.address, link=link))

    def _close_link(self, e: ev.CloseLink) -> None:
        self.endpoint.close_link(e.link, linger_ms=FLUSH_MS if e.flush else 0)

    # ------------------------------------------------------------ the worker

    def _on_worker(self, message: ipc.FromWorker) -> None:
        match message:
            case ipc.WorkerReady():
                self._starts.ready()
                self._loaded = f"worker {message.pid} loaded in {message.load_ns / 1e9:.1f} s"
                self.post(ev.WorkerUp())
            case ipc.StepDone():
                self._step_done(message)
            case ipc.KvDigested():
                self._digested(message)
            case ipc.Copied(copy=copy, bytes=size, copy_ns=copy_ns, in_step=in_step):
                self.post(ev.CopyEnded(copy=copy, bytes=size, copy_ns=copy_ns, in_step=in_step))
            case ipc.WorkerAlive():
                self.intake.probed("worker", message.probe)
            case ipc.WorkerFailed() if self.core.worker_up:
                log.error("worker: %s", message.problem)
            case ipc.WorkerFailed(setting=setting, problem=problem):
                self.fail(ConfigError(setting, problem) if setting else Broken(f"the worker cannot start: {problem}"))

    def _step_done(self, done: ipc.StepDone) -> None:
        if not self.core.scheduler.busy or done.step != self.core.scheduler.step:
            return
        self.measures.step_ended(done.rows)
        for row in done.rows:
            if row.prompt_logprobs:
                self.intake.scored(row.seq, row.prompt_from, row.prompt_logprobs)
        rows = tuple(self._row_ended(row) for row in done.rows)
        self.post(ev.StepEnded(step=done.step, rows=rows, compute_ns=done.compute_ns))

    def _row_ended(self, row: ipc.RowResult) -> ev.StepRowEnded:
        if row.wrong_kv:
            return ev.StepRowEnded(seq=row.seq, problem=f"wrong KV: {row.wrong_kv}")
        if row.problem:
            return ev.StepRowEnded(seq=row.seq, problem=row.problem, code="unsupported_value")
        if row.token < 0:
            return ev.StepRowEnded(seq=row.seq, digests=row.digests)
        if self.core.prefills.owns(row.seq):
            payload = encode(FirstToken(token=row.token, logprob=row.logprob, draft=row.draft))
            return ev.StepRowEnded(seq=row.seq, payload=payload, digests=row.digests)
        return self._taken(row)

    def _taken(self, row: ipc.RowResult) -> ev.StepRowEnded:
        """What is sampled beyond the answer's end counts for nothing."""
        sampled = [(row.token, row.logprob), *((one.token, one.logprob) for one in row.more)]
        for count, (token, logprob) in enumerate(sampled, 1):
            if self.intake.take(row.seq, token, logprob):
                return ev.StepRowEnded(seq=row.seq, tokens=count, stop=True)
        return ev.StepRowEnded(seq=row.seq, tokens=len(sampled))

    def _open_sequence(self, e: ev.OpenSequence) -> None:
        if e.try_ is not None:
            prompt = self._prompts[e.try_]
            self.worker.send(ipc.SeqOpen(seq=e.seq, prompt=prompt, sampling=e.sampling, digest_from=e.digest_from))
            return
        answer = self.intake.open(e.request, e.seq)
        self.worker.send(ipc.SeqOpen(seq=e.seq, prompt=pack_u32(answer.prompt), sampling=e.sampling))
        if answer.tokens:
            self.worker.send(ipc.SeqForce(seq=e.seq, tokens=pack_u32(answer.tokens)))

    def _close_sequence(self, e: ev.CloseSequence) -> None:
        self.worker.send(ipc.SeqClose(seq=e.seq))

    def _run_step(self, e: ev.RunStep) -> None:
        self.worker.send(ipc.Step(step=e.step, rows=e.rows))

    def _take_first_token(self, e: ev.TakeFirstToken) -> None:
        first = decode(e.payload, FirstToken, name="first_token")
        stop = self.intake.take(e.seq, first.token, first.logprob)
        self.worker.send(ipc.SeqForce(seq=e.seq, tokens=pack_u32((first.token,)), draft=first.draft))
        self.intake.emit(e.request)
        self.post(ev.FirstTokenTaken(request=e.request, stop=stop))

    def _emit_token(self, e: ev.EmitToken) -> None:
        self.intake.emit(e.request)

    def _end_request(self, e: ev.EndRequest) -> None:
        self.worker.send(ipc.SeqClose(seq=e.seq))
        self.intake.finish(e)

    def _warm(self) -> None:
        """Somebody prefills for us. A worker that rests meanwhile takes twice as long for its first step."""
        if not self.core.scheduler.busy and self.core.worker_up:
            self.worker.send(ipc.Warm())

    def _check_kv(self, e: ev.CheckKv) -> None:
        self._checks += 1
        self._checking[self._checks] = e
        self.worker.send(
            ipc.DigestKv(check=self._checks, blocks=pack_u32(e.blocks), begin=e.begin, end=e.end, size=e.size)
        )

    def _digested(self, message: ipc.KvDigested) -> None:
        e = self._checking.pop(message.check)
        if problem := wrong_digest(e, message.digests, self.setup.geometry.layers):
            log.error("KV read for request %s: %s", e.request.hex(), problem)
        self.post(ev.KvChecked(request=e.request, attempt=e.attempt, problem=problem))

    def _on_worker_exit(self, ended: Exit) -> None:
        self.intake.lost("worker")
        self._checking.clear()
        if not self._ended.done():
            log.error("worker: %s", ended)
            self.post(ev.WorkerLost(problem=str(ended)))

    def _restart_worker(self, e: ev.RestartWorker) -> None:
        try:
            self._spawn(self._start_worker_later(self._starts.wait_s()))
        except Broken as e:
            self.fail(e)

    async def _start_worker_later(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._start_worker()

    async def _start_worker(self) -> None:
        """Ranks meet in a file of their own for each life."""
        self._worker_lives += 1
        group = str(self._directory / f"group-{self._worker_lives}")
        await self.worker.start(lambda rank: {"group": group})

    # ------------------------------------------------------------ the mover

    def _on_mover(self, message: Said) -> None:
        match message:
            case ipc.ReadEnded():
                self.measures.read_ended(message)
            case ipc.MoverAlive():
                self.intake.probed("mover", message.probe)
            case ipc.MoverFailed() if self.core.mover.up:
                log.error("mover: %s", message.problem)
            case ipc.MoverFailed(setting=setting, problem=problem):
                self.fail(ConfigError(setting, problem) if setting else Broken(f"the mover cannot start: {problem}"))

    def _tell_of_mover(self, event: ev.NodeEvent) -> None:
        if isinstance(event, ev.MoverLost):
            self.intake.lost("mover")
        self.post(event)

    def _to_mover(self, e: ev.NodeEffect) -> None:
        self.mover.carry_out(e)

    def _start_read(self, e: ev.StartRead) -> None:
        self.mover.carry_out(e)
        if e.end < len(self.intake.prompt(e.request)):  # the last chunk's is followed by a step at once
            self._warm()

    def _restart_mover(self, e: ev.RestartMover) -> None:
        if self.core.mover.healing:
            log.warning("mover: replaced, since too many blocks wait for reads that do not end")
        self.mover.carry_out(e)

    # ------------------------------------------------------------ the rest

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: None if t.cancelled() else self.fail(t.exception()))

    def _publish(self, e: ev.Publish) -> None:
        if e.topic == "node" and (line := report.news(e.event, e.data)):
            log.info("%s", line)
        elif e.event == "attempt.failed":
            named = {"request": e.data["request"], "attempt": e.data["attempt"], "peer": e.data["node"]}
            log.warning("attempt failed: %s", e.data["cause"], extra=named)
        self.publisher.publish(e.topic, e.event, e.data)

    def _drained(self, e: ev.Drained) -> None:
        log.info("drained")
        self.end(0)


_CARRY_OUT: dict[type[ev.NodeEffect], Callable[[Control, Any], None]] = {
    ev.Send: Control._send,
    ev.OpenLink: Control._open_link,
    ev.CloseLink: Control._close_link,
    ev.OpenSequence: Control._open_sequence,
    ev.CloseSequence: Control._close_sequence,
    ev.RunStep: Control._run_step,
    ev.TakeFirstToken: Control._take_first_token,
    ev.EmitToken: Control._emit_token,
    ev.EndRequest: Control._end_request,
    ev.AddPeer: Control._to_mover,
    ev.RemovePeer: Control._to_mover,
    ev.StartRead: Control._start_read,
    ev.CheckKv: Control._check_kv,
    ev.StartCopy: lambda c, e: c.worker.send(ipc.Copy(copy=e.copy, way=e.way, blocks=pack_u32(e.blocks))),
    ev.AdvertiseLeases: Control._to_mover,
    ev.RestartMover: Control._restart_mover,
    ev.RestartWorker: Control._restart_worker,
    ev.Publish: Control._publish,
    ev.Drained: Control._drained,
}
