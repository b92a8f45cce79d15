"""Blocks side by side: a read of them has few runs."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdbus.connector.contiguous import side_by_side
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import OLDEST, PASSED_OVER_MAX, BlockPool
from pdbus.nodes.bench.used_pool import UsedPool


def runs_of(blocks: list[int]) -> int:
    return 1 + sum(after != block + 1 for block, after in pairwise(blocks))


@pytest.mark.parametrize(
    ("blocks", "n", "chosen"),
    [
        ([3, 5, 6, 7, 9, 10], 2, [9, 10]),  # no longer run is broken than need be
        ([3, 5, 6, 7, 9, 10], 3, [5, 6, 7]),
        ([3, 5, 6, 7, 9, 10], 4, [3, 5, 6, 7]),
        ([3, 5, 6, 7, 9, 10], 5, [5, 6, 7, 9, 10]),
        ([4, 5, 6, 7], 2, [4, 5]),
        ([8], 1, [8]),
        ([8], 0, []),
        ([], 0, []),
    ],
)
def test_the_shortest_run_that_has_so_many_or_the_longest_ones(blocks: list[int], n: int, chosen: list[int]) -> None:
    assert side_by_side(blocks, n) == chosen


@given(blocks=st.sets(st.integers(0, 60)), data=st.data())
def test_so_many_of_those_given_rising_and_in_no_more_runs_than_the_first_ones(
    blocks: set[int], data: st.DataObject
) -> None:
    rising = sorted(blocks)
    n = data.draw(st.integers(0, len(rising)))
    chosen = side_by_side(rising, n)
    assert len(chosen) == n and chosen == sorted(set(chosen)) and blocks.issuperset(chosen)
    if n:
        assert runs_of(chosen) <= runs_of(rising[:n])


@given(blocks=st.sets(st.integers(0, 60)), data=st.data())
def test_the_same_as_run_after_run(blocks: set[int], data: st.DataObject) -> None:
    """Each time anew: the shortest run that has all that is missing, else the longest one; of equals the first."""
    rising = sorted(blocks)
    n = data.draw(st.integers(0, len(rising)))
    left, chosen = set(blocks), set[int]()
    while len(chosen) < n:
        missing = n - len(chosen)
        runs = consecutive(sorted(left))
        enough = [run for run in runs if len(run) >= missing]
        run = min(enough, key=len) if enough else max(runs, key=len)
        chosen.update(run[:missing])
        left.difference_update(run)
    assert side_by_side(rising, n) == sorted(chosen)


def consecutive(rising: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in rising:
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def test_a_long_prompt_finds_blocks_at_once_where_none_has_a_neighbour() -> None:
    """Fifty thousand runs. Looked through anew for each block they would hold up the node for minutes."""
    blocks = range(0, 100_000, 2)
    assert side_by_side(blocks, 25_000) == list(blocks[:25_000])


def test_pools_that_have_served_long_give_prompts_few_runs() -> None:
    """Two nodes' pools, caches full: with the very oldest blocks alone, each would be a run of its own."""
    source, target = UsedPool(1024, seed=0), UsedPool(1024, seed=1)
    runs = []
    for _ in range(50):
        pairs = zip(source.table(32), target.table(32), strict=True)
        runs.append(1 + sum((c, d) != (a + 1, b + 1) for (a, b), (c, d) in pairwise(pairs)))
    assert median(runs) <= 8


def test_a_block_without_neighbours_does_not_stay_for_ever() -> None:
    pool = BlockPool(16, 16)
    blocks = pool.take(16, Holder.HELD)
    assert blocks is not None
    lonely, others = blocks[8], [*blocks[:7], *blocks[10:]]  # its neighbours stay in use
    for number, block in enumerate([lonely, *others]):
        pool.publish(block, bytes([number]))
        pool.drop([block], Holder.HELD)
    given = []
    for number in range(PASSED_OVER_MAX * 16 // 3 + 2):
        some = pool.take(3, Holder.HELD)
        assert some is not None
        given += some
        for block in some:
            pool.publish(block, bytes([number, block]))
        pool.drop(some, Holder.HELD)
    assert lonely in given


def test_for_the_sake_of_neighbours_only_the_oldest_part_is_evicted() -> None:
    pool = BlockPool(64, 16)
    blocks = pool.take(64, Holder.HELD)
    assert blocks is not None
    by_age = [*blocks[::2], *blocks[1::2]]  # the oldest ones have no neighbours
    for block in by_age:
        pool.publish(block, bytes([block]))
        pool.drop([block], Holder.HELD)
    taken = pool.take(4, Holder.HELD)
    assert taken is not None
    assert set(taken) <= set(by_age[: 4 + 64 // OLDEST])
