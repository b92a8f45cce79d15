"""A device as a worker sees it: memory to compute in, steps that go on after they were begun, and, where NIXL cannot
address that memory, copies between it and host memory.

Copies are asynchronous: `copy` begins one and returns, and what it returns proves nothing. An event tells how far a
queue of the device has come: its `wait` may make another queue wait and not the caller, its `query` may be early. So
only `fence` is trusted, which keeps the caller until every copy begun before has taken place (`synchronize` of the
stream that copies, where PyTorch drives the device). What is announced to a reader, or computed upon, comes after one.

`Cpu` needs none of it. `Cuda` and `Xpu` stand in torch_device.py. `FakeDevice` is a device on which everything that
could go wrong does: copies take place late, in a thread of its own, over garbage, and its events lie.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pdbus.bus.errors import ConfigError
from pdbus.connector.slab import MADV_POPULATE_WRITE
from pdbus.nodes.kv_view import Bytes

DEVICES = ("cpu", "cuda", "xpu", "fake")
GARBAGE = 0xB5
LATE_S = 0.002  # each copy of the fake; long enough for a step or a read to come first


class Event(Protocol):
    """What a device says of a copy. A hint at the most: see above."""

    def query(self) -> bool: ...

    def wait(self) -> None: ...


class Device(Protocol):
    """One device. `source` and `target` are KV memory as kv_view.py shows it, block outermost."""

    def allocate(self, size_bytes: int) -> Any:
        """Memory of the device, of whatever content: a buffer or a tensor of bytes."""
        ...

    def pin(self, memory: memoryview) -> None:
        """Prepare host memory for copies."""
        ...

    def copy(self, source: Any, target: Any) -> Event:
        """Begin to copy. It takes place after the steps and copies begun before, and beside the steps begun later."""
        ...

    def fence(self) -> None:
        """Wait until every copy begun before has taken place."""
        ...

    def settle(self) -> None:
        """Wait until every step begun before has taken place: called by the thread that steps."""
        ...


def device_of(name: str) -> Device:
    """Raises ConfigError naming `--device`. Only `cuda` and `xpu` import torch."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError("--device", f"{name!r} is none of {', '.join(DEVICES)}")
    if kind in ("cuda", "xpu"):
        from .torch_device import torch_device

        return torch_device(name)
    return FakeDevice() if name == "fake" else Cpu()


class Done:
    """The event of what had taken place before it was made."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Cpu:
    """The host, with a memory of its own beside the mirror. Copies take place at once."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Faulted in now, on huge pages where there are any, rather than in the first copy to each block."""
        memory = mmap.mmap(-1, size_bytes)
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):
                memory.madvise(advice)
        return memoryview(memory)

    def pin(self, memory: memoryview) -> None:
        pass

    def copy(self, source: Bytes, target: Bytes) -> Event:
        np.copyto(target, source)
        return Done()

    def fence(self) -> None:
        pass

    def settle(self) -> None:
        pass


class FakeDevice(Cpu):
    """Garbage stands where a copy goes until it takes place, and what it copies is what stands there then."""

    def __init__(self, late_s: float = LATE_S) -> None:
        self._late_s = late_s
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, name="fake device", daemon=True).start()

    def allocate(self, size_bytes: int) -> memoryview:
        memory = super().allocate(size_bytes)
        np.frombuffer(memory, np.uint8)[:] = GARBAGE
        return memory

    def copy(self, source: Bytes, target: Bytes) -> Event:
        target[...] = GARBAGE
        self._queue.put(lambda: np.copyto(target, source))
        return Done()  # a lie

    def fence(self) -> None:
        self._queue.join()

    def _run(self) -> None:
        while True:
            take_place = self._queue.get()
            time.sleep(self._late_s)
            take_place()
            self._queue.task_done()
