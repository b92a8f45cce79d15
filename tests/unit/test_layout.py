"""The native layout's arithmetic, and which block is read into which."""

from __future__ import annotations

import pytest

from pdbus.bus.errors import ConfigError, RemoteProtocolError
from pdbus.connector.layout import Run, blocks_for, geometry_for, offset, pair, runs, strides


def test_block_bytes_of_known_models() -> None:
    assert geometry_for(8, 4, 64, 16, "float32").block_bytes == 262_144
    assert geometry_for(30, 3, 64, 16, "float32").block_bytes == 737_280
    assert geometry_for(30, 3, 64, 16, "bfloat16").block_bytes == 368_640
    assert geometry_for(61, 1, 576, 64, "bfloat16", kv_parts=1).block_bytes == 61 * 576 * 64 * 2


def test_strides_nest_from_block_to_channel() -> None:
    geometry = geometry_for(3, 4, 8, 16, "float16")
    s = strides(geometry)
    assert (s.item, s.slot, s.head, s.part, s.layer) == (2, 16, 256, 1024, 2048)
    assert 3 * s.layer == geometry.block_bytes


def test_last_slot_ends_where_the_next_block_begins() -> None:
    geometry = geometry_for(3, 4, 8, 16, "float16")
    last = offset(geometry, 5, layer=2, part=1, head=3, slot=15)
    assert last + strides(geometry).slot == offset(geometry, 6)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [({"dtype": "int3"}, "--dtype"), ({"layers": 0}, "--model"), ({"block_size": 0}, "--block-size")],
)
def test_impossible_geometry_names_the_setting(changes: dict[str, object], setting: str) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    with pytest.raises(ConfigError, match=setting):
        geometry_for(**(sizes | changes))  # type: ignore[arg-type]


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert runs([4, 2, 3, 9], [8, 6, 7, 1], 10) == [
        Run(source=20, target=60, length=30),
        Run(source=90, target=10, length=10),
    ]


def test_neighbours_on_one_side_stay_apart() -> None:
    assert len(runs([1, 2], [5, 7], 10)) == 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_partial_blocks_count(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


TABLE = [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("have", "read", "ready", "source", "expected"),
    [
        (0, 0, 64, [1, 2, 3, 4], ([1, 2, 3, 4], [10, 11, 12, 13])),
        (0, 0, 33, [1, 2, 3], ([1, 2, 3], [10, 11, 12])),  # a partial last block travels whole
        (0, 32, 64, [1, 2, 3, 4], ([3, 4], [12, 13])),  # the first two are read already
        (0, 33, 64, [1, 2, 3, 4], ([3, 4], [12, 13])),  # the third was partial: read again
        (32, 0, 64, [3, 4], ([3, 4], [12, 13])),  # two are cached here: the owner's list starts at the third
        (20, 0, 64, [2, 3, 4], ([2, 3, 4], [11, 12, 13])),  # half a block cached: that block is read
        (0, 0, 0, [], ([], [])),
        (0, 64, 64, [1, 2, 3, 4], ([], [])),
        (64, 0, 64, [], ([], [])),
    ],
)
def test_blocks_pair_by_token_position(
    have: int, read: int, ready: int, source: list[int], expected: tuple[list[int], list[int]]
) -> None:
    """Never by count: after a prefix hit the lists of both sides begin at different blocks."""
    assert pair(have, read, ready, source, TABLE, 16) == expected


def test_block_list_of_the_wrong_length_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="3 blocks do not hold tokens 0 to 64"):
        pair(0, 0, 64, [1, 2, 3], TABLE, 16)


def test_more_ready_than_reserved_is_the_peers_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="only 4 blocks are reserved"):
        pair(0, 0, 65, [1, 2, 3, 4, 5], TABLE, 16)
