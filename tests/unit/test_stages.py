"""Stages hold the layers of a model between them: which holds which, who is read for which, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.bus.compatibility import describe, differences
from pdbus.bus.errors import ConfigError, RemoteProtocolError
from pdbus.bus.messages import Agent, Geometry, Hello
from pdbus.bus.wire import replace
from pdbus.connector.layout import geometry_for, layers_of, layout_of, node_block_bytes
from pdbus.connector.plan import plan
from pdbus.connector.readable import impossible, layouts_of, layouts_of_agents, unreadable
from pdbus.nodes.config import load
from pdbus.nodes.engines.coded import coded_cells
from pdbus.nodes.engines.stage import Span, cut
from pdbus.nodes.setup import set_up

from tests.kv_memory import Guarded, read_cells, write_cells
from tests.unit.test_layout_grid import BLOCKS, HandOff, through_loopback
from tests.unit.test_setup import HOST

MODEL = geometry_for(5, 2, 8, 16, "float32")
PROMPT = 40
THERE, HERE = (5, 2, 3), (6, 1, 7)


@pytest.mark.parametrize(
    ("layers", "stages", "shares"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_stages_share_the_layers_in_order(layers: int, stages: int, shares: list[int]) -> None:
    held = [layers_of(layers, stages, stage) for stage in range(stages)]
    assert [len(some) for some in held] == shares
    assert [layer for some in held for layer in some] == list(range(layers))


def test_a_rank_holds_the_heads_of_its_rank_in_the_layers_of_its_stage() -> None:
    held = [(layout.layers, layout.heads) for layout in layouts_of(replace(MODEL, pp=2, tp=2))]
    first, second = ("0", "1", "2"), ("3", "4")
    assert held == [(first, (0,)), (first, (1,)), (second, (0,)), (second, (1,))]


def test_layers_with_names_keep_them() -> None:
    named = replace(MODEL, pp=2, layer_names=tuple("abcde"))
    assert [layout.layers for layout in layouts_of(named)] == [("a", "b", "c"), ("d", "e")]


@pytest.mark.parametrize("order", ["native", "NHD", "HND"])
def test_stages_take_no_more_memory_than_one(order: str) -> None:
    whole = replace(MODEL, layout=order)
    assert node_block_bytes(replace(whole, pp=3)) == node_block_bytes(whole) == MODEL.block_bytes
    sizes = [layout.region_bytes for layout in layouts_of(replace(whole, pp=3), 10)]
    assert sizes == [10 * MODEL.block_bytes // 5 * layers for layers in (2, 2, 1)]


def test_of_two_stages_each_gives_its_layers_in_one_run_a_block() -> None:
    target = layout_of(MODEL, BLOCKS)
    first, second = plan(layouts_of(replace(MODEL, pp=2), BLOCKS), target).ranks
    layer = MODEL.block_bytes // 5
    ((one,), (other,)) = first.pieces[0].direct, second.pieces[0].direct
    assert (first.rank, one.source, one.target, one.length) == (0, 0, 0, 3 * layer)
    assert (second.rank, other.source, other.target, other.length) == (1, 0, 3 * layer, 2 * layer)
    assert (first.source_stride, second.source_stride) == (3 * layer, 2 * layer)


@pytest.mark.parametrize(
    ("pp", "tp", "here"), [(2, 1, 1), (2, 1, 2), (3, 1, 2), (5, 1, 1), (2, 2, 1), (3, 2, 2), (2, 4, 2)]
)
@pytest.mark.parametrize(("order", "size"), [("native", 16), ("NHD", 32), ("HND", 8)])
@pytest.mark.parametrize("have", [0, 16])
def test_every_layer_is_read_from_its_stage(pp: int, tp: int, here: int, order: str, size: int, have: int) -> None:
    """Into poison; in a cell of another layer every byte differs, so that a layer from a wrong stage is noticed."""
    model, reading = replace(MODEL, pp=pp, tp=tp), replace(MODEL, tp=here, layout=order, block_size=size)
    reading = replace(reading, block_bytes=MODEL.block_bytes // 16 * size)
    assert unreadable(model, reading) == ()
    cells = coded_cells(MODEL, range(100, 100 + PROMPT))
    owned = [np.full(layout.region_bytes, 0x55, np.uint8) for layout in layouts_of(model, BLOCKS)]
    for memory, layout in zip(owned, layouts_of(model, BLOCKS), strict=True):
        write_cells(memory, layout, THERE, cells)
    table = (*HERE, 4, 2)[: -(-PROMPT // size)]
    for reader, target in enumerate(layouts_of(reading, BLOCKS)):
        guarded = Guarded(target.region_bytes)
        write_cells(guarded.region, target, table, cells[:have])
        source = THERE[have // 16 :]
        ended = through_loopback(HandOff(model, owned, target, reader, guarded.memory, have, PROMPT, source, table))
        assert ended.problem == ""
        assert np.array_equal(read_cells(guarded.region, target, table, PROMPT), cells[:, :, :, list(target.heads)])
        assert guarded.canaries_live()


# ---------------------------------------------------------------- what cannot be


def hello(role: str, geometry: Geometry) -> Hello:
    return Hello(role=role, address="tcp://127.0.0.1:1", version="0.1.0", epoch=1, geometry=geometry, fingerprint="f")


def test_stages_that_lack_a_layer_are_refused_at_hello_with_both_values() -> None:
    """A model of 4 layers in 2 stages cannot prefill for one of 5."""
    less = hello("prefill", replace(geometry_for(4, 2, 8, 16, "float32"), pp=2))
    found = differences(less, hello("decode", MODEL), unreadable)
    assert describe(found) == "cannot share KV: layers none holds 4 against 4 is needed"


@pytest.mark.parametrize(
    ("nonsense", "said"),
    [
        ({"pp": 6}, "6 (6 stages cannot share 5 layers: give at most 5)"), ({"pp": 0}, "0 (not from 1 to 128)"),
        ({"pp": 1 << 40}, f"{1 << 40} (not from 1 to 128)"),
        ({"pp": 5, "tp": 64}, "5 (of 64 ranks each, more than 128 in all)"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_are_refused_at_hello_with_both_values(nonsense: dict[str, Any], said: str) -> None:
    odd = replace(MODEL, **nonsense)
    assert [name for name, _ in impossible(odd)] == ["pp"]
    assert unreadable(odd, MODEL) == (("pp", said, "1"),)


def test_agents_of_all_stages_are_needed() -> None:
    model = replace(MODEL, pp=2)
    agents = [
        Agent(epoch=1, rank=rank, blocks=10, region_bytes=layout.region_bytes, layout=layout)
        for rank, layout in enumerate(layouts_of(model, 10))
    ]
    assert layouts_of_agents(model, agents) == layouts_of(model, 10)
    with pytest.raises(RemoteProtocolError, match="agents of ranks 0, but its hello said pp 2 and tp 1"):
        layouts_of_agents(model, agents[:1])
    swapped = [replace(agents[1], rank=0), replace(agents[0], rank=1)]
    with pytest.raises(RemoteProtocolError, match=r"rank 0 says layers \('3', '4'\), its hello \('0', '1', '2'\)"):
        layouts_of_agents(model, swapped)


# ---------------------------------------------------------------- settings

ONLY_PREFILL = "--pp: 2 stages can prefill, not decode: give --role prefill with it, or 1"


def asked(**flags: str) -> Any:
    return load({"engine": "coded", "role": "prefill", **flags}, host=HOST)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"role": "decode"}, ONLY_PREFILL), ({"role": "both"}, ONLY_PREFILL),
        ({"tp": "65"}, "--pp: 2 stages of 65 ranks are more than 128 ranks"),
        ({"pp": "0"}, "--pp: "), ({"pp": "129"}, "--pp: "), ({"pp": "two"}, "--pp: "),
    ],
)  # fmt: skip
def test_what_does_not_go_with_stages_is_told_in_one_line(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(**{"pp": "2", **flags})
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "how", [{}, {"speculate_method": "mtp"}, {"speculate_method": "draft", "draft_model": "there"}]
)
def test_stages_draft_nothing(how: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--speculate: the stages of a prefill node draft nothing"):
        asked(engine="torch", model=str(tmp_path), pp="2", speculate="1", **how)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--pp: 4 stages cannot share 3 layers: give at most 3"):
        set_up(asked(coded_layers="3", pp="4"))


def test_every_rank_has_memory_for_its_layers_alone() -> None:
    made = set_up(asked(coded_layers="3", pp="2", kv_blocks="10"))
    layer = made.geometry.block_bytes // 3
    assert made.slab_bytes == (10 * 2 * layer, 10 * layer)


def test_stages_share_the_cores() -> None:
    host = replace(HOST, cpus=tuple(range(8)))
    assert load({"engine": "coded", "role": "prefill", "pp": "2", "tp": "2"}, host=host).threads == 2


# ---------------------------------------------------------------- parts of a step


def spans(*of: tuple[int, int, int]) -> list[Span]:
    return [Span(start, count, np.arange(4), wanted) for start, count, wanted in of]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 100])
def test_parts_have_all_rows_once_and_in_order(rows: int) -> None:
    step = spans((0, 7, 0), (9, 1, 1), (3, 6, 2), (0, 1, 1))
    parts = cut(step, rows)
    assert [sum(span.count for _, span in part) for part in parts][:-1] == [rows] * (len(parts) - 1)
    pieces = [piece for part in parts for piece in part]
    for place, span in enumerate(step):
        own = [piece for i, piece in pieces if i == place]
        assert [p for piece in own for p in range(piece.start, piece.end)] == list(range(span.start, span.end))
        wanted = [p for piece in own for p in range(piece.end - piece.wanted, piece.end)]
        assert wanted == list(range(span.end - span.wanted, span.end))
    assert [i for i, _ in pieces] == sorted(i for i, _ in pieces)
