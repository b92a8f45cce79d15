"""The Llama family over a paged KV cache: one forward pass for the packed rows of many sequences.

Knows nothing of requests, block pools or sampling. Attention, and which KV rows belong to whom, is the plan's
(engines/attention.py). In the last layer only the rows whose logits are wanted go beyond K and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdbus.nodes.engines.attention import Attend, KVCache, Plan

from .config import ModelConfig, RopeConfig

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows [T, in], weight [out, in], bias [out]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; H heads over K KV heads of D channels."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2K) * D, hidden]
    qkv_bias: Tensor | None  # [(H + 2K) * D]
    out: Tensor  # [hidden, H * D]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * ffn, hidden]
    down: Tensor  # [hidden, ffn]


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    def matrices(self, config: ModelConfig) -> list[Tensor]:
        """One of each shape that a forward pass multiplies with."""
        first, queries = self.layers[0], config.heads * config.head_dim
        return [first.qkv, first.qkv[:queries], first.qkv[queries:], first.out, first.gate_up, first.down, self.head]


class Llama:
    """Weights and position tables. `max_positions` in tokens: no row may stand further out."""

    def __init__(
        self, config: ModelConfig, weights: Weights, max_positions: int, linear: Linear = functional.linear
    ) -> None:
        self.config = config
        self.weights = weights
        self.max_positions = max_positions
        self._linear = linear
        self._q_channels = config.heads * config.head_dim
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(config.rope, config.head_dim))
        angles = angles[:, None, :].to(device=weights.embed.device, dtype=torch.float32)
        self._cos, self._sin = angles.cos().to(weights.embed.dtype), angles.sin().to(weights.embed.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, plan: Plan, cache: KVCache) -> Tensor | None:
        """Write the KV of all rows; return logits [rows of plan.tail, vocab], None when no row wants any.

        `tokens` and `positions` are [T] int64, rows of one sequence next to each other and in order.
        """
        x = self.weights.embed.index_select(0, tokens)
        rotation = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, layer in enumerate(self.weights.layers[:-1]):
            x = self._layer(index, layer, x, rotation, plan, cache)
        hidden = self._last_layer(x, rotation, plan, cache)
        if hidden is None:
            return None
        return self._linear(self._norm(hidden, self.weights.norm), self.weights.head, None)

    def _layer(
        self, index: int, layer: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan, cache: KVCache
    ) -> Tensor:
        qkv = self._linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), -1, self.config.head_dim)
        heads, kv_heads = self.config.heads, self.config.kv_heads
        _rotate(qkv[:, : heads + kv_heads], *rotation)
        cache.write(index, plan.write, qkv[: plan.rows, heads:])
        return self._after_attention(index, layer, x, qkv[:, :heads], qkv[:, heads:], plan.body, cache)

    def _last_layer(self, x: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan, cache: KVCache) -> Tensor | None:
        index, layer, split = self.config.layers - 1, self.weights.layers[-1], self._q_channels
        normed = self._norm(x, layer.input_norm)
        bias = layer.qkv_bias
        kv = self._linear(normed, layer.qkv[split:], None if bias is None else bias[split:])
        kv = kv.view(len(x), -1, self.config.head_dim)
        _rotate(kv[:, : self.config.kv_heads], *rotation)
        cache.write(index, plan.write, kv[: plan.rows])
        if not plan.tail:
            return None
        cos, sin = (table.index_select(0, plan.tail_rows) for table in rotation)
        normed = normed.index_select(0, plan.tail_rows)
        q = self._linear(normed, layer.qkv[:split], None if bias is None else bias[:split])
        q = q.view(len(normed), -1, self.config.head_dim)
        _rotate(q, cos, sin)
        return self._after_attention(index, layer, x.index_select(0, plan.tail_rows), q, kv, plan.tail, cache)

    def _after_attention(
        self, index: int, layer: LayerWeights, x: Tensor, q: Tensor, kv: Tensor, attends: Sequence[Attend],
        cache: KVCache,
    ) -> Tensor:  # fmt: skip
        attended = x.new_zeros(q.shape)
        for attend in attends:
            attend(q, kv, cache, index, attended)
        x = x + self._linear(attended.view(len(x), -1), layer.out, None)
        gate_up = self._linear(self._norm(x, layer.post_norm), layer.gate_up, None)
        # Strided halves: the vector loop runs over each row by itself, so a row's tail never depends on its neighbours.
        gate, up = gate_up[:, : self.config.ffn], gate_up[:, self.config.ffn :]
        return x + self._linear(functional.silu(gate).mul_(up), layer.down, None)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return (wide * scale).to(x.dtype) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary encoding in place: heads [T, n, D] by the angles of [T, 1, D/2]."""
    first, second = heads.chunk(2, -1)
    turned = first * sin
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(turned)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, scaled as the configuration says (the llama3 rule: Llama 3.1's rope scaling)."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    turns = rope.original_positions * frequencies / (2 * math.pi)  # within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
