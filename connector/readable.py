"""Can one node's KV be read by another? From the geometries that they say at hello, and the agents that follow."""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.bus.errors import ConfigError, RemoteProtocolError
from pdbus.bus.messages import Agent, Geometry, KVLayout

from .layout import DTYPE_BYTES, HEADS_MAX, LAYERS_MAX, ORDERS, PARTS, REGION_BYTES_MAX, Fault, fault, layout_of
from .plan import Difference, differences

RANKS_MAX = 128
RANK_LAYERS_MAX = 32_768  # of all ranks together: what a stranger's hello may cost us to check
SAME_IN_AGENT = ("dtype", "head_dim", "kv_heads", "heads", "layers", "parts", "block_size", "blocks")


def unreadable(prefill: Geometry, decode: Geometry) -> tuple[Difference, ...]:
    """Every field that keeps the decode node from reading the prefill node's KV, with both values as text."""
    if faults := [(field, *_both(field, prefill, decode)) for g in (prefill, decode) for field, _ in impossible(g)]:
        return tuple(dict.fromkeys(faults))
    sources = layouts_of(prefill)
    return tuple(dict.fromkeys(unlike for target in layouts_of(decode) for unlike in differences(sources, target)))


def _both(field: str, one: Geometry, other: Geometry) -> tuple[str, str]:
    """Two values as text, each with what is wrong with it."""
    return _said(field, one), _said(field, other)


def _said(field: str, geometry: Geometry) -> str:
    wrong = "".join(f" ({why})" for at, why in impossible(geometry) if at == field)
    return f"{getattr(geometry, field)}{wrong}"


def impossible(geometry: Geometry) -> list[Fault]:
    """What no node can have, if anything. Costs little, whatever a stranger says."""
    g = geometry
    if g.layout not in ORDERS:
        return [("layout", f"none of {', '.join(ORDERS)}")]
    if g.dtype not in DTYPE_BYTES:
        return [("dtype", f"none of {', '.join(DTYPE_BYTES)}")]
    if g.kv_parts not in PARTS:
        return [("kv_parts", "neither 2 nor 1")]
    limits = {
        "layers": LAYERS_MAX, "kv_heads": HEADS_MAX, "tp": RANKS_MAX, "pp": RANKS_MAX,
        "head_dim": REGION_BYTES_MAX, "block_size": REGION_BYTES_MAX,
    }  # fmt: skip
    if out := [(name, f"not from 1 to {most}") for name, most in limits.items() if not 1 <= getattr(g, name) <= most]:
        return out
    if g.ranks > RANKS_MAX:
        return [("pp", f"of {g.tp} ranks each, more than {RANKS_MAX} in all")]
    if g.tp * g.layers > RANK_LAYERS_MAX:
        return [("tp", f"with {g.layers} layers more than {RANK_LAYERS_MAX} in all")]
    if g.layer_names and len(g.layer_names) != g.layers:
        return [("layer_names", f"{len(g.layer_names)} for {g.layers} layers")]
    return _impossible_layout(g)


def _impossible_layout(geometry: Geometry) -> list[Fault]:
    try:
        found = fault(layout_of(geometry, 1))
    except ConfigError as e:
        return [(e.setting.lstrip("-"), e.problem)]
    return [(found[0] if hasattr(geometry, found[0]) else "layer_names", found[1])] if found else []


def layouts_of(geometry: Geometry, blocks: int = 1) -> tuple[KVLayout, ...]:
    """The dense layouts of all ranks. Raises ConfigError."""
    return tuple(layout_of(geometry, blocks, rank) for rank in range(geometry.ranks))


def layouts_of_agents(geometry: Geometry, agents: Sequence[Agent]) -> tuple[KVLayout, ...]:
    """How the KV of a peer's ranks lies, by their agents. Raises RemoteProtocolError for what its hello did not say."""
    if faults := impossible(geometry):
        raise RemoteProtocolError(f"{faults[0][0]}: {faults[0][1]}", field=faults[0][0])
    if [agent.rank for agent in agents] != list(range(geometry.ranks)):
        ranks = ", ".join(str(agent.rank) for agent in agents)
        raise RemoteProtocolError(f"agents of ranks {ranks}, but its hello said {_ranks(geometry)}", field="rank")
    return tuple(_layout_of_agent(geometry, agent) for agent in agents)


def _ranks(geometry: Geometry) -> str:
    return f"tp {geometry.tp}" if geometry.pp == 1 else f"pp {geometry.pp} and tp {geometry.tp}"


def _layout_of_agent(geometry: Geometry, agent: Agent) -> KVLayout:
    if not 1 <= agent.blocks <= REGION_BYTES_MAX:
        raise RemoteProtocolError(f"the agent of rank {agent.rank} has {agent.blocks} blocks", field="blocks")
    said = layout_of(geometry, agent.blocks, agent.rank)
    layout = agent.layout or said
    for name in SAME_IN_AGENT:
        if getattr(layout, name) != getattr(said, name):
            raise RemoteProtocolError(
                f"the agent of rank {agent.rank} says {name} {getattr(layout, name)}, its hello {getattr(said, name)}",
                field=name,
            )
    if layout.region_bytes > agent.region_bytes:
        raise RemoteProtocolError(
            f"the layout of rank {agent.rank} takes {layout.region_bytes} bytes, but its region has "
            f"{agent.region_bytes}",
            field="region_bytes",
        )
    return layout
