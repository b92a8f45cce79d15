"""A workload played against live nodes by an absolute schedule: nothing waits because something else is slow.

Each request is sent at its time, whatever became of those before it; how late it really was is a result. Only a request
of a session waits for the one before it, for its prompt holds that one's answer. Requests go to the nodes in turn,
those of a session all to one.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence

from .load_prompts import Prompts
from .load_request import INTERRUPTED, TOO_LONG, Meter, Played, fail, play
from .load_target import Target
from .workload import Asked, Workload

READY_TOKENS_MAX = 2 << 20  # of prompts made ahead of their time: 8 MiB
SPARE_NS = 20_000_000  # a long prompt takes so long to make: none is begun this close before a request is due
NS = 1_000_000_000


class LoadRun:
    """One run. `played` and `meter` can be read while it runs."""

    def __init__(self, workload: Workload, targets: Sequence[Target], seed: int) -> None:
        self.workload = workload
        self.targets = targets
        self.played: list[Played] = []  # in the order of the workload, as they come due
        self.meter = Meter()
        self.wall_ns = 0  # how long it took
        self._prompts = Prompts(workload, min(target.vocab_size for target in targets), seed)
        self._ready: deque[array[int]] = deque()  # from the next request on; empty for what is not sent
        self._ready_tokens = self._made = 0
        self._last_of: dict[int, asyncio.Task[None]] = {}  # by session

    def target_of(self, index: int) -> int:
        """Which node a request goes to."""
        return (self.workload.requests[index].session or index) % len(self.targets)

    def fits(self, index: int) -> bool:
        asked = self.workload.requests[index]
        return asked.input_tokens + asked.output_tokens <= self.targets[self.target_of(index)].max_model_len

    async def play(self) -> None:
        """Returns when the last answer has ended. Cancelled, it cancels at the nodes what is in flight."""
        while self._may_make():
            self._make()
        self.meter.began_ns = time.monotonic_ns()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, asked in enumerate(self.workload.requests):
                    await self._until(asked.at_ns)
                    self._start(tasks, index, asked)
        finally:
            self.wall_ns = self.meter.now()
            for played in self.played:
                if not played.ended_ns:
                    fail(played, INTERRUPTED, "it was in flight at the Ctrl-C", self.meter)

    # ------------------------------------------------------------ the schedule

    async def _until(self, due_ns: int) -> None:
        """The time before a request is due goes into prompts to come."""
        while self._may_make() and due_ns - self.meter.now() > SPARE_NS:
            self._make()
            await asyncio.sleep(0)
        while (left_ns := due_ns - self.meter.now()) > 0:  # noqa: ASYNC110 (a timer may be a millisecond early)
            await asyncio.sleep(left_ns / NS)
        await asyncio.sleep(0)

    def _start(self, tasks: asyncio.TaskGroup, index: int, asked: Asked) -> None:
        played = Played(index, self.target_of(index), asked.at_ns, asked.input_tokens)
        self.played.append(played)
        prompt = self._take()
        if not prompt:
            limit = self.targets[played.target].max_model_len
            problem = f"{asked.input_tokens} + {asked.output_tokens} tokens, at most {limit} fit (max_model_len)"
            fail(played, TOO_LONG, problem, self.meter)
            return
        task = tasks.create_task(self._play(played, asked, prompt, self._last_of.get(asked.session)))
        if asked.session:
            self._last_of[asked.session] = task

    async def _play(self, played: Played, asked: Asked, prompt: array[int], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(asked.think_ns / NS)
        await play(played, asked, prompt, self.targets[played.target], self.meter)

    # ------------------------------------------------------------ prompts ahead of their time

    def _may_make(self) -> bool:
        return self._made < len(self.workload.requests) and self._ready_tokens < READY_TOKENS_MAX

    def _make(self) -> None:
        prompt = self._prompts.tokens(self._made) if self.fits(self._made) else array("I")
        self._ready.append(prompt)
        self._ready_tokens += len(prompt)
        self._made += 1

    def _take(self) -> array[int]:
        if not self._ready:
            self._make()
        prompt = self._ready.popleft()
        self._ready_tokens -= len(prompt)
        return prompt
