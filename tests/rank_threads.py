"""The ranks of one node as threads of one process: engines that share a model without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from pdbus.connector.ipc import WorkerArgs
from pdbus.nodes.engines.group import Group

T = TypeVar("T")
WAIT_S = 60.0  # for the other ranks: a test fails sooner than it hangs


class Meeting:
    """Where `size` ranks put what they have and take what all have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._parts: dict[int, Tensor] = {}

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        parts = [self._parts[i].clone() for i in range(self.size)]
        self._barrier.wait()
        return parts

    def group(self, args: WorkerArgs) -> Group:
        """In place of engines/group.py's `meet`."""
        return ThreadGroup(self, args.rank)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What each rank makes of `work`, in order, all at once. Raises the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


class ThreadGroup(Group):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _gathered(self, part: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, part)
