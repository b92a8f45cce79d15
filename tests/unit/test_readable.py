"""Who can read whose KV, by what nodes say at hello and with their agents; and what no node can have."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.compatibility import differences
from pdbus.bus.errors import RemoteProtocolError
from pdbus.bus.messages import Agent, Geometry, Hello
from pdbus.bus.wire import replace
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.readable import impossible, layouts_of_agents, unreadable

MODEL = geometry_for(4, 6, 8, 16, "float32")


def agents(geometry: Geometry, blocks: int = 10, **changes: Any) -> tuple[Agent, ...]:
    layouts = [layout_of(geometry, blocks, rank) for rank in range(geometry.tp)]
    return tuple(
        Agent(epoch=1, rank=rank, blocks=blocks, region_bytes=layout.region_bytes, layout=layout, **changes)
        for rank, layout in enumerate(layouts)
    )


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 64}, {"layout": "NHD"}, {"tp": 3}, {"tp": 12}, {"block_bytes": 7},
        {"layout": "HND", "block_size": 128, "tp": 2},
    ],
)  # fmt: skip
def test_what_a_plan_can_bridge_may_differ(other: dict[str, Any]) -> None:
    assert unreadable(MODEL, replace(MODEL, **other)) == unreadable(replace(MODEL, **other), MODEL) == ()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"dtype": "float16"}, ("dtype", "float16", "float32")),
        ({"head_dim": 16}, ("head_dim", "16", "8")),
        ({"kv_heads": 12}, ("kv_heads", "12", "6")),
        ({"layers": 3}, ("layers", "none holds 3", "3 is needed")),
        ({"layer_names": ("0", "1", "2", "draft")}, ("layers", "none holds 3", "3 is needed")),
        ({"block_size": 1031}, ("block_size", "1031", "16")),
    ],
)
def test_what_no_plan_can_bridge_is_told_with_both_values(
    other: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    """The prefill node is the other one."""
    assert unreadable(replace(MODEL, **other), MODEL) == (expected,)


def test_more_layers_there_do_no_harm() -> None:
    """Pipeline stages and draft layers are paired by name."""
    assert unreadable(replace(MODEL, layers=6), MODEL) == ()


@pytest.mark.parametrize(
    ("nonsense", "field"),
    [
        ({"layout": "sideways"}, "layout"), ({"dtype": "int3"}, "dtype"), ({"kv_parts": 3}, "kv_parts"),
        ({"layers": 0}, "layers"), ({"layers": 1 << 60}, "layers"), ({"kv_heads": -1}, "kv_heads"),
        ({"tp": 0}, "tp"), ({"tp": 1 << 40}, "tp"), ({"tp": 4}, "tp"), ({"head_dim": 0}, "head_dim"),
        ({"block_size": 0}, "block_size"), ({"block_size": 1 << 61}, "layer_names"),
        ({"layers": 4096, "tp": 12}, "tp"), ({"layer_names": ("a",)}, "layer_names"),
        ({"layer_names": ("a", "a", "b", "c")}, "layers"), ({"kv_parts": 1}, "kv_heads"),
    ],
)  # fmt: skip
def test_what_no_node_can_have_is_refused_and_named(nonsense: dict[str, Any], field: str) -> None:
    """Whatever a stranger says costs little: no layout of a billion layers is made."""
    odd = replace(MODEL, **nonsense)
    assert [name for name, _ in impossible(odd)] == [field]
    for pair in ((odd, MODEL), (MODEL, odd)):
        assert [name for name, _, _ in unreadable(*pair)] == [field]


def test_at_hello_each_side_is_asked_what_it_can_read() -> None:
    """A node that does both jobs reads and is read."""
    more, less = (Hello(role="both", version="1.0.0", geometry=replace(MODEL, layers=n)) for n in (6, 4))
    assert differences(more, less, unreadable) == (("layers", "4 is needed", "none holds 4"),)
    assert differences(replace(more, role="prefill"), less, unreadable) == ()
    assert differences(less, replace(more, role="decode"), unreadable) == (("layers", "none holds 4", "4 is needed"),)


# ---------------------------------------------------------------- agents


def test_agents_of_all_ranks_give_their_layouts() -> None:
    geometry = replace(MODEL, tp=3)
    assert layouts_of_agents(geometry, agents(geometry)) == tuple(layout_of(geometry, 10, rank) for rank in range(3))


def test_an_agent_without_a_layout_lies_as_its_hello_says() -> None:
    assert layouts_of_agents(MODEL, [replace(agents(MODEL)[0], layout=None)]) == (layout_of(MODEL, 10),)


def test_rows_may_lie_elsewhere_than_dense() -> None:
    """An engine with padding, or with a region of its own for each layer."""
    layout = layout_of(MODEL, 10)
    padded = replace(layout, block_stride=layout.block_stride + 64, region_bytes=layout.region_bytes + 640)
    (agent,) = agents(MODEL)
    said = replace(agent, layout=padded, region_bytes=padded.region_bytes)
    assert layouts_of_agents(MODEL, [said]) == (padded,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": (0, 1)}, r"says heads \(0, 1\), its hello \(0, 1, 2\)"),
        ({"block_size": 8}, "says block_size 8, its hello 16"),
        ({"blocks": 9}, "says blocks 9, its hello 10"),
        ({"layers": ("0", "1")}, "says layers"),
        ({"dtype": "float16"}, "says dtype"),
        ({"region_bytes": 1 << 40}, "its region has"),
    ],
)
def test_an_agent_that_is_not_what_its_hello_said_is_refused(changes: dict[str, Any], reason: str) -> None:
    geometry = replace(MODEL, tp=2)
    first, second = agents(geometry)
    odd = replace(first, layout=replace(layout_of(geometry, 10), **changes))
    with pytest.raises(RemoteProtocolError, match=reason):
        layouts_of_agents(geometry, [odd, second])


def test_an_agent_that_is_missing_or_too_many_is_refused() -> None:
    geometry = replace(MODEL, tp=2)
    for some in (agents(geometry)[:1], (*agents(geometry), agents(geometry)[1])):
        with pytest.raises(RemoteProtocolError, match="but its hello said tp 2"):
            layouts_of_agents(geometry, some)
