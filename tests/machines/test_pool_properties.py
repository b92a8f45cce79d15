"""BlockPool under any sequence of calls: its books agree, and what may still be written is given to nobody."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdbus.bus.errors import LocalProtocolError
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool, BlockState

BLOCKS, SIZE = 6, 2
HASHES = [bytes([n]) for n in range(8)]
OWNERS = (Holder.HELD, Holder.ADVERTISED)


class PoolMachine(RuleBasedStateMachine):
    """The model: for each hold that was granted, which blocks it covers."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE)
        self.holds: list[tuple[Holder, tuple[int, ...]]] = []
        self.refused: tuple[int, list[bytes], int] | None = None

    def holders(self, block: int) -> list[Holder]:
        return [holder for holder, blocks in self.holds if block in blocks]

    def granted(self, holder: Holder, blocks: tuple[int, ...], shared: int) -> None:
        fresh = blocks[shared:]
        assert not any(self.holders(block) for block in fresh), "given out while somebody has it"
        assert len(set(blocks)) == len(blocks)
        self.holds.append((holder, blocks))

    @rule(tokens=st.integers(1, 14), first=st.integers(0, 4), count=st.integers(0, 6), holder=st.sampled_from(OWNERS))
    def reserve(self, tokens: int, first: int, count: int, holder: Holder) -> None:
        hashes = HASHES[first : first + count]
        hits = min(self.pool.match(hashes), (tokens - 1) // SIZE)
        reservation = self.pool.reserve(tokens, hashes, holder)
        if reservation is None:
            self.refused = tokens, hashes, self.pool.changes
            return
        assert reservation.cached_tokens == hits * SIZE
        assert len(reservation.blocks) == -(-tokens // SIZE)
        assert not any(Holder.IN_FLIGHT in self.holders(block) for block in reservation.blocks)
        self.granted(holder, reservation.blocks, hits)

    @precondition(lambda self: self.refused and self.refused[2] == self.pool.changes)
    @rule()
    def ask_again(self) -> None:
        """As long as nothing has changed it would be of no use; so nobody has to."""
        assert self.refused is not None
        tokens, hashes, _ = self.refused
        assert self.pool.reserve(tokens, hashes, Holder.HELD) is None

    @rule(n=st.integers(0, BLOCKS + 1), holder=st.sampled_from(OWNERS))
    def take(self, n: int, holder: Holder) -> None:
        room = self.pool.available()
        blocks = self.pool.take(n, holder)
        assert (blocks is not None) == (n <= room)
        if blocks:
            self.granted(holder, blocks, 0)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), holder=st.sampled_from(list(Holder)))
    def hold(self, data: st.DataObject, holder: Holder) -> None:
        _, blocks = data.draw(st.sampled_from(self.holds))
        owned = all(any(h in OWNERS for h in self.holders(block)) for block in blocks)
        try:
            self.pool.hold(blocks, holder)
        except LocalProtocolError:
            assert not owned or holder is Holder.IN_FLIGHT
        else:
            assert owned
            self.holds.append((holder, blocks))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        holder, blocks = self.holds.pop(index)
        self.pool.drop(blocks, holder)

    @rule(block=st.integers(-1, BLOCKS), holder=st.sampled_from(list(Holder)))
    def drop_what_was_never_held(self, block: int, holder: Holder) -> None:
        if holder in self.holders(block):
            return
        try:
            self.pool.drop((block,), holder)
        except LocalProtocolError:
            return
        raise AssertionError("a drop without a hold")

    @rule(block=st.integers(0, BLOCKS - 1), block_hash=st.sampled_from(HASHES))
    def publish(self, block: int, block_hash: bytes) -> None:
        try:
            self.pool.publish(block, block_hash)
        except LocalProtocolError:
            return
        assert self.pool.match([block_hash]) == 1

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert all(self.pool.match([block_hash]) == 0 for block_hash in HASHES)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for block in range(BLOCKS):
            holders = self.holders(block)
            assert sum(self.pool.holders(block).values()) == len(holders)
            state = self.pool.state(block)
            assert (state in (BlockState.FREE, BlockState.CACHED)) == (not holders)
            assert (state is BlockState.QUARANTINED) == (bool(holders) and set(holders) == {Holder.IN_FLIGHT})


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_pool = PoolMachine.TestCase
