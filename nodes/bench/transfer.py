"""`pd bench transfer`: how fast a mover reads scattered blocks, beside one raw NIXL read and a memory copy.

All three move the same number of bytes between the same two slabs, in turns, so that all see the same machine.
Places are drawn anew every time: bytes that lie in the cache would flatter whoever reads them again.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdbus.bus import wire
from pdbus.bus.errors import Broken
from pdbus.connector.apply import Runs
from pdbus.connector.ipc import Advertise, Read, ReadEnded
from pdbus.connector.nixl_agent import NixlAgent, RemotePeer

from .movers import LiveMover, Movers, introduce

BLOCK_BYTES = 262_144  # 16 tokens of a model of 8 layers with 4 KV heads of 64 channels in float32
SIZES_BYTES = (8 << 20, 32 << 20, 64 << 20)
SLAB_BYTES = 256 << 20  # well beyond the caches
ROUNDS = 15

Result = dict[str, list[dict[str, float]]]


def run(sizes_bytes: Sequence[int] = SIZES_BYTES, block_bytes: int = BLOCK_BYTES, rounds: int = ROUNDS) -> Result:
    """Measure, for each size. gbps is 10^9 bytes a second from post to terminal status, the median of `rounds`.

    Sizes are rounded down to whole blocks. Raises Broken when NIXL cannot.
    """
    return asyncio.run(_run(sizes_bytes, block_bytes, rounds))


async def _run(sizes_bytes: Sequence[int], block_bytes: int, rounds: int) -> Result:
    slab_bytes = max(SLAB_BYTES, 4 * max(sizes_bytes)) // block_bytes * block_bytes
    async with Movers() as movers:
        owner = await movers.start(f"bench-owner-{os.getpid()}", slab_bytes, block_bytes)
        reader = await movers.start(f"bench-reader-{os.getpid()}", slab_bytes, block_bytes)
        await introduce(owner, reader)
        owner.say(Advertise(leases=1))
        for slab in (owner.slab, reader.slab):
            slab.populate(slab.size_bytes)
        return {"sizes": [await _measure(owner, reader, size, block_bytes, rounds) for size in sizes_bytes]}


async def _measure(owner: LiveMover, reader: LiveMover, size: int, block_bytes: int, rounds: int) -> dict[str, float]:
    count = max(1, size // block_bytes)
    size = count * block_bytes
    raw = RawReader(owner, reader, size)
    ours, theirs, copies = [], [], []
    for number in range(rounds):
        ours.append(await read_scattered(owner, reader, number, count))
        theirs.append(raw.read())
        copies.append(_copy(owner, reader, size))
    raw.close()
    gbps = {name: size / statistics.median(ns) for name, ns in (("ours", ours), ("raw", theirs), ("copy", copies))}
    return {
        "bytes": size,
        "gbps": gbps["ours"],
        "raw_nixl_gbps": gbps["raw"],
        "ratio_to_raw_nixl": gbps["ours"] / gbps["raw"],
        "memcpy_gbps": gbps["copy"],
    }


async def read_scattered(owner: LiveMover, reader: LiveMover, number: int, count: int) -> int:
    """Read `count` random blocks into random blocks; the mover's own time in ns. Raises Broken when it fails."""
    blocks = range(owner.slab.size_bytes // owner.geometry.block_bytes)
    source, target = (wire.pack_u32(random.sample(blocks, count)) for _ in range(2))
    reader.say(Read(read=number, peer=owner.agent_name, begin=0, end=count, source=source, target=target))
    ended = await reader.hear(ReadEnded)
    if ended.problem:
        raise Broken(ended.problem)
    return ended.transfer_ns


class RawReader:
    """The yardstick: an agent of this process reads `size` bytes in one descriptor, asking without a pause."""

    def __init__(self, owner: LiveMover, reader: LiveMover, size: int) -> None:
        slab = reader.slab
        self._agent = NixlAgent(f"bench-raw-{size}-{os.getpid()}", slab.address, slab.size_bytes)
        ready = owner.ready
        self._peer: RemotePeer = self._agent.add_peer(
            ready.agent_name, ready.metadata, ready.base_address, ready.region_bytes
        )
        self._size, self._places = size, slab.size_bytes // size
        self._wait(self._agent.make_warm_up(self._peer))

    def read(self) -> int:
        """One read between random places, in ns from post to done."""
        source, target = (random.randrange(self._places) * self._size for _ in range(2))
        runs = Runs(*(np.array([value], np.uint64) for value in (source, target, self._size)))
        return self._wait(self._agent.make_read(self._peer, runs))

    def _wait(self, handle: Any) -> int:
        began = time.monotonic_ns()
        done = self._agent.post(handle)
        while not done:
            done = self._agent.check(handle)
        took = time.monotonic_ns() - began
        self._agent.release(handle)
        return took

    def close(self) -> None:
        self._agent.close()


def _copy(owner: LiveMover, reader: LiveMover, size: int) -> int:
    """A plain copy between random places of the two slabs, in ns."""
    source, target = (random.randrange(owner.slab.size_bytes // size) * size for _ in range(2))
    began = time.monotonic_ns()
    reader.slab.memory[target : target + size] = owner.slab.memory[source : source + size]
    return time.monotonic_ns() - began
