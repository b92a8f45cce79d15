"""What all layers of one step share, and the norm that all kinds of layers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdbus.nodes.engines.attention import Attend, KVCache, Plan

Rotation = tuple[Tensor, Tensor]  # cosines and sines of the rows' angles, each [T, 1, rotated channels / 2]


@dataclass(frozen=True)
class Step:
    plan: Plan
    cache: KVCache
    rotation: Rotation

    def tail_rotation(self) -> Rotation:
        """Of the rows whose logits are wanted."""
        cos, sin = (table.index_select(0, self.plan.tail_rows) for table in self.rotation)
        return cos, sin

    def write(self, layer: int, kv: Tensor) -> None:
        """Put the fresh rows [T, parts * K, D] of a layer into the cache."""
        self.cache.write(layer, self.plan.write, kv[: self.plan.rows])

    def attend(self, layer: int, q: Tensor, kv: Tensor, attends: Sequence[Attend]) -> Tensor:
        """What the queries [t, H, D] find, [t, H, D]; `kv` are the fresh rows of all sequences."""
        attended = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for attend in attends:
            attend(q, kv, self.cache, layer, attended)
        return attended


@dataclass(frozen=True)
class RmsNorm:
    """Root mean square norm (Zhang and Sennrich, 2019, arXiv:1910.07467) of the last dimension."""

    weight: Tensor  # [channels]
    eps: Tensor  # a number, float32

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(self.weight)
