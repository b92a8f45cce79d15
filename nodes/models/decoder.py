"""A decoder over a paged KV cache: one forward pass for the packed rows of many sequences.

Knows nothing of requests, block pools or sampling. Attention's kind is the layer's (grouped.py, latent.py), as is what
follows it (mlp.py); which KV rows belong to whom is the plan's (engines/attention.py). In the last layer only the rows
whose logits are wanted go beyond what the cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdbus.nodes.engines.attention import KVCache, Plan
from pdbus.nodes.engines.linear import Linear

from .config import ModelConfig
from .rotary import rotary_tables
from .step import RmsNorm, Step

# Normed rows [T, hidden] of a layer to what they find, [t, hidden]; writes their KV. The last layer's t are the rows
# whose logits are wanted, and None when there are none; in the others all.
Attention = Callable[[Tensor, Step], Tensor | None]


@dataclass(frozen=True)
class Layer:
    input_norm: RmsNorm
    attention: Attention
    post_norm: RmsNorm
    mlp: Callable[[Tensor], Tensor]  # rows [T, hidden] to [T, hidden]


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [vocab, hidden], of the type it is stored in
    layers: tuple[Layer, ...]
    norm: RmsNorm  # of the type that is computed with
    head: Linear  # vocab


class Decoder:
    """Weights and position tables. `max_positions` in tokens: no row may stand further out."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None:
        self.weights = weights
        self._dtype = weights.norm.weight.dtype
        self._cos, self._sin = rotary_tables(config.rope, config.rotated, max_positions, weights.norm.weight)

    def forward(self, tokens: Tensor, positions: Tensor, plan: Plan, cache: KVCache) -> Tensor | None:
        """Write the KV of all rows; return logits [rows of plan.tail, vocab], None when no row wants any.

        `tokens` and `positions` are [T] int64, rows of one sequence next to each other and in order.
        """
        x = self.weights.embed.index_select(0, tokens).to(self._dtype)
        step = Step(plan, cache, (self._cos.index_select(0, positions), self._sin.index_select(0, positions)))
        for layer in self.weights.layers:
            attended = layer.attention(layer.input_norm(x), step)
            if attended is None:
                return None
            if layer is self.weights.layers[-1]:
                x = x.index_select(0, plan.tail_rows)
            x = attended.add_(x)
            x = layer.mlp(layer.post_norm(x)).add_(x)
        return self.weights.head(self.weights.norm(x))
