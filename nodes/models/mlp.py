"""What follows attention in a layer: a gated feed-forward layer, or a mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdbus.nodes.engines.linear import Linear

from .deepseek import TOP_PER_GROUP, ExpertsConfig

NO_WEIGHT = 1e-20  # added to a sum that could be 0


@dataclass(frozen=True)
class GatedMlp:
    gate: Linear  # ffn; not fused with `up`: halves of rows cost more to multiply than one product saves
    up: Linear  # ffn
    down: Linear  # hidden

    def __call__(self, x: Tensor) -> Tensor:
        gate = functional.silu(self.gate(x), inplace=True)
        return self.down(gate.mul_(self.up(x)))


@dataclass(frozen=True)
class Router:
    config: ExpertsConfig
    gate: Linear  # count; in float32, for near scores decide
    bias: Tensor | None  # [count] float32

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row and their weights in float32, both [T, chosen]."""
        c, logits = self.config, self.gate(x.float())
        scores = logits.sigmoid() if c.sigmoid else logits.softmax(-1)
        ranking = scores if self.bias is None else scores + self.bias
        if c.groups_chosen < c.groups:
            ranking = self._in_best_groups(ranking)
        chosen = ranking.topk(c.chosen).indices
        weights = scores.gather(1, chosen)
        if c.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + NO_WEIGHT)
        return chosen, weights * c.scale

    def _in_best_groups(self, ranking: Tensor) -> Tensor:
        c = self.config
        grouped = ranking.view(ranking.shape[0], c.groups, -1)
        judged = grouped.topk(TOP_PER_GROUP).values.sum(-1) if c.sigmoid else grouped.amax(-1)
        worse = torch.ones_like(judged, dtype=torch.bool).scatter_(1, judged.topk(c.groups_chosen).indices, False)
        return grouped.masked_fill(worse[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True)
class Experts:
    """Each row through the experts that are chosen for it, and through the shared ones.

    The experts add to a row in order of their numbers, whatever its neighbours chose.
    """

    router: Router
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp
    whole: Callable[[Tensor], Tensor]  # makes the layer's sum of this rank's part of it
    pad_to: int  # an expert computes a multiple of so many rows

    def __call__(self, x: Tensor) -> Tensor:
        chosen, weights = self.router(x)
        total, places = self.shared(x), chosen.flatten()
        order = places.argsort(stable=True)
        counts = places.bincount(minlength=len(self.experts)).tolist()
        for expert, mine in zip(self.experts, torch.split(order, counts), strict=True):
            if len(mine):
                rows = mine // chosen.shape[1]
                given = self._computed(expert, x.index_select(0, rows))
                total.index_add_(0, rows, (given * weights.flatten()[mine, None]).to(total.dtype))
        return self.whole(total)

    def _computed(self, expert: GatedMlp, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        return expert(functional.pad(rows, (0, 0, 0, -count % self.pad_to)))[:count]
