"""Where every byte of a rank's KV memory lies: (block, layer by name, K or V or latent, head, token slot, channel).

A `KVLayout` (bus/messages.py) places rows, the channels of one head of one token. Whatever differs between two ranks
(tensor parallelism, NHD or HND, block sizes, pipeline stages) is a difference of two such layouts, and plan.py brings
one to the other.

The native layout is [block, layer, k/v, head, slot, channel]: the block outermost, so that everything one block
holds of all layers is one run.
"""

from __future__ import annotations

from itertools import pairwise

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Geometry, KVLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

ORDERS: dict[str, tuple[str, ...]] = {  # outermost first; channels are always innermost
    "native": ("block", "layer", "part", "head", "slot"),
    "NHD": ("layer", "part", "block", "slot", "head"),
    "HND": ("layer", "part", "block", "head", "slot"),
}
PARTS: dict[int, tuple[str, ...]] = {1: ("latent",), 2: ("k", "v")}

LAYERS_MAX = 4_096  # a peer's layout costs us this much to check; the deepest models have some hundreds of layers
HEADS_MAX = 4_096
REGION_BYTES_MAX = 1 << 62  # sums of offsets stay inside 64 bits


def row_bytes(of: Geometry | KVLayout) -> int:
    """The channels of one head of one token."""
    return of.head_dim * DTYPE_BYTES[of.dtype]


def rank_bytes_per_token(layout: KVLayout) -> int:
    """All that a rank holds of one token."""
    return len(layout.layers) * len(layout.parts) * len(layout.heads) * row_bytes(layout)


def offset(layout: KVLayout, block: int, layer: int = 0, part: int = 0, head: int = 0, slot: int = 0) -> int:
    """Where a row begins; layer, part and head are places in the layout."""
    inner = part * layout.part_stride + head * layout.head_stride + slot * layout.slot_stride
    return layout.starts[layer] + block * layout.block_stride + inner


# ---------------------------------------------------------------- making layouts


def geometry_for(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: str, kv_parts: int = 2) -> Geometry:
    """The native geometry of a model's KV cache. `block_size` in tokens. Raises ConfigError for what cannot be."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError("--dtype", f"{dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "kv_parts": kv_parts}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError("--model", f"{name} is {size}, but must be at least 1")
    if block_size < 1:
        raise ConfigError("--block-size", f"{block_size} tokens, but must be at least 1")
    block_bytes = layers * kv_parts * kv_heads * block_size * head_dim * DTYPE_BYTES[dtype]
    return Geometry(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, kv_parts=kv_parts,
        block_size=block_size, dtype=dtype, block_bytes=block_bytes,
    )  # fmt: skip


def heads_of(kv_heads: int, ranks: int, rank: int) -> tuple[int, ...]:
    """The heads that a rank holds: an equal share, or one head that several ranks hold alike. Raises ConfigError."""
    if kv_heads % ranks == 0:
        share = kv_heads // ranks
        return tuple(range(rank * share, (rank + 1) * share))
    if ranks % kv_heads == 0:
        return (rank // (ranks // kv_heads),)
    raise ConfigError("--tp", f"{ranks} ranks cannot share {kv_heads} KV heads; neither number divides the other")


def layers_of(layers: int, stages: int, stage: int) -> range:
    """The layers that a stage holds: neighbours, in shares that differ by one at most, the larger ones first, for the
    last stage has the head besides. Raises ConfigError."""
    if stages > layers:
        raise ConfigError("--pp", f"{stages} stages cannot share {layers} layers: give at most {layers}")
    share, more = divmod(layers, stages)
    first = stage * share + min(stage, more)
    return range(first, first + share + (stage < more))


def layout_of(geometry: Geometry, blocks: int, rank: int = 0) -> KVLayout:
    """The dense layout of one of the `geometry.ranks`, in the order that `geometry.layout` names (ORDERS).

    Raises ConfigError for what cannot be.
    """
    if geometry.layout not in ORDERS:
        raise ConfigError("--kv-layout", f"{geometry.layout!r} is none of {', '.join(ORDERS)}")
    if geometry.kv_parts not in PARTS:
        raise ConfigError("--model", f"kv_parts is {geometry.kv_parts}, but a cache has K and V (2) or a latent (1)")
    stage, within = divmod(rank, geometry.tp)
    heads = heads_of(geometry.kv_heads, geometry.tp, within)
    layers = layers_of(geometry.layers, geometry.pp, stage)
    counts = {
        "block": blocks, "layer": len(layers), "part": geometry.kv_parts,
        "head": len(heads), "slot": geometry.block_size,
    }  # fmt: skip
    size, stride = row_bytes(geometry), {}
    for name in reversed(ORDERS[geometry.layout]):
        stride[name] = size
        size *= counts[name]
    return KVLayout(
        dtype=geometry.dtype, head_dim=geometry.head_dim, kv_heads=geometry.kv_heads, heads=heads,
        layers=geometry.layer_names[layers.start : layers.stop] or tuple(map(str, layers)),
        starts=tuple(i * stride["layer"] for i in range(len(layers))),
        parts=PARTS[geometry.kv_parts], block_size=geometry.block_size, blocks=blocks,
        block_stride=stride["block"], part_stride=stride["part"],
        head_stride=stride["head"], slot_stride=stride["slot"], region_bytes=size,
    )  # fmt: skip


def node_block_bytes(geometry: Geometry) -> int:
    """What one block takes on all ranks together."""
    return sum(layout_of(geometry, 1, rank).region_bytes for rank in range(geometry.ranks))


# ---------------------------------------------------------------- checking layouts

Fault = tuple[str, str]  # field, what is wrong with it


def fault(layout: KVLayout) -> Fault | None:
    """What makes a layout impossible, if anything: two rows in one place, a row outside the region, nonsense."""
    return _bad_sizes(layout) or _bad_names(layout) or (_bad_places(layout) if layout.heads and layout.layers else None)


def _bad_sizes(layout: KVLayout) -> Fault | None:
    if layout.dtype not in DTYPE_BYTES:
        return "dtype", f"{layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
    for name in ("head_dim", "kv_heads", "block_size", "blocks"):
        if getattr(layout, name) < 1:
            return name, f"{getattr(layout, name)}, but must be at least 1"
    for name in ("block_stride", "part_stride", "head_stride", "slot_stride"):
        if getattr(layout, name) < 0:
            return name, f"{getattr(layout, name)} is negative"
    if not 0 <= layout.region_bytes <= REGION_BYTES_MAX:
        return "region_bytes", f"{layout.region_bytes}, but must be from 0 to {REGION_BYTES_MAX}"
    return None


def _bad_names(layout: KVLayout) -> Fault | None:
    if layout.parts not in PARTS.values():
        return "parts", f"{'/'.join(layout.parts)} is neither k/v nor latent"
    if layout.parts == PARTS[1] and layout.kv_heads != 1:
        return "kv_heads", f"{layout.kv_heads}, but a latent has 1"
    if len(layout.layers) > LAYERS_MAX or len(layout.heads) > HEADS_MAX:
        return "layers", f"{len(layout.layers)} layers of {len(layout.heads)} heads are too many"
    if len(dict.fromkeys(layout.layers)) != len(layout.layers):
        return "layers", "a layer is named twice"
    if len(layout.starts) != len(layout.layers):
        return "starts", f"{len(layout.starts)} starts for {len(layout.layers)} layers"
    if any(b <= a for a, b in pairwise(layout.heads)):
        return "heads", f"{_some(layout.heads)} do not rise"
    if layout.heads and not 0 <= layout.heads[0] <= layout.heads[-1] < layout.kv_heads:
        return "heads", f"{_some(layout.heads)} are not all among {layout.kv_heads}"
    return None


def _some(heads: tuple[int, ...]) -> str:
    return ", ".join(map(str, heads[:8])) + (" ..." if len(heads) > 8 else "")


def _bad_places(layout: KVLayout) -> Fault | None:
    """Each stride must step over all that lies inside it: then no two rows share a byte."""
    starts = sorted(layout.starts)
    step = min((b - a for a, b in pairwise(starts)), default=0)
    dimensions = [
        ("starts", len(starts), step, starts[-1] - starts[0]),
        _even("block_stride", layout.blocks, layout.block_stride),
        _even("part_stride", len(layout.parts), layout.part_stride),
        _even("head_stride", len(layout.heads), layout.head_stride),
        _even("slot_stride", layout.block_size, layout.slot_stride),
    ]
    dimensions = [dimension for dimension in dimensions if dimension[1] > 1]
    extent = row_bytes(layout)
    for name, _, step, span in sorted(dimensions, key=lambda dimension: dimension[2]):
        if step < extent:
            return name, f"{step} bytes apart overlap: each holds {extent} bytes"
        extent += span
    if starts[0] < 0:
        return "starts", f"{starts[0]} is negative"
    if starts[0] + extent > layout.region_bytes:
        return "region_bytes", f"{layout.region_bytes}, but the last byte is number {starts[0] + extent}"
    return None


def _even(name: str, count: int, stride: int) -> tuple[str, int, int, int]:
    """A dimension: its name, its size, its smallest step and the distance from its first to its last."""
    return name, count, stride, (count - 1) * stride


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-tokens // block_size)
