"""Which runs bring the KV of one layout to another: how few, from which rank, through scratch or not, or not at all."""

from __future__ import annotations

import pytest

from pdbus.bus.errors import LocalProtocolError, RemoteProtocolError
from pdbus.bus.messages import Geometry, KVLayout
from pdbus.bus.wire import replace
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.plan import RUN_BYTES_MIN, Box, TransferPlan, differences, plan
from pdbus.connector.readable import layouts_of

LAYERS, HEADS, HEAD_DIM, BLOCKS = 4, 8, 64, 10


def geometry(block_size: int = 16, order: str = "native", **changes: object) -> Geometry:
    return replace(geometry_for(LAYERS, HEADS, HEAD_DIM, block_size, "float16"), layout=order, **changes)


def ranks(model: Geometry, count: int, layers: tuple[str, ...] = ()) -> list[KVLayout]:
    return list(layouts_of(replace(model, tp=count, layer_names=layers), BLOCKS))


def latent(block_size: int = 16, order: str = "native") -> Geometry:
    return replace(geometry_for(LAYERS, 1, 576, block_size, "bfloat16", kv_parts=1), layout=order)


def runs_per_block(made: TransferPlan) -> list[int]:
    """Of each source rank, for the period's first piece."""
    return [sum(box.runs for box in (*rank.pieces[0].direct, *rank.reads)) for rank in made.ranks]


# ---------------------------------------------------------------- how few


def test_native_equals_are_one_run_per_block() -> None:
    made = plan(ranks(geometry(), 1), ranks(geometry(), 1)[0])
    (rank,) = made.ranks
    assert rank.pieces[0].direct == (Box(source=0, target=0, length=geometry().block_bytes),)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_equals_with_a_region_per_layer_and_part_are_one_run_per_block_and_region(order: str) -> None:
    model = geometry(order=order)
    assert runs_per_block(plan(ranks(model, 2), ranks(model, 2)[1], 1)) == [LAYERS * 2]


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (1, 4), (4, 2), (8, 1), (1, 8)])
def test_unequal_ranks_cost_runs_per_layer_and_part_whatever_the_block_size(
    there: int, here: int, block_size: int
) -> None:
    made = plan(ranks(geometry(block_size), there), ranks(geometry(block_size), here)[0], run_bytes_min=0)
    assert runs_per_block(made) == [LAYERS * 2] * max(1, there // here)


@pytest.mark.parametrize("there", [2, 4, 8])
def test_short_runs_of_several_ranks_become_one_read_of_each_ones_block(there: int) -> None:
    made = plan(ranks(geometry(8), there), ranks(geometry(8), 1)[0])
    assert runs_per_block(made) == [1] * there


def test_unequal_blocks_of_one_layout_cost_runs_per_head_or_one_through_scratch() -> None:
    """64 tokens there are two blocks of 32 here: half of each head's tokens go to either, but are read together."""
    direct, scratch = (
        plan(ranks(geometry(64), 1), ranks(geometry(32), 1)[0], run_bytes_min=least).ranks[0] for least in (0, 16_384)
    )
    assert [sum(b.runs for b in piece.direct) for piece in direct.pieces] == [LAYERS * 2 * HEADS] * 2
    assert scratch.reads == (Box(source=0, target=0, length=geometry(64).block_bytes),)


def test_blocks_that_fit_neither_way_are_cut_at_both_sides_boundaries() -> None:
    made = plan(ranks(geometry(24), 1), ranks(geometry(16), 1)[0])
    pieces = [(p.start, p.tokens, p.source_block, p.target_block) for p in made.ranks[0].pieces]
    assert pieces == [(0, 16, 0, 0), (16, 8, 0, 1), (24, 8, 1, 1), (32, 16, 1, 2)]


# ---------------------------------------------------------------- from which rank


def test_prefill_of_one_rank_feeds_half_its_heads_to_each_of_two() -> None:
    for reader in (0, 1):
        made = plan(ranks(geometry(64), 1), ranks(geometry(64), 2)[reader], reader)
        half = HEADS // 2 * 64 * HEAD_DIM * 2
        (box,) = made.ranks[0].pieces[0].direct
        assert (box.source, box.target, box.length) == (reader * half, 0, half)


def test_readers_of_replicated_heads_spread_over_the_ranks_that_hold_them() -> None:
    model = replace(geometry(), kv_heads=2)
    sources = ranks(model, 4)
    read = [[r.rank for r in plan(sources, target, i).ranks] for i, target in enumerate(ranks(model, 2))]
    assert read == [[0], [3]]


def test_replicated_heads_are_read_once_by_a_rank_that_holds_all() -> None:
    model = replace(geometry(), kv_heads=2)
    assert [r.rank for r in plan(ranks(model, 8), ranks(model, 1)[0]).ranks] == [0, 4]


@pytest.mark.parametrize(("there", "here"), [(1, 1), (4, 1), (1, 4), (4, 4), (2, 3)])
def test_latent_is_read_by_each_reader_from_one_rank(there: int, here: int) -> None:
    """All ranks hold the same latent: reading it from each would be as many times too much."""
    sources = ranks(latent(), there)
    for reader, target in enumerate(ranks(latent(), here)):
        (rank,) = plan(sources, target, reader).ranks
        assert sum(box.bytes for box in rank.pieces[0].direct) == latent().block_bytes


def test_node_that_keeps_one_copy_of_the_latent_reads_it_by_one_rank() -> None:
    first, *others = ranks(latent(), 4)
    others = [replace(layout, heads=(), region_bytes=0) for layout in others]
    made = [plan([first, *others], target, reader) for reader, target in enumerate((first, *others))]
    assert [len(some.ranks) for some in made] == [1, 0, 0, 0]


def test_layers_meet_by_name() -> None:
    """Two pipeline stages there, one rank with a layer order of its own here; draft layers there stay there."""
    stage = replace(geometry(64), layers=3)
    sources = ranks(stage, 1, ("0", "1", "draft")) + ranks(stage, 1, ("2", "3", "other draft"))
    target = layout_of(geometry(64, layer_names=("3", "2", "1", "0")), BLOCKS)
    made = plan(sources, target)
    assert [rank.rank for rank in made.ranks] == [0, 1]
    moved = sum(box.bytes for rank in made.ranks for box in rank.pieces[0].direct)
    assert moved == geometry(64).block_bytes


# ---------------------------------------------------------------- through scratch


@pytest.mark.parametrize(("there", "here"), [("NHD", "HND"), ("HND", "NHD")])
def test_other_token_order_is_read_in_whole_blocks_and_permuted(there: str, here: str) -> None:
    made = plan(ranks(geometry(order=there), 1), ranks(geometry(order=here), 1)[0])
    (rank,) = made.ranks
    (piece,) = rank.pieces
    (read,), (permute,) = rank.reads, piece.permutes
    block = HEADS * 16 * HEAD_DIM * 2
    assert piece.direct == () and (read.length, read.runs) == (block, LAYERS * 2)
    assert permute.length == HEAD_DIM * 2 and permute.bytes == LAYERS * 2 * block == rank.scratch_bytes


def test_native_block_for_another_order_is_one_read() -> None:
    made = plan(ranks(geometry(), 1), ranks(geometry(order="NHD"), 1)[0])
    assert made.ranks[0].reads == (Box(source=0, target=0, length=geometry().block_bytes),)


def test_short_gaps_are_read_along_and_long_ones_are_not() -> None:
    """A reader of one head of eight: its rows lie 1 KiB apart in a block, but K and V far from each other."""
    made = plan(ranks(geometry(order="NHD"), 1), ranks(geometry(order="NHD"), 8)[3], 3)
    (read,) = made.ranks[0].reads
    assert (read.length, read.runs) == (15 * HEADS * HEAD_DIM * 2 + HEAD_DIM * 2, LAYERS * 2)


def test_runs_long_enough_go_straight() -> None:
    """Rows of 256 heads are worth a descriptor each."""
    wide = replace(geometry(order="NHD"), kv_heads=256)
    there, here = ranks(wide, 1), ranks(replace(wide, layout="HND"), 1)[0]
    assert made_of(there, here) == (0, 1)
    assert made_of(ranks(wide, 2), ranks(wide, 1)[0]) == (2, 0)


def made_of(sources: list[KVLayout], target: KVLayout) -> tuple[int, int]:
    """How many direct and how many scratch reads there are over all ranks."""
    found = plan(sources, target).ranks
    assert all(box.length >= RUN_BYTES_MIN for rank in found for box in rank.pieces[0].direct)
    return sum(len(rank.pieces[0].direct) for rank in found), sum(len(rank.reads) for rank in found)


# ---------------------------------------------------------------- not at all


@pytest.mark.parametrize(
    ("theirs", "field", "text"),
    [
        ({"dtype": "bfloat16"}, "dtype", "dtype bfloat16 against float16"),
        ({"head_dim": 32}, "head_dim", "head_dim 32 against 64"),
        ({"kv_heads": 4}, "kv_heads", "kv_heads 4 against 8"),
        ({"layers": 3}, "layers", "layers none holds 3 against 3 is needed"),
        ({"kv_heads": 1, "kv_parts": 1}, "kv_heads", "parts latent against k/v"),
        ({"block_size": 257}, "block_size", "block_size 257 against 16"),
    ],
)
def test_impossible_pair_is_refused_with_both_values(theirs: dict[str, object], field: str, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text) as raised:
        plan(ranks(geometry(**theirs), 1), ranks(geometry(), 1)[0])
    assert raised.value.field == field


def test_all_differences_are_named_and_each_once() -> None:
    sources = ranks(geometry(dtype="bfloat16", head_dim=32), 2)
    assert differences(sources, ranks(geometry(), 1)[0]) == (("dtype", "bfloat16", "float16"), ("head_dim", "32", "64"))


def test_missing_rank_is_missed() -> None:
    with pytest.raises(RemoteProtocolError, match="none holds head 4 of layer 0"):
        plan(ranks(geometry(), 2)[:1], ranks(geometry(), 1)[0])
    with pytest.raises(RemoteProtocolError, match="no KV layout"):
        plan([], ranks(geometry(), 1)[0])


def test_ranks_of_one_node_have_one_block_table() -> None:
    first, _ = ranks(geometry(), 2)
    with pytest.raises(RemoteProtocolError, match="blocks 11 on rank 1 against 10 on rank 0"):
        plan([first, layout_of(geometry(tp=2), 11, 1)], first)


def test_bad_layout_is_blamed_on_whose_it_is() -> None:
    (good,) = ranks(geometry(), 1)
    bad = replace(good, slot_stride=1)
    with pytest.raises(RemoteProtocolError, match="rank 0: slot_stride: 1 bytes apart overlap") as raised:
        plan([bad], good)
    assert raised.value.field == "slot_stride"
    with pytest.raises(LocalProtocolError, match="our KV layout: slot_stride"):
        plan([good], bad)


def test_layers_in_disorder_are_read_up_to_a_limit() -> None:
    """A peer's layout may be sound and still cost a decode node seconds to plan for: that is refused."""
    model = replace(geometry(127), layers=600)
    target = layout_of(replace(model, block_size=128), BLOCKS)
    source = layout_of(model, BLOCKS)
    gaps = [0] + [source.block_stride // 600 * (i * i % 7) for i in range(599)]
    starts = tuple(start + sum(gaps[: i + 1]) for i, start in enumerate(source.starts))
    size = source.region_bytes + sum(gaps)
    source = replace(source, starts=starts, block_stride=size, region_bytes=size * BLOCKS)
    with pytest.raises(RemoteProtocolError, match="too much disorder") as raised:
        plan([source], target)
    assert raised.value.field == "starts"
