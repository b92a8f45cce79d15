"""Attention of H query heads over K KV heads of D channels, as the Llama family has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdbus.nodes.engines.linear import Linear

from .rotary import rotate
from .step import RmsNorm, Step


@dataclass(frozen=True)
class _Grouped:
    """A linear's comment says what comes out of it."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    out: Linear  # hidden
    q_norm: RmsNorm | None  # of every head before it is rotated: Qwen3's
    k_norm: RmsNorm | None

    def _split(self, rows: Tensor) -> Tensor:
        """[T, n * D] as [T, n, D]."""
        return rows.view(rows.shape[0], -1, self.head_dim)


@dataclass(frozen=True)
class GroupedAttention(_Grouped):
    qkv: Linear  # (H + 2K) * D

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        turned = self.heads + self.kv_heads
        qkv = self._split(self.qkv(x))
        _norm_heads(qkv[:, : self.heads], self.q_norm)
        _norm_heads(qkv[:, self.heads : turned], self.k_norm)
        rotate(qkv[:, :turned], *step.rotation)
        q, kv = qkv[:, : self.heads], qkv[:, self.heads :]
        step.write(self.layer, kv)
        return self.out(step.attend(self.layer, q, kv, step.plan.body).flatten(1))


@dataclass(frozen=True)
class LastGroupedAttention(_Grouped):
    """It computes fewer rows of Q than of K and V."""

    q: Linear  # H * D
    kv: Linear  # 2K * D

    def __call__(self, x: Tensor, step: Step) -> Tensor | None:
        kv = self._split(self.kv(x))
        keys = kv[:, : self.kv_heads]
        _norm_heads(keys, self.k_norm)
        rotate(keys, *step.rotation)
        step.write(self.layer, kv)
        if not step.plan.tail:
            return None
        q = self._split(self.q(x.index_select(0, step.plan.tail_rows)))
        _norm_heads(q, self.q_norm)
        rotate(q, *step.tail_rotation())
        return self.out(step.attend(self.layer, q, kv, step.plan.tail).flatten(1))


def _norm_heads(heads: Tensor, norm: RmsNorm | None) -> None:
    """In place, each head of [T, n, D] by itself."""
    if norm is not None:
        heads.copy_(norm(heads))
