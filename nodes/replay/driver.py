"""The driver of pure machines: a clock, a queue of what is to happen, and shells in which cores hear and decide.

A `Driver` lets things happen in the order of their times, and of equal times in the order in which they were said.
A `Shell` is one life of one node: its core hears events one after the other, its effects are carried out at once and in
order, and what an effect leads to is heard after what is being heard now, as in nodes/control.py. Nothing here knows a
network, an engine or a client: who uses it says in a subclass how an effect is carried out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .. import events as ev
from ..core import NodeCore
from ..recording import NodeRecorder

TICK_MIN_NS = 1_000_000  # as in control


def never() -> bool:
    return False


class Driver:
    """Time in ns, from 0. `handled`: how many events cores have heard."""

    def __init__(self) -> None:
        self.now = 0
        self.handled = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        """What lies in the past happens next."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_ns, self.now), self._order, do, arguments))

    def after(self, delay_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._order, do, arguments))

    def run(self, until_ns: int, over: Callable[[], bool] = never) -> None:
        """Let things happen until then, or until `over`."""
        while not over():
            if not self._heap or self._heap[0][0] > until_ns:
                self.now = until_ns
                return
            self.step()

    def step(self) -> None:
        """The next thing happens; there must be one."""
        self.now, _, do, arguments = heapq.heappop(self._heap)
        do(*arguments)


class Shell:
    """One life of one node. `over`: the process is gone, nothing reaches it any more."""

    CARRY_OUT: ClassVar[Mapping[type[ev.NodeEffect], Callable[[Any, Any], None]]]  # the subclass's methods

    def __init__(self, driver: Driver, core: NodeCore, recorder: NodeRecorder | None = None) -> None:
        self.driver = driver
        self.core = core
        self._recorder = recorder
        self.over = False
        self.frozen_until = 0
        self._missed: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # while frozen
        self._queue: deque[ev.NodeEvent] = deque()
        self._turning = False
        self._tick_at: int | None = None  # when the next tick is looked at

    # ------------------------------------------------------------ the loop

    def enter(self, do: Callable[..., None], *arguments: Any) -> None:
        """Something reaches this process: later and in order, while it is frozen, and never, when it is over."""
        if self.over:
            return
        if not self._missed and self.frozen_until <= self.driver.now:
            do(*arguments)
            return
        if not self._missed:
            self.driver.at(self.frozen_until, self._thaw)
        self._missed.append((do, arguments))

    def freeze(self, until_ns: int) -> None:
        """The process stands still."""
        self.frozen_until = max(self.frozen_until, until_ns)

    def _thaw(self) -> None:
        """What has come meanwhile is heard in the order in which it came, unless another pause has begun."""
        while self._missed and not self.over:
            if self.frozen_until > self.driver.now:
                self.driver.at(self.frozen_until, self._thaw)
                return
            do, arguments = self._missed.popleft()
            do(*arguments)

    def post(self, event: ev.NodeEvent) -> None:
        """Let the core hear it, after what it is hearing now."""
        self._queue.append(event)
        if self._turning or self.over:
            return
        self._turning = True
        try:
            while self._queue and not self.over:
                self._turn(self._queue.popleft())
        finally:
            self._turning = False
        self.settled()
        self._arm()

    def _turn(self, event: ev.NodeEvent) -> None:
        driver, table, recorder = self.driver, self.CARRY_OUT, self._recorder
        driver.handled += 1
        now = driver.now
        for effect in recorder.turn(self.core, event, now) if recorder else self.core.handle(event, now):
            table[type(effect)](self, effect)

    def settled(self) -> None:
        """Whatever was to be heard has been."""

    # ------------------------------------------------------------ time

    def _arm(self) -> None:
        """One look ahead at a time: a deadline that has moved on is found when the look comes."""
        due = self.core.next_deadline()
        if due is None or self.over or (self._tick_at is not None and self._tick_at <= due):
            return
        self._tick_at = max(due, self.driver.now + TICK_MIN_NS)
        self.driver.at(self._tick_at, self.enter, self._look, self._tick_at)

    def _look(self, at_ns: int) -> None:
        if self._tick_at != at_ns:
            return  # an earlier one was set meanwhile, and has looked
        self._tick_at = None
        due = self.core.next_deadline()
        if due is not None and due <= self.driver.now:
            self.post(ev.Tick())
        else:
            self._arm()
