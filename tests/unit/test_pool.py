"""BlockPool: every block is exactly one of free, cached, in use, quarantined; none is given out while it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdbus.bus.errors import LocalProtocolError
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool, BlockRemoved, BlocksCleared, BlockState, BlockStored, PoolCounts

H = [bytes([n]) * 16 for n in range(16)]  # block hashes
HELD, ADVERTISED, IN_FLIGHT, IN_STEP = Holder.HELD, Holder.ADVERTISED, Holder.IN_FLIGHT, Holder.IN_STEP


def pool_of(blocks: int = 8, block_size: int = 4) -> BlockPool:
    return BlockPool(blocks, block_size)


def cache(pool: BlockPool, hashes: list[bytes]) -> tuple[int, ...]:
    """Leaves these hashes cached, as a finished sequence would."""
    blocks = pool.take(len(hashes), HELD)
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.drop(blocks, HELD)
    return blocks


def test_fresh_blocks_are_contiguous_and_lowest_first() -> None:
    """Contiguous blocks merge into one descriptor of a read."""
    pool = pool_of()
    first, second = pool.take(3, HELD), pool.take(3, HELD)
    assert (first, second) == ((0, 1, 2), (3, 4, 5))
    pool.drop(first or (), HELD)
    assert pool.take(4, HELD) == (0, 1, 2, 6)


def test_take_is_all_or_nothing() -> None:
    pool = pool_of(4)
    assert pool.take(5, HELD) is None
    assert pool.counts() == PoolCounts(free=4, cached=0, in_use=0, quarantined=0, total=4)


def test_reserve_shares_a_cached_prefix() -> None:
    pool = pool_of()
    cached = cache(pool, H[:2])
    reservation = pool.reserve(11, H[:2], ADVERTISED)
    assert reservation is not None
    assert reservation.blocks[:2] == cached and len(reservation.blocks) == 3
    assert reservation.cached_tokens == 8


def test_reserve_shares_blocks_that_are_in_use() -> None:
    pool = pool_of()
    first = pool.reserve(9, [], HELD)
    assert first is not None
    pool.publish(first.blocks[0], H[0])
    second = pool.reserve(9, H[:2], ADVERTISED)
    assert second is not None and second.blocks[0] == first.blocks[0]
    assert pool.holders(first.blocks[0]) == {HELD: 1, ADVERTISED: 1}


def test_the_last_position_is_never_a_hit() -> None:
    """A prompt of whole blocks that are all cached still computes its last block, into a block of its own."""
    pool = pool_of()
    cached = cache(pool, H[:2])
    reservation = pool.reserve(8, H[:2], ADVERTISED)
    assert reservation is not None
    assert reservation.cached_tokens == 4
    assert reservation.blocks[0] == cached[0] and reservation.blocks[1] != cached[1]


def test_reserve_without_room_changes_nothing() -> None:
    """Its own hits do not count as room."""
    pool = pool_of(3)
    cache(pool, H[:2])
    before = pool.counts()
    assert pool.reserve(16, H[:2], HELD) is None
    assert pool.counts() == before and pool.match(H[:2]) == 2


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    pool = pool_of(4)
    cache(pool, H[:2])
    cache(pool, H[2:4])
    reservation = pool.reserve(9, H[:2], HELD)  # uses the older prefix again
    assert reservation is not None
    assert pool.match(H[:2]) == 2 and pool.match(H[2:4]) == 1
    pool.drop(reservation.blocks, HELD)
    assert pool.counts() == PoolCounts(free=1, cached=3, in_use=0, quarantined=0, total=4)


def test_free_blocks_go_before_cached_ones() -> None:
    pool = pool_of(4)
    cache(pool, H[:2])
    pool.take(2, HELD)
    assert pool.match(H[:2]) == 2
    pool.take(1, HELD)
    assert pool.match(H[:2]) == 1


def test_match_counts_leading_hits_only() -> None:
    pool = pool_of()
    cache(pool, [H[0], H[2]])
    assert pool.match(H[:3]) == 1


def test_a_block_with_an_open_read_is_quarantined_until_the_read_ends() -> None:
    pool = pool_of(2)
    blocks = pool.take(2, HELD) or ()
    pool.hold(blocks[:1], IN_FLIGHT)
    pool.drop(blocks, HELD)
    assert pool.state(blocks[0]) is BlockState.QUARANTINED
    assert pool.take(2, HELD) is None, "a quarantined block was given out"
    pool.drop(blocks[:1], IN_FLIGHT)
    assert pool.take(2, HELD) == blocks


def test_a_block_whose_step_still_runs_is_not_given_out() -> None:
    pool = pool_of(1)
    blocks = pool.take(1, ADVERTISED) or ()
    pool.hold(blocks, IN_STEP)
    pool.drop(blocks, ADVERTISED)
    assert pool.state(0) is BlockState.IN_USE
    assert pool.take(1, HELD) is None


def test_a_second_block_of_a_known_hash_stays_unpublished() -> None:
    pool = pool_of()
    first, second = pool.take(2, HELD) or ()
    pool.publish(first, H[0])
    pool.publish(second, H[0])
    pool.drop((first, second), HELD)
    assert pool.state(first) is BlockState.CACHED and pool.state(second) is BlockState.FREE


def test_events_tell_what_can_be_shared() -> None:
    pool = pool_of(1)
    pool.publish((pool.take(1, HELD) or ())[0], H[1], parent=H[0])
    pool.drop((0,), HELD)
    pool.take(1, HELD)
    assert pool.take_events() == [
        BlockStored(block_hash=H[1], parent=H[0], block=0),
        BlockRemoved(block_hash=H[1]),
    ]
    assert pool.take_events() == []


def test_reset_forgets_content_and_keeps_holders() -> None:
    """A read that is in flight writes into the memory whatever became of the worker."""
    pool = pool_of()
    cache(pool, H[:2])
    mine = pool.take(1, HELD) or ()
    pool.hold(mine, IN_FLIGHT)
    pool.take_events()
    pool.reset()
    assert pool.match(H[:2]) == 0
    assert pool.holders(mine[0]) == {HELD: 1, IN_FLIGHT: 1}
    assert pool.take_events() == [BlocksCleared()]
    pool.check()


def test_reset_of_an_empty_cache_publishes_nothing() -> None:
    pool = pool_of()
    pool.reset()
    assert pool.take_events() == []


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(lambda p: p.drop((0, 1), ADVERTISED), id="drop without hold"),
        pytest.param(lambda p: p.drop((0, 99), HELD), id="id out of range"),
        pytest.param(lambda p: p.drop((0, -1), HELD), id="negative id"),
        pytest.param(lambda p: p.drop((0, 0), HELD), id="named twice"),
        pytest.param(lambda p: p.hold((0, 7), HELD), id="hold of a free block"),
        pytest.param(lambda p: p.hold((0, 2), HELD), id="hold of a quarantined block"),
        pytest.param(lambda p: p.hold((0, 3), HELD), id="hold of a block that only a step has"),
        pytest.param(lambda p: p.hold((1,), IN_FLIGHT), id="read into a shared block"),
        pytest.param(lambda p: p.publish(2, H[5]), id="publish of a quarantined block"),
        pytest.param(lambda p: p.publish(7, H[5]), id="publish of a free block"),
        pytest.param(lambda p: p.publish(1, H[5]), id="publish under two hashes"),
        pytest.param(lambda p: p.reserve(0, [], HELD), id="reserve for nothing"),
        pytest.param(lambda p: p.take(-1, HELD), id="take fewer than none"),
    ],
)
def test_a_mistake_raises_and_changes_nothing(mistake: Callable[[BlockPool], object]) -> None:
    pool = pool_of()
    pool.take(4, HELD)
    pool.publish(1, H[1])
    pool.hold((2,), IN_FLIGHT)
    pool.hold((3,), IN_STEP)
    pool.drop((2, 3), HELD)
    before = pool.counts(), [pool.holders(block) for block in range(8)]
    with pytest.raises(LocalProtocolError):
        mistake(pool)
    assert (pool.counts(), [pool.holders(block) for block in range(8)]) == before
    pool.check()


def test_two_reads_never_write_one_block() -> None:
    pool = pool_of()
    blocks = pool.take(1, HELD) or ()
    pool.hold(blocks, IN_FLIGHT)
    with pytest.raises(LocalProtocolError, match="read"):
        pool.hold(blocks, IN_FLIGHT)


def test_check_notices_a_broken_book() -> None:
    pool = pool_of()
    pool.take(1, HELD)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free list"):
        pool.check()
