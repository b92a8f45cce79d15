"""`pd bench transfer`: how fast a mover reads a request's blocks, beside raw NIXL and a memory copy.

All move the same number of bytes between the same two slabs, in turns, so that all see the same machine; only agents
with progress threads come last, for each of these takes a core. Places are drawn anew every time: bytes that lie in the
cache would flatter whoever reads them again.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from pdbus.bus import wire
from pdbus.bus.errors import Broken, ConfigError
from pdbus.connector.ipc import Advertise, Read, ReadEnded
from pdbus.connector.slab import Slab, available_bytes

from .movers import LiveMover, Movers, introduce
from .raw import DefaultOwner, RawReader, Remote
from .used_pool import UsedPool

BLOCK_BYTES = 262_144  # 16 tokens of a model of 8 layers with 4 KV heads of 64 channels in float32
SIZES_BYTES = (1 << 20, 8 << 20, 32 << 20)
SLAB_BYTES = 256 << 20  # well beyond the caches
ROUNDS = 20
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
MATRIX = 512  # rows and columns of what a busy worker multiplies

_reads = itertools.count(1)


def run(
    sizes_bytes: Sequence[int] = SIZES_BYTES, block_bytes: int = BLOCK_BYTES, rounds: int = ROUNDS
) -> dict[str, list[dict[str, Any]]]:
    """Measure each size over the transports that UCX chooses, over TCP, and beside two workers that compute.

    gbps is 10^9 bytes a second from post to terminal status, the median of `rounds`: of blocks as used pools on both
    sides give them out (`runs`, neighbours merged), and `scattered`, no two neighbours. `raw_nixl` is one descriptor,
    `raw_blocks` one for each scattered block, both with the better of NIXL's progress thread on and off; `defaults`
    are scattered blocks between two agents left at NIXL's defaults. Sizes are rounded down to whole blocks. Raises
    Broken when NIXL cannot, ConfigError naming `--sizes` for more than the memory holds.
    """
    _check_memory(max(sizes_bytes), block_bytes)
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("sizes", total=3 * len(sizes_bytes))
        for name, condition in (("idle", nullcontext), ("tcp", over_tcp), ("busy", busy_workers)):
            with condition():
                measured = asyncio.run(_rows(sizes_bytes, block_bytes, rounds, lambda: bar.advance(task)))
                rows += [{"machine": name, **row} for row in measured]
    return {"sizes": rows}


def _slab_bytes(largest: int, block_bytes: int) -> int:
    return max(SLAB_BYTES, 4 * largest) // block_bytes * block_bytes


def _check_memory(largest: int, block_bytes: int) -> None:
    needed, free = 2 * _slab_bytes(largest, block_bytes), available_bytes()
    if needed > free:
        problem = f"reads of {largest} bytes need {needed >> 20} MiB of memory, but only {free >> 20} MiB are free"
        raise ConfigError("--sizes", f"{problem}: give smaller ones")


async def _rows(
    sizes_bytes: Sequence[int], block_bytes: int, rounds: int, advance: Callable[[], None]
) -> list[dict[str, float]]:
    slab_bytes = _slab_bytes(max(sizes_bytes), block_bytes)
    async with Movers() as movers:
        owner = await movers.start(f"bench-owner-{os.getpid()}-{time.monotonic_ns()}", slab_bytes, block_bytes)
        reader = await movers.start(f"bench-reader-{os.getpid()}-{time.monotonic_ns()}", slab_bytes, block_bytes)
        await introduce(owner, reader)
        owner.say(Advertise(leases=1))
        for slab in (owner.slab, reader.slab):
            slab.populate(slab.size_bytes)
        sizes = [max(1, size // block_bytes) * block_bytes for size in sizes_bytes]
        pools = Pools(*(UsedPool(slab_bytes // block_bytes, seed) for seed in range(2)))
        took = [await _in_turns(owner, reader, pools, size, rounds) for size in sizes]
        rows = []
        for size, quiet in zip(sizes, took, strict=True):
            pieces = size // block_bytes
            one, blocks = _with_thread(_remote(owner), reader.slab, size, pieces, rounds)
            with DefaultOwner(owner.slab) as there:
                _, default = _with_thread(there.remote, reader.slab, size, pieces, rounds)
            rows.append(_row(size, quiet, min(quiet.one, one), min(quiet.blocks, blocks), default))
            advance()
    return rows


class Pools(NamedTuple):
    owner: UsedPool
    reader: UsedPool


class Took(NamedTuple):
    """By reads and copies that took turns, in ns."""

    ours: float
    runs: float  # that ours were, a number
    scattered: float
    one: float  # raw NIXL, one descriptor
    blocks: float  # raw NIXL, a descriptor a block
    copy: float


async def _in_turns(owner: LiveMover, reader: LiveMover, pools: Pools, size: int, rounds: int) -> Took:
    """The medians."""
    pieces = size // owner.geometry.block_bytes
    took = []
    with closing(RawReader(_remote(owner), reader.slab, size)) as raw:
        for _ in range(rounds):
            ours = await _read(owner, reader, pools.owner.table(pieces), pools.reader.table(pieces))
            scattered = await _read(owner, reader, *(_anywhere(mover, pieces) for mover in (owner, reader)))
            copy = _copy(owner, reader, size)
            took.append(Took(ours.transfer_ns, ours.runs, scattered.transfer_ns, raw.read(), raw.read(pieces), copy))
    return Took(*map(median, zip(*took, strict=True)))


def _with_thread(remote: Remote, slab: Slab, size: int, pieces: int, rounds: int) -> tuple[float, float]:
    """Medians of raw reads in ns: one descriptor, a descriptor a block. A progress thread takes a core, so it is there
    for these only."""
    with closing(RawReader(remote, slab, size, progress_thread=True)) as raw:
        took = [(raw.read(), raw.read(pieces)) for _ in range(rounds)]
    one, blocks = map(median, zip(*took, strict=True))
    return one, blocks


def _remote(owner: LiveMover) -> Remote:
    return Remote(owner.agent_name, owner.ready.metadata, owner.ready.base_address, owner.ready.region_bytes)


def _row(size: int, quiet: Took, one: float, blocks: float, default: float) -> dict[str, float]:
    return {
        "bytes": size,
        "runs": quiet.runs,
        "gbps": size / quiet.ours,
        "raw_nixl_gbps": size / one,
        "ratio_to_raw_nixl": one / quiet.ours,
        "scattered_gbps": size / quiet.scattered,
        "raw_blocks_gbps": size / blocks,
        "ratio_to_raw_blocks": blocks / quiet.scattered,
        "defaults_gbps": size / default,
        "ratio_to_defaults": default / quiet.scattered,
        "memcpy_gbps": size / quiet.copy,
    }


def _anywhere(mover: LiveMover, count: int) -> list[int]:
    return random.sample(range(mover.slab.size_bytes // mover.geometry.block_bytes), count)


async def _read(owner: LiveMover, reader: LiveMover, source: Sequence[int], target: Sequence[int]) -> ReadEnded:
    """Read blocks into blocks. Raises Broken when it fails."""
    there, here = wire.pack_u32(source), wire.pack_u32(target)
    reader.say(Read(read=next(_reads), peer=owner.agent_name, begin=0, end=len(source), source=there, target=here))
    ended = await reader.hear(ReadEnded)
    if ended.problem:
        raise Broken(ended.problem)
    return ended


def _copy(owner: LiveMover, reader: LiveMover, size: int) -> int:
    """A plain copy between random places of the two slabs, in ns."""
    source, target = (random.randrange(owner.slab.size_bytes // size) * size for _ in range(2))
    began = time.monotonic_ns()
    reader.slab.memory[target : target + size] = owner.slab.memory[source : source + size]
    return time.monotonic_ns() - began


# ---------------------------------------------------------------- on what machine


@contextmanager
def over_tcp() -> Iterator[None]:
    """Agents that are made meanwhile, here and in children, read over TCP."""
    before = {name: os.environ.get(name) for name in TCP}
    os.environ.update(TCP)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def busy_workers() -> Iterator[None]:
    """Two processes that compute all the time, as a prefill and a decode node's workers would."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_compute, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _compute() -> None:
    a = np.ones((MATRIX, MATRIX), np.float32)
    while True:
        a @ a
