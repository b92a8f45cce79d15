"""Pages: one block of one layer as it lies in memory, copied whole between vLLM's KV cache and the slab.

Copies are synchronous, in the worker's own thread: before a forward pass that needs them, after one that has made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pdbus.bus.errors import Broken

from ..slab import Slab

Tensor = torch.Tensor


class Pages:
    """vLLM's KV cache, by layer and block."""

    def __init__(self, caches: Mapping[str, Tensor], layers: Sequence[str], page_bytes: int, heads: int = 1) -> None:
        """Raises Broken for a cache whose blocks are not each one run of `page_bytes` bytes, or for more than one head,
        of as many equal runs, one a head: ranks of another number share them otherwise."""
        if missing := [name for name in layers if name not in caches]:
            raise Broken(f"vLLM registered no KV cache for layer {missing[0]}")
        self._layers = [_paged(name, caches[name], page_bytes, heads) for name in layers]
        self._page_bytes = page_bytes

    @property
    def blocks(self) -> int:
        """How many every layer has."""
        return min(len(layer) for layer in self._layers)

    def slab_pages(self, slab: Slab, blocks: int) -> Tensor:
        """The slab as [block, layer, byte]: the native layout, with each page's inside left to vLLM."""
        size = blocks * len(self._layers) * self._page_bytes
        return torch.frombuffer(slab.memory, dtype=torch.uint8, count=size).view(blocks, len(self._layers), -1)

    def save(self, slab: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        """vLLM's blocks `source` into the slab's blocks `target`."""
        theirs, ours = _ids(source), _ids(target)
        for at, layer in enumerate(self._layers):
            slab[ours, at] = layer[theirs]

    def load(self, slab: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        """The slab's blocks `source` into vLLM's blocks `target`."""
        ours, theirs = _ids(source), _ids(target)
        for at, layer in enumerate(self._layers):
            layer[theirs] = slab[ours, at]


def _ids(blocks: Sequence[int]) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64)


def _paged(name: str, cache: Any, page_bytes: int, heads: int) -> Tensor:
    """The cache as [block, byte], on the same memory."""
    if cache.device.type != "cpu":
        raise Broken(f"the KV cache of layer {name} is on {cache.device}: only the CPU is supported in this version")
    size = cache.numel() * cache.element_size()
    begin = cache.storage_offset() * cache.element_size()
    dense = sorted(zip(cache.stride(), cache.shape, strict=True), reverse=True)
    extent, places = 1, []
    for stride, length in reversed(dense):
        places.append(length == 1 or stride == extent)
        extent *= length
    if not all(places) or cache.stride(0) != max(cache.stride()) or size % page_bytes:
        raise Broken(
            f"the KV cache of layer {name} has shape {tuple(cache.shape)} and strides {tuple(cache.stride())}: its "
            f"blocks are not runs of {page_bytes} bytes"
        )
    inside = [length for _, length in dense[1:] if length > 1]
    if heads > 1 and inside[:1] != [heads]:
        raise Broken(
            f"the KV cache of layer {name} has shape {tuple(cache.shape)} and strides {tuple(cache.stride())}: its "
            f"blocks are not {heads} runs, one for each head, as --tensor-parallel-size needs it"
        )
    whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    return whole[begin : begin + size].view(-1, page_bytes)
