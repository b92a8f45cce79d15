"""The copier of a worker: copies KV between the device's memory and its mirror, on a thread, beside the steps.

Copies are carried out and reported in the order in which they came, each after a fence of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pdbus.bus.errors import Closed
from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import Declared, unpack_u32
from pdbus.connector.ipc import Copied, Copy, WorkerFailed
from pdbus.connector.layout import rank_bytes_per_token
from pdbus.connector.staging import Way

from .engines.device import Device
from .kv_view import view_of


class Copier:
    """Between `memory` of the device and `mirror`, which have one layout. What is to be reported goes to `report`, from
    the copier's thread."""

    def __init__(
        self, device: Device, memory: Any, mirror: Any, layout: KVLayout, report: Callable[[Declared], None]
    ) -> None:
        self._in_step = False
        self._device = device
        self._views = {Way.DOWN: (view_of(memory, layout), view_of(mirror, layout))}
        self._views[Way.UP] = self._views[Way.DOWN][::-1]
        self._block_bytes = layout.block_size * rank_bytes_per_token(layout)
        self._report = report
        self._queue: queue.Queue[Copy] = queue.Queue()
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    @contextlib.contextmanager
    def beside_step(self) -> Iterator[None]:
        """A step runs meanwhile. For the report alone: no copy waits for it."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def begin(self, copy: Copy) -> None:
        self._queue.put(copy)

    def _run(self) -> None:
        """A device that cannot copy is of no use: the worker ends with it."""
        try:
            while True:
                self._report(self._carry_out(self._queue.get()))
        except Closed:
            return  # control has gone, as the worker will see
        except Exception as e:
            traceback.print_exc()
            self._report(WorkerFailed(problem=f"copying KV failed: {type(e).__name__}: {e}"))
            os._exit(1)

    def _carry_out(self, copy: Copy) -> Copied:
        began, blocks = time.monotonic_ns(), unpack_u32(copy.blocks)
        source, target = self._views[copy.way]
        for begin, end in runs_of(blocks):
            self._device.copy(source[begin:end], target[begin:end])
        self._device.fence()
        return Copied(
            copy=copy.copy,
            bytes=len(blocks) * self._block_bytes,
            copy_ns=time.monotonic_ns() - began,
            in_step=self._in_step,
        )


def runs_of(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together: (first, behind the last) of each run of rising ids."""
    begin = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[begin], blocks[at - 1] + 1
            begin = at
