"""Where a block's bytes lie, and which block goes to which.

The native layout is [block, layer, k/v, head, slot, channel]: the block outermost, so that everything one block
holds of all layers is one run of `block_bytes`. Between two equal native layouts the plan is one run per block.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.bus.errors import ConfigError, RemoteProtocolError
from pdbus.bus.messages import Geometry
from pdbus.bus.wire import Declared

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class Strides(Declared):
    """Bytes from one layer, K/V part, head or token slot of a native block to the next; channels are `item` apart."""

    layer: int
    part: int
    head: int
    slot: int
    item: int


class Run(Declared):
    """`length` contiguous bytes: from `source` in the owner's region to `target` in the reader's."""

    source: int
    target: int
    length: int


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


def strides(geometry: Geometry) -> Strides:
    """The native layout's strides, in bytes."""
    item = DTYPE_BYTES[geometry.dtype]
    slot = geometry.head_dim * item
    head = geometry.block_size * slot
    part = geometry.kv_heads * head
    return Strides(layer=geometry.kv_parts * part, part=part, head=head, slot=slot, item=item)


def offset(geometry: Geometry, block: int, layer: int = 0, part: int = 0, head: int = 0, slot: int = 0) -> int:
    """Where one token slot's channels begin, in bytes from the start of the region."""
    s = strides(geometry)
    return block * geometry.block_bytes + layer * s.layer + part * s.part + head * s.head + slot * s.slot


def runs(source: Sequence[int], target: Sequence[int], block_bytes: int) -> list[Run]:
    """The fewest contiguous runs that bring block `source[i]` into `target[i]`, in order of source."""
    merged: list[Run] = []
    for s, t in sorted(zip(source, target, strict=True)):
        at, to = s * block_bytes, t * block_bytes
        last = merged[-1] if merged else None
        if last and last.source + last.length == at and last.target + last.length == to:
            merged[-1] = Run(source=last.source, target=last.target, length=last.length + block_bytes)
        else:
            merged.append(Run(source=at, target=to, length=block_bytes))
    return merged


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-tokens // block_size)


def pair(
    have: int, read: int, ready: int, source: Sequence[int], target: Sequence[int], block_size: int
) -> tuple[list[int], list[int]]:
    """Which of the owner's blocks to read into which of ours, by token position.

    `source` holds the tokens from `have` (rounded down to a block) to `ready`, as the owner announced them; `target` is
    our block table from token 0. `read` tokens are already read or asked for. A block that was partial
    then is named again, whole. Raises RemoteProtocolError when `source` does not hold have..ready.
    """
    first = have // block_size
    if len(source) != max(0, blocks_for(ready, block_size) - first):
        raise RemoteProtocolError(
            f"{len(source)} blocks do not hold tokens {have} to {ready} in blocks of {block_size}", field="blocks"
        )
    start, end = max(read, have) // block_size, blocks_for(ready, block_size)
    if ready <= max(read, have):
        return [], []
    if end > len(target):
        raise RemoteProtocolError(
            f"{ready} tokens are ready, but only {len(target)} blocks are reserved", field="ready"
        )
    return list(source[start - first : end - first]), list(target[start:end])
