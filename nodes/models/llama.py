"""The Llama family over a paged KV cache: one forward pass for the packed rows of many sequences.

Knows nothing of requests, block pools or sampling. Attention, and which KV rows belong to whom, is the plan's
(engines/attention.py). In the last layer only the rows whose logits are wanted go beyond K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdbus.nodes.engines.attention import Attend, KVCache, Plan
from pdbus.nodes.engines.linear import Linear

from .config import ModelConfig
from .rotary import rotary_tables, rotate


@dataclass(frozen=True)
class LayerWeights:
    """What every layer has; H heads over K KV heads of D channels. A linear's comment says what comes out of it."""

    input_norm: Tensor  # [hidden]
    out: Linear  # hidden
    post_norm: Tensor  # [hidden]
    gate: Linear  # ffn; not fused with `up`: halves of rows cost more to multiply than one product saves
    up: Linear  # ffn
    down: Linear  # hidden
    q_norm: Tensor | None  # [D], of every head before it is rotated: Qwen3's
    k_norm: Tensor | None  # [D]


@dataclass(frozen=True)
class BodyLayer(LayerWeights):
    qkv: Linear  # (H + 2K) * D


@dataclass(frozen=True)
class LastLayer(LayerWeights):
    """It computes fewer rows of Q than of K and V."""

    q: Linear  # H * D
    kv: Linear  # 2K * D


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [vocab, hidden], of the type it is stored in
    body: tuple[BodyLayer, ...]
    last: LastLayer
    norm: Tensor  # [hidden], of the type that is computed with
    head: Linear  # vocab


class Llama:
    """Weights and position tables. `max_positions` in tokens: no row may stand further out."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self.weights = weights
        self.max_positions = max_positions
        norm = weights.norm
        self._eps = norm.new_tensor(config.norm_eps, dtype=torch.float32)
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, max_positions, norm)

    def forward(self, tokens: Tensor, positions: Tensor, plan: Plan, cache: KVCache) -> Tensor | None:
        """Write the KV of all rows; return logits [rows of plan.tail, vocab], None when no row wants any.

        `tokens` and `positions` are [T] int64, rows of one sequence next to each other and in order.
        """
        x = self.weights.embed.index_select(0, tokens).to(self.weights.norm.dtype)
        rotation = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, layer in enumerate(self.weights.body):
            x = self._body_layer(index, layer, x, rotation, plan, cache)
        hidden = self._last_layer(x, rotation, plan, cache)
        return None if hidden is None else self.weights.head(self._norm(hidden, self.weights.norm))

    def _body_layer(
        self, index: int, layer: BodyLayer, x: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan, cache: KVCache
    ) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = self._heads(layer.qkv(self._norm(x, layer.input_norm)))
        self._norm_heads(qkv[:, :heads], layer.q_norm)
        self._norm_heads(qkv[:, heads : heads + kv_heads], layer.k_norm)
        rotate(qkv[:, : heads + kv_heads], *rotation)
        cache.write(index, plan.write, qkv[: plan.rows, heads:])
        return self._after_attention(index, layer, x, qkv[:, :heads], qkv[:, heads:], plan.body, cache)

    def _last_layer(self, x: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan, cache: KVCache) -> Tensor | None:
        index, layer = self.config.layers - 1, self.weights.last
        normed = self._norm(x, layer.input_norm)
        kv = self._heads(layer.kv(normed))
        keys = kv[:, : self.config.kv_heads]
        self._norm_heads(keys, layer.k_norm)
        rotate(keys, *rotation)
        cache.write(index, plan.write, kv[: plan.rows])
        if not plan.tail:
            return None
        cos, sin = (table.index_select(0, plan.tail_rows) for table in rotation)
        q = self._heads(layer.q(normed.index_select(0, plan.tail_rows)))
        self._norm_heads(q, layer.q_norm)
        rotate(q, cos, sin)
        return self._after_attention(index, layer, x.index_select(0, plan.tail_rows), q, kv, plan.tail, cache)

    def _after_attention(
        self, index: int, layer: LayerWeights, x: Tensor, q: Tensor, kv: Tensor, attends: Sequence[Attend],
        cache: KVCache,
    ) -> Tensor:  # fmt: skip
        attended = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for attend in attends:
            attend(q, kv, cache, index, attended)
        x = layer.out(attended.flatten(1)).add_(x)
        normed = self._norm(x, layer.post_norm)
        gate = functional.silu(layer.gate(normed), inplace=True)
        return layer.down(gate.mul_(layer.up(normed))).add_(x)

    def _heads(self, rows: Tensor) -> Tensor:
        """[T, n * D] as [T, n, D]."""
        return rows.view(rows.shape[0], -1, self.config.head_dim)

    def _norm_heads(self, heads: Tensor, weight: Tensor | None) -> None:
        """In place, each head of [T, n, D] by itself."""
        if weight is not None:
            heads.copy_(self._norm(heads, weight))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)
