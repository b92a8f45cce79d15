"""A plan applied to block ids: which blocks meet, how many runs come out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pdbus.bus.errors import LocalProtocolError, RemoteProtocolError
from pdbus.bus.wire import replace
from pdbus.connector.apply import Pairing, direct_runs, pair, permute, scratch_runs
from pdbus.connector.layout import blocks_for, geometry_for, layout_of
from pdbus.connector.plan import TransferPlan, plan

BLOCKS = 4_096
TABLE = [10, 11, 12, 13]


def made(source_size: int = 16, target_size: int = 16, there: str = "native", here: str = "native") -> TransferPlan:
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    source = replace(geometry_for(block_size=source_size, **sizes), layout=there)  # type: ignore[arg-type]
    target = replace(geometry_for(block_size=target_size, **sizes), layout=here)  # type: ignore[arg-type]
    return plan([layout_of(source, BLOCKS)], layout_of(target, BLOCKS))


def met(pairing: Pairing) -> list[tuple[int, int]]:
    return sorted(zip(pairing.target.tolist(), pairing.source.tolist(), strict=True))


def paired(plan: TransferPlan, begin: int, end: int, source: list[int], table: list[int] = TABLE) -> Pairing:
    """With those of our table's blocks that hold the tokens."""
    return pair(plan, begin, end, source, table[begin // plan.target_size : blocks_for(end, plan.target_size)])


# ---------------------------------------------------------------- which block meets which


@pytest.mark.parametrize(
    ("begin", "end", "source", "expected"),
    [
        (0, 64, [1, 2, 3, 4], [(10, 1), (11, 2), (12, 3), (13, 4)]),
        (0, 33, [1, 2, 3], [(10, 1), (11, 2), (12, 3)]),  # a partial last block travels whole
        (32, 64, [3, 4], [(12, 3), (13, 4)]),  # the first two are here: the owner's list starts at the third
        (33, 64, [3, 4], [(12, 3), (13, 4)]),  # the third was partial: read again
        (20, 64, [2, 3, 4], [(11, 2), (12, 3), (13, 4)]),  # half a block is here: that block is read
        (0, 0, [], []),
        (64, 64, [], []),
        (50, 50, [4], []),
    ],
)
def test_equal_blocks_pair_by_token_position(
    begin: int, end: int, source: list[int], expected: list[tuple[int, int]]
) -> None:
    assert met(paired(made(), begin, end, source)) == expected


@pytest.mark.parametrize(
    ("sizes", "begin", "end", "source", "expected"),
    [
        ((32, 16), 0, 64, [1, 2], [(10, 1), (11, 1), (12, 2), (13, 2)]),
        ((32, 16), 16, 64, [1, 2], [(11, 1), (12, 2), (13, 2)]),  # a cached block is not written again
        ((32, 16), 0, 15, [1], [(10, 1)]),  # the second half has no block here, and no token
        ((16, 32), 0, 64, [1, 2, 3, 4], [(10, 1), (10, 2), (11, 3), (11, 4)]),
        ((16, 32), 0, 17, [1, 2], [(10, 1), (10, 2)]),
        ((16, 32), 0, 15, [1], [(10, 1)]),  # there is no second block there
        ((16, 32), 32, 49, [3, 4], [(11, 3), (11, 4)]),
        ((24, 16), 0, 48, [1, 2], [(10, 1), (11, 1), (11, 2), (12, 2)]),
    ],
)
def test_unequal_blocks_pair_by_token_position(
    sizes: tuple[int, int], begin: int, end: int, source: list[int], expected: list[tuple[int, int]]
) -> None:
    assert met(paired(made(*sizes), begin, end, source)) == expected


def test_chunks_together_read_what_one_read_would() -> None:
    """Cut at the ends of our blocks: no piece is read twice, none is left out."""
    source, whole = [5, 6, 7, 8], made(24, 16)
    table = list(range(20, 26))
    chunks = [
        paired(whole, begin, end, source[begin // 24 : blocks_for(end, 24)], table)
        for begin, end in ((16, 48), (48, 64), (64, 90))
    ]
    assert sorted(pair for chunk in chunks for pair in met(chunk)) == met(paired(whole, 16, 90, source, table))


@pytest.mark.parametrize("source", [[1, 2, 3], [1, 2, 3, 4, 5]])
def test_block_list_of_the_wrong_length_is_the_peers_fault(source: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="blocks of 16 for tokens 0 to 64, which need 4") as raised:
        paired(made(), 0, 64, source)
    assert raised.value.field == "blocks"


def test_source_block_past_the_end_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match=f"source block {BLOCKS}, but there are {BLOCKS}"):
        paired(made(), 0, 32, [1, BLOCKS])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([10], "1 target blocks of 16 for tokens 0 to 32, which need 2"),
        ([10, BLOCKS], f"target block {BLOCKS}"),
        ([10, 10], "target block 10 is named twice"),
    ],
)
def test_impossible_target_is_our_own_fault(table: list[int], reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        pair(made(), 0, 32, [1, 2], table)


# ---------------------------------------------------------------- runs


def test_neighbours_on_both_sides_become_one_run() -> None:
    whole = made()
    block = whole.ranks[0].source_stride
    runs = direct_runs(whole.ranks[0], pair(whole, 0, 64, [4, 2, 3, 9], [8, 6, 7, 1]))
    assert [column.tolist() for column in runs] == [[2 * block, 9 * block], [6 * block, block], [3 * block, block]]
    assert {column.dtype for column in runs} == {np.dtype(np.uint64)}


def test_neighbours_on_one_side_stay_apart() -> None:
    whole = made()
    assert len(direct_runs(whole.ranks[0], pair(whole, 0, 32, [1, 2], [5, 7])).source) == 2


@pytest.mark.parametrize("orders", [("native", "native"), ("NHD", "NHD"), ("NHD", "HND")])
@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)])
def test_runs_grow_with_the_blocks_and_not_faster(sizes: tuple[int, int], orders: tuple[str, str]) -> None:
    """Scattered blocks, so that nothing merges: ten times the prompt is ten times the runs."""
    whole = made(*sizes, *orders)

    def runs(tokens: int) -> int:
        source, target = ([2 * i for i in range(blocks_for(tokens, size))] for size in sizes)
        pairing = pair(whole, 0, tokens, source, target)
        return sum(len(some(whole.ranks[0], pairing).source) for some in (direct_runs, scratch_runs))

    assert runs(6_400) == 10 * runs(640) > 0


def test_nothing_to_read_gives_empty_arrays() -> None:
    whole = made(there="NHD", here="HND")
    pairing = pair(whole, 64, 64, [], [])
    assert [len(column) for some in (direct_runs, scratch_runs) for column in some(whole.ranks[0], pairing)] == [0] * 6


def test_permuting_outside_the_memory_is_refused() -> None:
    whole = made(there="NHD", here="HND")
    pairing = pair(whole, 0, 64, [1, 2, 3, 4], TABLE)
    scratch, region = bytearray(4 * whole.ranks[0].scratch_bytes), bytearray(whole.target_bytes)
    for short in ((scratch[1:], region), (scratch, region[1:])):
        with pytest.raises(LocalProtocolError, match="too few"):
            permute(whole, whole.ranks[0], pairing, *map(memoryview, short))
