"""Staging under any order of chunks, ends of copies, leases that end and workers that die: whoever is told is told the
truth, in order, and no block is given away under a copy."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdbus.bus.messages import TryId
from pdbus.connector.handoff import ChunkComputed, Holder
from pdbus.connector.pool import BlockPool
from pdbus.connector.staging import (
    CopierGone,
    CopyEnded,
    StagedDown,
    StageDown,
    StagedUp,
    StageUp,
    Staging,
    StagingEvent,
    StartCopy,
)

BLOCKS = 6


class StagingMachine(RuleBasedStateMachine):
    """The model: what each block holds on the device and in the mirror, as a number; what goes on, and who waits."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(BLOCKS, 1)
        self.staging = Staging(self.pool)
        self.device: dict[int, int] = {}
        self.mirror: dict[int, int] = {}
        self.held: list[tuple[int, ...]] = []
        self.copies: dict[int, StartCopy] = {}
        self.asked: list[tuple[bytes, tuple[int, ...]]] = []
        self.written = 0

    def hear(self, event: StagingEvent) -> None:
        for effect in self.staging.handle(event, 0):
            if isinstance(effect, StartCopy):
                assert effect.copy not in self.copies
                assert not set(effect.blocks) & {b for copy in self.copies.values() for b in copy.blocks}
                self.copies[effect.copy] = effect
                continue
            request, blocks = self.asked.pop(0)
            told = effect.request if isinstance(effect, StagedUp) else effect.chunk.try_.request
            assert isinstance(effect, StagedUp | StagedDown) and told == request, "in the order of asking"
            for block in blocks:
                assert self.mirror.get(block) == self.device.get(block) is not None

    @rule(n=st.integers(1, 3))
    def a_step_writes_blocks(self, n: int) -> None:
        blocks = self.pool.take(n, Holder.ADVERTISED)
        if blocks is None:
            return
        assert not any(block in copy.blocks for copy in self.copies.values() for block in blocks)
        self.pool.hold(blocks, Holder.IN_STEP)
        for block in blocks:
            self.written += 1
            self.device[block] = self.written
        self.pool.drop(blocks, Holder.IN_STEP)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_chunk_goes_down(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.asked.append((b"d%d" % self.written, blocks))
        try_ = TryId(node="d", incarnation=b"i", request=self.asked[-1][0], attempt=1)
        self.hear(StageDown(chunk=ChunkComputed(try_=try_, ready=1), blocks=blocks))

    @rule(n=st.integers(1, 2))
    def what_was_read_goes_up(self, n: int) -> None:
        blocks = self.pool.take(n, Holder.HELD)
        if blocks is None:
            return
        self.pool.hold(blocks, Holder.IN_FLIGHT)
        for block in blocks:
            self.written += 1
            self.mirror[block] = self.written
        self.pool.drop(blocks, Holder.IN_FLIGHT)
        self.asked.append((b"u%d" % self.written, blocks))
        self.hear(StageUp(request=self.asked[-1][0], blocks=blocks))
        self.pool.drop(blocks, Holder.HELD)  # it leaves at once

    @precondition(lambda self: self.copies)
    @rule()
    def the_oldest_copy_ends(self) -> None:
        copy = self.copies.pop(next(iter(self.copies)))
        source, target = (self.device, self.mirror) if copy.way == "down" else (self.mirror, self.device)
        for block in copy.blocks:
            target[block] = source[block]
        self.hear(CopyEnded(copy=copy.copy))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_lease_ends(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        blocks = self.held.pop(index)
        self.pool.drop(blocks, Holder.ADVERTISED)
        self.asked = [(request, () if wanted == blocks else wanted) for request, wanted in self.asked]

    @rule()
    def the_worker_dies(self) -> None:
        self.copies.clear()
        self.asked.clear()
        self.device.clear()
        self.hear(CopierGone())
        for blocks in self.held:
            self.pool.drop(blocks, Holder.ADVERTISED)
        self.held.clear()
        self.pool.reset()
        assert self.pool.available() == BLOCKS

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert len(self.staging) == len(self.copies)
        for block in range(BLOCKS):
            under = sum(block in copy.blocks for copy in self.copies.values())
            assert self.pool.holders(block).get(Holder.IN_COPY, 0) == under
            if self.pool.is_mirrored(block):
                assert self.mirror[block] == self.device[block]


StagingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_staging = StagingMachine.TestCase
