"""Which part of each of a model's matrices a rank holds, and how what the parts give is put together.

Matrices of heads and of feed-forward channels are cut by what comes out of them (OUTPUTS); what goes into out and down
(INPUTS) is then a part, and so is what comes out, which the ranks add. The head is cut by tokens; what its parts give
stands side by side. All else is on every rank: norms, and what makes latents, of which each rank holds all.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from pdbus.connector.layout import heads_of
from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.linear import Linear

from .config import ModelConfig

KV = ("k_proj", "v_proj")
OUTPUTS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
INPUTS = ("o_proj", "down_proj")


class Shards:
    def __init__(self, config: ModelConfig, group: Group) -> None:
        """The ranks can share the model's heads and channels (config.check_ranks)."""
        kv_heads = heads_of(config.kv_heads, group.size, group.rank)
        self._kv = slice(kv_heads[0] * config.head_dim, (kv_heads[-1] + 1) * config.head_dim)
        self._group = group
        self._vocab = config.vocab

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a layer's matrix or bias, in memory of its own."""
        kind = name.split(".")[-2]
        if self._group.size == 1:
            return whole
        if kind in KV:
            return whole[self._kv].clone()
        if kind in OUTPUTS:
            return whole[self._group.share(whole.shape[0])].clone()
        if kind in INPUTS and whole.dim() == 2:
            return whole[:, self._group.share(whole.shape[1])].contiguous()
        return whole.mul(self._group.rank == 0) if kind in INPUTS else whole  # a bias is added once

    def linear(self, name: str, part: Linear) -> Linear:
        """What the whole layer's linear gives, made of this rank's."""
        if self._group.size == 1 or name.split(".")[-2] not in INPUTS:
            return part
        return lambda rows: self._group.add(part(rows))

    def whole(self, part: Tensor) -> Tensor:
        """The sum of what all ranks' parts of a layer gave."""
        return self._group.add(part)

    def head_part(self, whole: Tensor) -> Tensor:
        """An equal number of tokens on every rank: the last ones may be padding."""
        if self._group.size == 1:
            return whole
        padding = -self._vocab % self._group.size
        share = self._group.share(self._vocab + padding)
        mine = whole[share].clone()
        return functional.pad(mine, (0, 0, 0, share.stop - share.start - len(mine)))

    def head(self, part: Linear) -> Linear:
        if self._group.size == 1:
            return part
        return lambda rows: self._group.join(part(rows))[:, : self._vocab]
