"""Multi-head latent attention: DeepSeek's (2024, arXiv:2405.04434), with the latents as they are in the cache.

A head's key is Wk l | k and its value Wv l, of a latent l and a rotated key k that all heads share. So that neither
is ever made, Wk goes to the query's side and Wv behind the sum: (Wk' q | r) . (l | k), then Wv sum(l). What is left is
attention of H heads over one KV head, whose rows are both its keys and its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pdbus.nodes.engines.linear import Linear

from .deepseek import LatentConfig
from .rotary import rotate
from .step import RmsNorm, Rotation, Step


@dataclass(frozen=True)
class Compressed:
    """A linear through a latent of its own."""

    down: Linear
    norm: RmsNorm
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)))


@dataclass(frozen=True)
class LatentAttention:
    """A linear's comment says what comes out of it."""

    layer: int
    heads: int
    sizes: LatentConfig
    scale: float  # of the scores
    is_last: bool  # only the rows whose logits are wanted go on
    q: Linear  # H * (nope + rope)
    kv: Linear  # rank + rope
    kv_norm: RmsNorm
    into_latent: Linear  # H * nope to H * rank
    from_latent: Linear  # H * rank to H * value
    out: Linear  # hidden

    def __call__(self, x: Tensor, step: Step) -> Tensor | None:
        latents = self._latents(x, step.rotation)
        step.write(self.layer, latents)
        attends, rotation = step.plan.body, step.rotation
        if self.is_last:
            attends = step.plan.tail
            if not attends:
                return None
            x, rotation = x.index_select(0, step.plan.tail_rows), step.tail_rotation()
        attended = step.attend(self.layer, self._queries(x, rotation), latents, attends)
        return self.out(self.from_latent(attended[..., : self.sizes.rank].flatten(1)))

    def _latents(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, 1, rank + rope]"""
        rows, rank = self.kv(x)[:, None], self.sizes.rank
        rows[..., :rank] = self.kv_norm(rows[..., :rank])
        rotate(rows[..., rank:], *rotation)
        return rows

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, H, rank + rope], scaled so that what attention itself divides by is no matter."""
        rank, nope, rope = self.sizes.rank, self.sizes.nope, self.sizes.rope
        heads = self.q(x).view(x.shape[0], self.heads, nope + rope)
        q = heads.new_empty(*heads.shape[:2], rank + rope)
        q[..., :rank] = self.into_latent(heads[..., :nope].flatten(1)).view(*heads.shape[:2], rank)
        q[..., rank:] = heads[..., nope:]
        rotate(q[..., rank:], *rotation)
        return q.mul_(self.scale * math.sqrt(rank + rope))
