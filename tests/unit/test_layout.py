"""Where a rank's bytes lie, and which layouts cannot be."""

from __future__ import annotations

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import replace
from pdbus.connector.layout import ORDERS, blocks_for, fault, geometry_for, heads_of, layout_of, offset, row_bytes


def test_block_bytes_of_known_models() -> None:
    assert geometry_for(8, 4, 64, 16, "float32").block_bytes == 262_144
    assert geometry_for(30, 3, 64, 16, "float32").block_bytes == 737_280
    assert geometry_for(30, 3, 64, 16, "bfloat16").block_bytes == 368_640
    assert geometry_for(61, 1, 576, 64, "bfloat16", kv_parts=1).block_bytes == 61 * 576 * 64 * 2


def test_strides_nest_from_block_to_channel() -> None:
    layout = layout_of(geometry_for(3, 4, 8, 16, "float16"), blocks=10)
    assert (layout.slot_stride, layout.head_stride, layout.part_stride) == (16, 256, 1024)
    assert (layout.starts, layout.block_stride) == ((0, 2048, 4096), 6144)


def test_last_slot_ends_where_the_next_block_begins() -> None:
    layout = layout_of(geometry_for(3, 4, 8, 16, "float16"), blocks=10)
    assert offset(layout, 5, layer=2, part=1, head=3, slot=15) + row_bytes(layout) == offset(layout, 6)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [({"dtype": "int3"}, "--dtype"), ({"layers": 0}, "--model"), ({"block_size": 0}, "--block-size")],
)
def test_impossible_geometry_names_the_setting(changes: dict[str, object], setting: str) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    with pytest.raises(ConfigError, match=setting):
        geometry_for(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_partial_blocks_count(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize("order", ORDERS)
def test_named_layouts_are_sound_and_dense(order: str) -> None:
    geometry = replace(geometry_for(3, 4, 8, 16, "float16"), layout=order, tp=2)
    layout = layout_of(geometry, blocks=10, rank=1)
    assert fault(layout) is None
    assert layout.heads == (2, 3)
    assert layout.region_bytes == 10 * geometry.block_bytes // 2
    assert fault(replace(layout, region_bytes=layout.region_bytes - 1)) is not None


def test_nhd_and_hnd_differ_in_what_is_innermost() -> None:
    geometry = geometry_for(2, 4, 8, 16, "float16")
    nhd, hnd = (layout_of(replace(geometry, layout=order), blocks=10) for order in ("NHD", "HND"))
    assert (nhd.head_stride, nhd.slot_stride) == (16, 64)
    assert (hnd.head_stride, hnd.slot_stride) == (256, 16)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "held"),
    [
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (3, 3, [(0,), (1,), (2,)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
    ],
)
def test_ranks_share_heads_or_hold_the_same(kv_heads: int, ranks: int, held: list[tuple[int, ...]]) -> None:
    assert [heads_of(kv_heads, ranks, rank) for rank in range(ranks)] == held


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (8, 3), (2, 3)])
def test_heads_that_cannot_be_shared_name_the_setting(kv_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp: {ranks} ranks cannot share {kv_heads} KV heads"):
        heads_of(kv_heads, ranks, 0)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"slot_stride": -16}, "slot_stride", "-16 is negative"),
        ({"slot_stride": 15}, "slot_stride", "overlap"),
        ({"head_stride": 240}, "head_stride", "240 bytes apart overlap: each holds 256 bytes"),
        ({"part_stride": 0}, "part_stride", "overlap"),
        ({"block_stride": 1}, "block_stride", "overlap"),
        ({"starts": (0, 2047, 4096)}, "starts", "2047 bytes apart overlap"),
        ({"starts": (0, 0, 0)}, "starts", "overlap"),
        ({"starts": (-2048, 0, 2048)}, "starts", "-2048 is negative"),
        ({"starts": (0, 2048)}, "starts", "2 starts for 3 layers"),
        ({"starts": (1, 2049, 4097)}, "region_bytes", "the last byte is number 61441"),
        ({"region_bytes": 1 << 63}, "region_bytes", "but must be from 0"),
        ({"layers": ("0", "1", "0")}, "layers", "named twice"),
        ({"layers": tuple(map(str, range(5000)))}, "layers", "too many"),
        ({"heads": (0, 2, 1, 3)}, "heads", "do not rise"),
        ({"heads": (0, 1, 2, 4)}, "heads", "not all among 4"),
        ({"parts": ("v", "k")}, "parts", "neither k/v nor latent"),
        ({"parts": ("latent",)}, "kv_heads", "a latent has 1"),
        ({"dtype": "int3"}, "dtype", "is none of"),
        ({"blocks": 0}, "blocks", "at least 1"),
        ({"block_size": -1}, "block_size", "at least 1"),
    ],
)
def test_bad_layout_is_refused_with_field_and_reason(changes: dict[str, object], field: str, reason: str) -> None:
    """Two rows in one place would be read as each other; a row outside the region is somebody else's memory."""
    layout = layout_of(geometry_for(3, 4, 8, 16, "float16"), blocks=10)
    found = fault(replace(layout, **changes))
    assert found is not None and found[0] == field and reason in found[1]


def test_rank_that_holds_nothing_is_sound() -> None:
    layout = layout_of(geometry_for(3, 1, 8, 16, "float16", kv_parts=1), blocks=10)
    assert fault(replace(layout, heads=(), region_bytes=0)) is None
