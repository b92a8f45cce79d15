"""The staging queue: which blocks are copied, who waits for it, and that nothing is given away under a copy."""

from __future__ import annotations

import pytest

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
    StagingEffect,
    StagingEvent,
    StartCopy,
    Way,
)


def chunk(ready: int, request: bytes = b"r") -> ChunkComputed:
    return ChunkComputed(try_=TryId(node="d", incarnation=b"i", request=request, attempt=1), ready=ready)


def down(blocks: tuple[int, ...], ready: int = 0, request: bytes = b"r") -> StageDown:
    return StageDown(chunk=chunk(ready, request), blocks=blocks)


def copy(number: int, *blocks: int, way: Way = Way.DOWN, request: bytes = b"r") -> StartCopy:
    return StartCopy(copy=number, way=way, blocks=blocks, request=request)


class Bench:
    """Staging over a pool whose first blocks a lease has."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 4)
        self.staging = Staging(self.pool)
        self.pool.take(6, Holder.ADVERTISED)

    def hear(self, event: StagingEvent) -> list[StagingEffect]:
        effects = self.staging.handle(event, 0)
        self.pool.check()
        return effects


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_chunk_is_told_when_its_copy_has_ended(bench: Bench) -> None:
    assert bench.hear(down((0, 1), 8)) == [copy(1, 0, 1)]
    assert bench.hear(CopyEnded(copy=1)) == [StagedDown(chunk=chunk(8))]


def test_a_chunk_without_a_complete_block_does_not_overtake_the_one_before(bench: Bench) -> None:
    bench.hear(down((0,), 4))
    assert bench.hear(down((), 6)) == []
    assert bench.hear(CopyEnded(copy=1)) == [StagedDown(chunk=chunk(4)), StagedDown(chunk=chunk(6))]


def test_with_nothing_to_copy_and_nothing_to_wait_for_it_is_told_at_once(bench: Bench) -> None:
    assert bench.hear(down((), 2)) == [StagedDown(chunk=chunk(2))]


def test_what_the_mirror_holds_is_not_copied_again(bench: Bench) -> None:
    bench.hear(down((0, 1)))
    bench.hear(CopyEnded(copy=1))
    assert bench.hear(down((0, 1, 2), request=b"s")) == [copy(2, 2, request=b"s")]


def test_what_is_being_copied_is_waited_for(bench: Bench) -> None:
    """A second copy would write a mirror that the first one's reader may be reading."""
    bench.hear(down((0, 1)))
    assert bench.hear(down((0, 1), request=b"s")) == []
    assert bench.hear(CopyEnded(copy=1)) == [StagedDown(chunk=chunk(0)), StagedDown(chunk=chunk(0, b"s"))]


def test_blocks_that_are_written_again_have_no_mirror(bench: Bench) -> None:
    bench.hear(down((0, 1)))
    bench.hear(CopyEnded(copy=1))
    bench.pool.hold((0,), Holder.IN_STEP)
    bench.pool.drop((0,), Holder.IN_STEP)
    assert bench.hear(down((0, 1))) == [copy(2, 0)]


def test_blocks_given_to_somebody_else_have_no_mirror(bench: Bench) -> None:
    bench.hear(down((0,)))
    bench.hear(CopyEnded(copy=1))
    bench.pool.drop((0,), Holder.ADVERTISED)
    assert bench.pool.take(1, Holder.ADVERTISED) == (0,)
    assert bench.hear(down((0,))) == [copy(2, 0)]


def test_a_cached_block_keeps_its_mirror_until_it_is_evicted(bench: Bench) -> None:
    bench.hear(down((0,)))
    bench.hear(CopyEnded(copy=1))
    bench.pool.publish(0, b"hash")
    bench.pool.drop((0,), Holder.ADVERTISED)
    assert bench.pool.is_mirrored(0)
    assert bench.pool.take(3, Holder.HELD) == (0, 6, 7)
    assert not bench.pool.is_mirrored(0)


def test_a_block_is_not_free_before_its_copy_has_ended(bench: Bench) -> None:
    """Its lease was cancelled, and the copier does not know."""
    bench.hear(down((0, 1)))
    bench.pool.drop((0, 1), Holder.ADVERTISED)
    assert bench.pool.available() == 2
    bench.hear(CopyEnded(copy=1))
    assert bench.pool.available() == 4


def test_a_request_is_told_when_all_of_it_is_up(bench: Bench) -> None:
    assert bench.hear(StageUp(request=b"q", blocks=(3, 4))) == [copy(1, 3, 4, way=Way.UP, request=b"q")]
    assert bench.hear(CopyEnded(copy=1)) == [StagedUp(request=b"q")]
    assert bench.pool.is_mirrored(3)


def test_copies_that_end_out_of_order_tell_nobody_too_early(bench: Bench) -> None:
    bench.hear(down((0,), 4))
    bench.hear(down((1,), 8))
    assert bench.hear(CopyEnded(copy=2)) == []
    assert bench.hear(CopyEnded(copy=1)) == [StagedDown(chunk=chunk(4)), StagedDown(chunk=chunk(8))]


def test_an_end_that_comes_twice_changes_nothing(bench: Bench) -> None:
    bench.hear(down((0,)))
    bench.hear(CopyEnded(copy=1))
    assert bench.hear(CopyEnded(copy=1)) == []
    assert bench.staging.counters["late"] == 1 and bench.staging.counters["copies"] == 1


def test_without_a_copier_no_copy_goes_on_and_nobody_is_told(bench: Bench) -> None:
    bench.hear(down((0, 1)))
    bench.hear(StageUp(request=b"q", blocks=(3,)))
    bench.pool.drop((0, 1), Holder.ADVERTISED)
    assert bench.hear(CopierGone()) == []
    assert len(bench.staging) == 0 and bench.pool.available() == 4
    assert bench.hear(CopyEnded(copy=1)) == []
    assert not bench.pool.is_mirrored(0), "half a copy is none"
