"""The worker process: one engine over one KV slab, doing what control says, in the order it says it.

    python -m pdbus.nodes.worker '<WorkerArgs as JSON>'

One thread, three verbs: receive, step, report. It decides nothing and knows no request, lease or peer. Exit status:
0 after stop, 2 for a setting that cannot work (said in one line of WorkerFailed), 1 for anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdbus.bus.errors import Closed, ConfigError, PdError
from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import from_json, replace, unpack_u32
from pdbus.connector.channel import ChildChannel
from pdbus.connector.ipc import (
    Copy,
    DigestKv,
    FromWorker,
    KvDigested,
    ProbeWorker,
    SeqClose,
    SeqForce,
    SeqOpen,
    Step,
    StepDone,
    StopWorker,
    ToWorker,
    Warm,
    WorkerAlive,
    WorkerArgs,
    WorkerFailed,
    WorkerReady,
)
from pdbus.connector.layout import layout_of
from pdbus.connector.process import keep_what_is_loaded
from pdbus.connector.slab import Slab
from pdbus.connector.wakeups import wake_in_turn
from pdbus.nodes.engines import Engine

if TYPE_CHECKING:  # it imports numpy, whose threads start with it
    from pdbus.nodes.copier import Copier
    from pdbus.nodes.digests import KvDigests
    from pdbus.nodes.engines.device import Device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEPT_FREE_BYTES = 64 << 20  # a step's largest tensors, together, stay below
UNMAPPED_BYTES = 32 << 20  # the most that glibc takes
END = object()
ALIVE_CHECK_MS = 5_000  # how often an idle worker looks whether control still lives; the kernel tells it too


@dataclass(frozen=True)
class Tools:
    """What a worker works with."""

    engine: Engine
    device: Device
    computed: KvDigests  # of KV where steps compute
    read: KvDigests  # of KV where reads land
    copier: Copier | None  # where these are two memories


def main(argv: list[str] | None = None) -> int:
    """Run a worker until it is told to stop. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is control's to act on
    args = from_json((sys.argv[1:] if argv is None else argv)[0], WorkerArgs)
    wake_in_turn()  # control does otherwise, and it is inherited
    channel = ChildChannel(args.endpoint, ToWorker)
    try:
        return _run(args, channel)
    finally:
        channel.close()


def _run(args: WorkerArgs, channel: ChildChannel[ToWorker]) -> int:
    try:
        try:
            tools = load(args, channel)
        except ConfigError as e:
            return _failed(channel, e.problem, 2, e.setting)
        except PdError as e:
            return _failed(channel, str(e), 1)
        serve(tools, channel)
    except Closed:
        return 0
    except Exception as e:
        traceback.print_exc()
        return _failed(channel, f"{type(e).__name__}: {e}", 1)
    return 0


def load(args: WorkerArgs, channel: ChildChannel[ToWorker]) -> Tools:
    """Map the slab, make the engine, run one warm-up step, and say so."""
    began = time.monotonic_ns()
    pin(args.cpus)
    from pdbus.nodes.digests import KvDigests
    from pdbus.nodes.engines.device import device_of

    device = device_of(args.device)
    slab = Slab.open(args.slab_path, args.slab_bytes)
    layout = layout_of(args.geometry, args.blocks, args.rank)
    memory, copier = device_memory(device, slab, layout, channel) if args.staged else (slab.memory, None)
    engine = make_engine(args, memory)
    tools = Tools(engine, device, KvDigests(memory, layout), KvDigests(slab.memory, layout), copier)
    keep_freed_memory()
    engine.warm_up()
    keep_what_is_loaded()
    channel.send(WorkerReady(pid=os.getpid(), vocab_size=engine.vocab_size, load_ns=time.monotonic_ns() - began))
    return tools


def device_memory(device: Device, slab: Slab, layout: KVLayout, channel: ChildChannel[ToWorker]) -> tuple[Any, Copier]:
    """Memory of the device's own, of which the slab becomes the mirror."""
    from pdbus.nodes.copier import Copier

    device.pin(slab.memory)
    memory = device.allocate(layout.region_bytes)
    return memory, Copier(device, memory, slab.memory, layout, channel.send)


def pin(cpus: tuple[int, ...]) -> None:
    """Keep to these cores. Comes before numpy or torch start threads, which inherit it."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as e:
            raise ConfigError("--cpus", f"{','.join(map(str, cpus))}: {e.strerror}") from None


def keep_freed_memory() -> None:
    """Steps free what the next one wants again: given back to the system, it came with a page fault per 4 KiB.

    5 % of a prefill, measured. Comes after loading, whose freed memory is not wanted again.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
        mallopt(M_MMAP_THRESHOLD, UNMAPPED_BYTES)


def make_engine(args: WorkerArgs, memory: Any) -> Engine:
    """The engine of that name. Only `torch` imports torch."""
    if args.engine == "coded":
        from pdbus.nodes.engines.coded import CodedEngine

        return CodedEngine(args, memory)
    if args.engine == "torch":
        import torch

        torch.set_num_threads(args.threads)
        from pdbus.nodes.engines.ipex import load_ipex
        from pdbus.nodes.engines.torch_engine import TorchEngine

        load_ipex()
        return TorchEngine(args, memory)
    raise ConfigError("--engine", f"{args.engine!r} is neither torch nor coded")


def serve(tools: Tools, channel: ChildChannel[ToWorker]) -> None:
    """Obey until StopWorker. Raises Closed when control has gone."""
    touching: Iterator[None] | None = None
    while True:
        for message in channel.poll(ALIVE_CHECK_MS if touching is None else 0):
            match message:
                case StopWorker():
                    return
                case Warm():
                    touching = tools.engine.touch()
                case Step():
                    touching = None
            report = obey(tools, message)
            if report is not None:
                channel.send(report)
        if touching is not None and next(touching, END) is END:
            touching = None


def obey(tools: Tools, message: ToWorker) -> FromWorker | None:
    """Do one thing; what is to be reported of it."""
    engine = tools.engine
    match message:
        case Step():
            return _step(tools, message)
        case Copy():
            assert tools.copier is not None
            tools.copier.begin(message)
        case SeqOpen():
            prompt = unpack_u32(message.prompt)
            engine.open(message.seq, prompt, message.sampling)
            if message.digest_from >= 0:
                tools.computed.open(message.seq, message.digest_from, len(prompt))
        case SeqForce():
            engine.force(message.seq, unpack_u32(message.tokens), message.draft)
        case SeqClose():
            engine.close(message.seq)
            tools.computed.close(message.seq)
        case DigestKv(check=check, begin=begin, end=end, size=size):
            return KvDigested(check=check, digests=tools.read.of(unpack_u32(message.blocks), begin, end, size))
        case ProbeWorker():
            return WorkerAlive(probe=message.probe)
    return None


def _step(tools: Tools, step: Step) -> StepDone:
    began = time.monotonic_ns()
    with tools.copier.beside_step() if tools.copier else contextlib.nullcontext():
        rows = tools.engine.step(step.rows)
        tools.device.settle()
    if made := tools.computed.stepped(step.rows):
        rows = [replace(row, digests=made.get(row.seq, b"")) for row in rows]
    return StepDone(step=step.step, rows=tuple(rows), compute_ns=time.monotonic_ns() - began)


def _failed(channel: ChildChannel[ToWorker], problem: str, status: int, setting: str = "") -> int:
    try:
        channel.send(WorkerFailed(problem=problem, setting=setting))
    except Closed:
        print(problem, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
