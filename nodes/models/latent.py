"""Multi-head latent attention: DeepSeek's (2024, arXiv:2405.04434), with the latents as they are in the cache.

A head's key is Wk l | k and its value Wv l, of a latent l and a rotated key k that all heads share. There are two ways:

absorbed   Neither is made: Wk goes to the query's side and Wv behind the sum, (Wk' q | r) . (l | k), then Wv sum(l).
           What is left is attention of H heads over one KV head, whose rows are both its keys and its values: little to
           read, but wide. So it is for decoding, and for all rows of a step whose bits must not depend on its others.
expanded   Keys and values of all heads are made, for one sequence at a time: as much work for each key as the other way
           for each query, but narrower rows. So it is where a chunk's queries are many for its keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pdbus.nodes.engines.attention import Attend, FreshAttend, PrefixAttend
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
    expand: Linear  # rank to H * (nope + value)
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
        q = self.q(x).view(x.shape[0], self.heads, -1)
        rotate(q[..., self.sizes.nope :], *rotation)
        return self.out(self._attended(q, latents, step, attends))

    def _latents(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, 1, rank + rope]"""
        rows, rank = self.kv(x)[:, None], self.sizes.rank
        rows[..., :rank] = self.kv_norm(rows[..., :rank])
        rotate(rows[..., rank:], *rotation)
        return rows

    def _attended(self, q: Tensor, latents: Tensor, step: Step, attends: Sequence[Attend]) -> Tensor:
        """[t, H * value]"""
        absorbed, expanded = list[Attend](), list[tuple[slice, Tensor]]()
        for attend in attends:
            if isinstance(attend, FreshAttend):
                expanded.append((attend.at, self._expanded(q[attend.at], latents[attend.at, 0], None)))
            elif isinstance(attend, PrefixAttend) and self._expanding_pays(*attend.mask.shape):
                keys = step.cache.read(self.layer, attend.keys)[0, 0]
                expanded.append((attend.at, self._expanded(q[attend.at], keys, attend.mask)))
            else:
                absorbed.append(attend)
        if len(expanded) == 1 and not absorbed:
            return expanded[0][1]
        found = self._absorbed(q, latents, step, absorbed)
        for at, rows in expanded:
            found[at] = rows
        return found

    def _absorbed(self, q: Tensor, latents: Tensor, step: Step, attends: Sequence[Attend]) -> Tensor:
        """[t, H * value], 0 for rows that are none of `attends`'."""
        rank, nope, rope = self.sizes.rank, self.sizes.nope, self.sizes.rope
        wide = q.new_empty(*q.shape[:2], rank + rope)
        wide[..., :rank] = self.into_latent(q[..., :nope].flatten(1)).view(*q.shape[:2], rank)
        wide[..., rank:] = q[..., nope:]
        wide.mul_(self.scale * math.sqrt(rank + rope))  # attention itself divides by the root
        attended = step.attend(self.layer, wide, latents, attends)
        return self.from_latent(attended[..., :rank].flatten(1))

    def _expanded(self, q: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        """[n, H * value] for n queries of one sequence over its latents [S, rank + rope]; without a mask S is n.

        Keys, values and queries are of one width, which fused attention wants.
        """
        rank, nope, rope, value = self.sizes.rank, self.sizes.nope, self.sizes.rope, self.sizes.value
        made = self.expand(latents[:, :rank]).view(latents.shape[0], self.heads, nope + value)
        k, v = made.new_zeros(2, *made.shape[:2], self._width)
        k[..., :nope] = made[..., :nope]
        k[..., nope : nope + rope] = latents[:, None, rank:]
        v[..., :value] = made[..., nope:]
        queries = functional.pad(q, (0, self._width - q.shape[-1]))
        rows, keys, values = (heads.transpose(0, 1)[None] for heads in (queries, k, v))
        attended = functional.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return attended[0, ..., :value].transpose(0, 1).flatten(1)

    def _expanding_pays(self, queries: int, keys: int) -> bool:
        """In multiplications: of what is made of each key or else of each query, and of their products."""
        sizes = self.sizes
        made = sizes.rank * (sizes.nope + sizes.value)
        saved = 2 * (sizes.rank + sizes.rope - self._width)
        return keys * made < queries * (made + keys * saved)

    @property
    def _width(self) -> int:
        return max(self.sizes.nope + self.sizes.rope, self.sizes.value)
