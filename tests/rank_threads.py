"""The ranks of one node as threads of one process: engines that share a model without processes or sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from pdbus.connector.ipc import WorkerArgs
from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.stage import Stage

T = TypeVar("T")
WAIT_S = 60.0  # for the other ranks: a test fails sooner than it hangs


class Meeting:
    """Where the ranks of `stages` stages, `size` each, put what they have and take what all of a stage have."""

    def __init__(self, size: int, stages: int = 1) -> None:
        self.size = size * stages
        self.each, self.stages = size, stages
        self.given: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(self.size)]  # by who gave it
        self._barriers = [threading.Barrier(size, timeout=WAIT_S) for _ in range(stages)]
        self._parts: dict[int, Tensor] = {}

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        stage = rank // self.each
        self._parts[rank] = part.clone()
        self._barriers[stage].wait()
        parts = [self._parts[stage * self.each + i].clone() for i in range(self.each)]
        self._barriers[stage].wait()
        return parts

    def meet(self, args: WorkerArgs) -> tuple[Group, Stage]:
        """In place of engines/group.py's."""
        return ThreadGroup(self, args.rank), ThreadStage(self, args.rank)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What each rank makes of `work`, in order, all at once. Raises the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


class ThreadGroup(Group):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank % meeting.each, meeting.each)
        self._meeting, self._of_all = meeting, rank

    def _gathered(self, part: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self._of_all, part)


class ThreadStage(Stage):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank // meeting.each, meeting.stages)
        self._gives = meeting.given[rank]
        self._takes = meeting.given[rank - meeting.each]

    def give(self, rows: Tensor) -> None:
        self._gives.put(rows.clone())

    def take(self, rows: Tensor) -> Tensor:
        return rows.copy_(self._takes.get(timeout=WAIT_S))
