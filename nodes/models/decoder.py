"""A decoder over a paged KV cache: one forward pass for the packed rows of many sequences.

Knows nothing of requests, block pools or sampling. Attention's kind is the layer's (grouped.py, latent.py), as is what
follows it (mlp.py); which KV rows belong to whom is the plan's (engines/attention.py). In the last layer only the rows
whose logits are wanted go beyond what the cache holds.

A draft layer (multi-token prediction: DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2) stands behind all others. Of a
position's hidden state and the token that follows there it says the one after that. It needs the hidden states of all
rows, so the model's own last layer computes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pdbus.nodes.engines.attention import KVCache, Plan
from pdbus.nodes.engines.linear import Linear
from pdbus.nodes.engines.stage import Stage

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
    is_last: bool  # what goes on are the rows whose logits are wanted

    def __call__(self, x: Tensor, step: Step) -> Tensor | None:
        attended = self.attention(self.input_norm(x), step)
        if attended is None:
            return None
        x = attended.add_(x.index_select(0, step.plan.tail_rows) if self.is_last else x)
        return self.mlp(self.post_norm(x)).add_(x)


@dataclass(frozen=True)
class DraftLayer:
    token_norm: RmsNorm
    hidden_norm: RmsNorm
    join: Linear  # 2 * hidden to hidden: a token's embedding and the hidden state of the position before
    layer: Layer
    norm: RmsNorm


@dataclass(frozen=True)
class Weights:
    """A stage's: None is what others have."""

    embed: Tensor | None  # [vocab, hidden], of the type it is stored in
    layers: tuple[Layer, ...]  # norms of the type that is computed with
    norm: RmsNorm | None
    head: Linear | None  # vocab
    draft: DraftLayer | None = None


class Computed(NamedTuple):
    """`logits` [rows of plan.tail, vocab], None when no row wants any; `hidden` [T, hidden], all rows before the head,
    if there is a draft layer."""

    logits: Tensor | None
    hidden: Tensor | None = None


class Decoder:
    """Weights and position tables. `max_positions` in tokens: no row may stand further out. One that is a stage of
    several takes rows from the stage before and gives them to the next; the last one has logits."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int, stage: Stage | None = None) -> None:
        self.weights = weights
        self._stage = stage or Stage()
        self._like = weights.layers[0].input_norm.weight  # [hidden]
        self._cos, self._sin = rotary_tables(config.rope, config.rotated, max_positions, self._like)

    def forward(self, tokens: Tensor, positions: Tensor, plan: Plan, cache: KVCache) -> Computed:
        """Write the KV of all rows, but that of the draft layer.

        `tokens` and `positions` are [T] int64, rows of one sequence next to each other and in order.
        """
        return self.forward_in(tokens, positions, [(plan, cache)])

    def forward_in(self, tokens: Tensor, positions: Tensor, places: Sequence[tuple[Plan, KVCache]]) -> Computed:
        """The same where the KV of each layer lies in another place than that of its neighbours: layers take turns
        with `places`, whose plans are of the same spans."""
        stage = self._stage
        x: Tensor | None = self._embedded(tokens) if stage.is_first else stage.take(self._rows(tokens))
        steps = [self._step(positions, plan, cache) for plan, cache in places]
        plan = places[0][0]
        for i, layer in enumerate(self.weights.layers):
            assert x is not None  # only the last layer ends without rows
            x = layer(x, steps[i % len(steps)])
        if x is None:
            return Computed(None)
        if self.weights.norm is None or self.weights.head is None:
            stage.give(x)
            return Computed(None)
        hidden = self.weights.norm(x)
        if self.weights.draft is None:
            return Computed(self.weights.head(hidden))
        wanted = self.weights.head(hidden.index_select(0, plan.tail_rows)) if plan.tail else None
        return Computed(wanted, hidden)

    def draft(self, hidden: Tensor, tokens: Tensor, positions: Tensor, plan: Plan, cache: KVCache) -> Tensor | None:
        """Write the draft layer's KV of all rows; return logits [rows of plan.tail, vocab], None when no row wants any.

        `hidden` [T, hidden] are of `positions`, `tokens` [T] follow there, and logits are of what comes after these.
        """
        draft, head = self.weights.draft, self.weights.head
        assert draft is not None and head is not None
        rows = torch.cat([draft.token_norm(self._embedded(tokens)), draft.hidden_norm(hidden)], -1)
        x = draft.layer(draft.join(rows), self._step(positions, plan, cache))
        return None if x is None else head(draft.norm(x))

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.weights.embed is not None
        return self.weights.embed.index_select(0, tokens).to(self._like)

    def _rows(self, tokens: Tensor) -> Tensor:
        return self._like.new_empty(len(tokens), len(self._like))

    def _step(self, positions: Tensor, plan: Plan, cache: KVCache) -> Step:
        return Step(plan, cache, (self._cos.index_select(0, positions), self._sin.index_select(0, positions)))
