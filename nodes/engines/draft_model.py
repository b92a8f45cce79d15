"""A small model of the same vocabulary that drafts: token after token what it thinks likeliest.

It computes every position that the model computes, in the same step, so that its KV is as old as the model's: of a
prompt, which a prefill node hands over with the rest, and of an answer. It stands in the same blocks, in layers of
their own (models/draft_model.py says where).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from pdbus.bus.messages import KVLayout
from pdbus.nodes.models.config import ModelConfig
from pdbus.nodes.models.decoder import Decoder
from pdbus.nodes.models.draft_model import DraftFit

from .attention import KVCache, Plan, Span, pack_order

Planner = Callable[[Sequence[Span], KVCache], Plan]
Packer: TypeAlias = "Callable[[Sequence[array[int]]], Tensor]"  # token ids or positions of spans to a padded tensor


class DraftCache(KVCache):
    """The KV of every `together`-th layer of a draft model, from number `place` on, in a model's cache."""

    def __init__(
        self, memory: Tensor, layout: KVLayout, draft: ModelConfig, fit: DraftFit, first_layer: int, place: int
    ) -> None:
        """`memory` as of KVCache. The draft model's layers begin in layer `first_layer` of the cache."""
        wide = memory.element_size() * draft.head_dim
        self.blocks, self.parts = layout.blocks, draft.kv_parts
        self._block_size, self._head_dim = layout.block_size, draft.head_dim
        self._block_rows, self._slot_rows = layout.block_stride // wide, layout.slot_stride // wide
        rows = memory.view(-1, draft.head_dim)
        self._read = rows.new_empty(0, draft.head_dim)
        starts = [start // wide for start in layout.starts[first_layer:]]
        self._layers = [rows[starts[i // fit.together * fit.apart] :] for i in range(draft.layers)]
        cells = np.arange(fit.taken, dtype=np.int64) + place * fit.taken
        layers, cells = cells // fit.cells, cells % fit.cells
        each = layout.head_dim // draft.head_dim  # cells of a head of the model
        heads, parts = cells // each % len(layout.heads), cells // each // len(layout.heads)
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        self._head_rows = (
            layers * step + parts * (layout.part_stride // wide) + heads * (layout.head_stride // wide) + cells % each
        )


class DraftModel:
    """`plan` and `pack` are the engine's ways to plan spans and to put their numbers into one tensor."""

    def __init__(self, config: ModelConfig, fit: DraftFit, decoder: Decoder, vocab: int, first_layer: int) -> None:
        """`vocab`: the model's, in which drafts are."""
        self._config, self._fit, self._decoder = config, fit, decoder
        self._vocab, self._first_layer = vocab, first_layer

    def caches(self, memory: Tensor, layout: KVLayout) -> tuple[DraftCache, ...]:
        """Over the whole cache's memory: what each of the layers that lie together has of it."""
        places = range(min(self._fit.together, self._config.layers))
        return tuple(DraftCache(memory, layout, self._config, self._fit, self._first_layer, place) for place in places)

    def forward(
        self, known: Sequence[array[int]], spans: Sequence[Span], caches: Sequence[DraftCache], plan: Planner,
        pack: Packer,
    ) -> Tensor | None:  # fmt: skip
        """Write its KV of the packed spans; logits [wanted rows, vocab], None when none is wanted.

        `known`: the token ids of each one's sequence. Ids that only the model has count as the draft model's last.
        """
        tokens = pack([ids[p.start : p.end] for ids, p in zip(known, spans, strict=True)])
        positions = pack([array("q", range(p.start, p.end)) for p in spans])
        places = [(plan(spans, cache), cache) for cache in caches]
        logits = self._decoder.forward_in(tokens.clamp(max=self._config.vocab - 1), positions, places).logits
        return None if logits is None else logits[: sum(span.wanted for span in spans), : self._vocab]

    def guess(
        self, known: Sequence[array[int]], spans: Sequence[Span], most: Sequence[int], caches: Sequence[DraftCache],
        plan: Planner, pack: Packer,
    ) -> list[array[int]]:  # fmt: skip
        """Follow the packed spans; so many drafts for each."""
        drafts = [array("q") for _ in spans]
        going = [i for i, count in enumerate(most) if count > 0]
        asked = [Span(s.start, s.count, s.blocks, int(n > 0)) for s, n in zip(spans, most, strict=True)]
        logits = self.forward(known, asked, caches, plan, pack)
        while logits is not None:
            for i, token in zip(going, logits.argmax(-1).tolist(), strict=True):
                drafts[i].append(token)
            going = [i for i in going if len(drafts[i]) < most[i]]
            if not going:
                break
            asked = [Span(spans[i].end - 1 + len(drafts[i]), 1, spans[i].blocks, 1) for i in going]
            order = pack_order(asked)
            going, asked = [going[at] for at in order], [asked[at] for at in order]
            logits = self.forward([known[i] + drafts[i] for i in going], asked, caches, plan, pack)
        return drafts
