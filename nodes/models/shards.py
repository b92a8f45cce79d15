"""Which part of each of a model's matrices a rank holds, and how what the parts give is put together.

Q, K, V, gate and up are cut by what comes out of them: heads and channels. What goes into out and down is then a part,
and so is what comes out, which the ranks add. The head is cut by tokens; what its parts give stands side by side.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from pdbus.connector.layout import heads_of
from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.linear import Linear

from .config import ModelConfig


class Shards:
    def __init__(self, config: ModelConfig, group: Group) -> None:
        """The ranks can share the model's heads and channels (config.check_ranks)."""
        kv_heads = heads_of(config.kv_heads, group.size, group.rank)
        channels = config.head_dim
        q = group.share(config.heads)
        self._group = group
        self._vocab = config.vocab
        self._outputs = {
            "q_proj": slice(q.start * channels, q.stop * channels),
            "k_proj": slice(kv_heads[0] * channels, (kv_heads[-1] + 1) * channels),
            "gate_proj": group.share(config.ffn),
        }
        self._outputs |= {"v_proj": self._outputs["k_proj"], "up_proj": self._outputs["gate_proj"]}
        self._inputs = {"o_proj": self._outputs["q_proj"], "down_proj": self._outputs["gate_proj"]}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a layer's matrix or bias, in memory of its own."""
        kind = name.split(".")[-2]
        if self._group.size == 1:
            return whole
        if kind in self._outputs:
            return whole[self._outputs[kind]].clone()
        return whole[:, self._inputs[kind]].contiguous()

    def linear(self, name: str, part: Linear) -> Linear:
        """What the whole layer's linear gives, made of this rank's."""
        if self._group.size == 1 or name.split(".")[-2] not in self._inputs:
            return part
        return lambda rows: self._group.add(part(rows))

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
