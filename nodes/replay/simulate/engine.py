"""A node's worker: steps that take as long as the profile says.

A step of rows that all decode goes on by itself while nothing changes: as many tokens a row as its last block has room
for and its answer still needs are one step, and one event. If a sequence comes or goes meanwhile, the step ends with
the token that is being computed then, as it would have, had every token been a step.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from pdbus.connector.ipc import StepRow

from ... import events as ev
from .shapes import shape_of

if TYPE_CHECKING:
    from .node import SimNode

FIRST_TOKEN = b"token"  # no machine looks into it


class Engine:
    def __init__(self, node: SimNode) -> None:
        self.life = 0
        self.tokens = 1  # a row, in the step that ended last
        self.each_ns = 0  # for each of them, on the average
        self._node = node
        self._rows: tuple[StepRow, ...] = ()
        self._step = 0
        self._most = 1
        self._prompt_tokens = 0
        self._began_ns = self._first_ns = 0
        self._growth_ns = 0.0  # of each further token
        self._changes = 0
        self._ends = 0  # which of the ends foreseen for the step is the right one

    def run(self, e: ev.RunStep) -> None:
        node, scheduler = self._node, self._node.core.scheduler
        shape = shape_of(e.rows)
        self._step, self._rows, self._began_ns, self._changes = e.step, e.rows, node.driver.now, scheduler.changes
        self._prompt_tokens = shape.tokens
        most = 1 if shape.tokens else self._room(e.rows)
        self._first_ns = node.times.ns(*shape)
        last_ns = node.times.ns(0, 0.0, shape.rows, shape.row_context + most - 1) if most > 1 else self._first_ns
        self._growth_ns = (last_ns - self._first_ns) / max(1, most - 1)
        self._end_after(most)

    def _room(self, rows: tuple[StepRow, ...]) -> int:
        """How many tokens a row may sample before anything else can happen."""
        core, most = self._node.core, 1 << 30
        for row in rows:
            r = core.requests.of_seq(row.seq)
            if r is None or not r.marks.own_token:
                return 1
            in_block = 1 + -(row.start + 1) % core.config.block_size
            wanted = min(r.sampling.max_tokens, core.config.max_model_len - r.prompt_tokens) - r.generated
            most = min(most, in_block, wanted)
        if most > 1 and sum(1 for s in core.scheduler.sequences() if s.remaining) > len(rows):
            return 1
        return max(1, most)

    def look(self) -> None:
        """Something was heard while a step is out."""
        if self._most > 1 and self._node.core.scheduler.changes != self._changes:
            self._changes = self._node.core.scheduler.changes
            under_way = 1 + bisect_left(range(1, self._most), self._node.driver.now, key=self._end_ns)
            if under_way < self._most:
                self._end_after(under_way)

    def _end_ns(self, tokens: int) -> int:
        """When so many tokens a row will have been sampled; each one's context is longer by a token."""
        return self._began_ns + tokens * self._first_ns + int(self._growth_ns * tokens * (tokens - 1) / 2)

    def _end_after(self, tokens: int) -> None:
        self._most = tokens
        self._ends += 1
        self._node.driver.at(self._end_ns(tokens), self._node.enter, self._end, self.life, self._ends)

    def _end(self, life: int, ends: int) -> None:
        if life != self.life or ends != self._ends:
            return
        self.tokens, self._most = self._most, 1
        node = self._node
        took_ns = self._end_ns(self.tokens) - self._began_ns
        self.each_ns = took_ns // self.tokens
        node.cluster.busy_ns[node.name] += took_ns
        node.cluster.computed_tokens[node.name] += self._prompt_tokens
        rows = tuple(self._ended(row) for row in self._rows)
        self._node.post(ev.StepEnded(step=self._step, rows=rows, compute_ns=took_ns))

    def _ended(self, row: StepRow) -> ev.StepRowEnded:
        if self.tokens > 1:
            return ev.StepRowEnded(seq=row.seq, tokens=self.tokens)
        owns = row.sample and self._node.core.prefills.owns(row.seq)
        return ev.StepRowEnded(seq=row.seq, payload=FIRST_TOKEN if owns else None)
