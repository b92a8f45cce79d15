"""Raw NIXL, to compare with: one read, asked after without a pause."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from pdbus.connector.apply import Runs
from pdbus.connector.nixl_agent import NixlAgent
from pdbus.connector.slab import Slab

REST_S = 0.003  # before each read: a mover's reads come after a rest, too, when its core's caches are others'

_numbers = itertools.count()  # an agent's name is never used again


class Remote(NamedTuple):
    """Whom to read from, as `add_peer` wants it."""

    name: str
    metadata: bytes
    base_address: int
    region_bytes: int


class RawReader:
    """An agent of this process that reads `size` bytes at a time into `slab`."""

    def __init__(self, remote: Remote, slab: Slab, size: int, *, progress_thread: bool = False) -> None:
        """Raises Broken when NIXL cannot."""
        name = f"bench-raw-{os.getpid()}-{next(_numbers)}"
        self._agent = NixlAgent(name, slab.address, slab.size_bytes, progress_thread=progress_thread)
        self._peer = self._agent.add_peer(*remote)
        self._size, self._slab_bytes = size, slab.size_bytes
        self._wait(self._agent.make_warm_up(self._peer))

    def read(self, pieces: int = 1) -> int:
        """One read of so many pieces between random places, in ns from post to done."""
        length = self._size // pieces
        time.sleep(REST_S)
        source, target = (random.sample(range(self._slab_bytes // length), pieces) for _ in range(2))
        columns = (np.array(source) * length, np.array(target) * length, np.full(pieces, length))
        return self._wait(self._agent.make_read(self._peer, Runs(*(c.astype(np.uint64) for c in columns))))

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


class DefaultOwner:
    """A process whose agent is as NIXL makes it when told nothing: its progress thread looks after readers."""

    def __init__(self, slab: Slab) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        name = f"bench-default-{os.getpid()}-{next(_numbers)}"
        self._process = spawn.Process(target=_own, args=(there, name, slab.path, slab.size_bytes), daemon=True)
        self._process.start()
        there.close()
        self.remote = Remote(*self._here.recv())

    def __enter__(self) -> DefaultOwner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.close()
        self._process.join()


def _own(control: Connection, name: str, path: str, size_bytes: int) -> None:
    slab = Slab.open(path, size_bytes)
    agent = NixlAgent(name, slab.address, size_bytes, progress_thread=True)
    control.send((name, agent.metadata, slab.address, size_bytes))
    control.poll(None)  # until the other end is closed
    agent.close()
    slab.close()
