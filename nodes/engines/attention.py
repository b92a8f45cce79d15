"""Attention over KV rows that lie in blocks, and the plan that says which rows belong to whom.

The slab is seen as rows of D channels. In every layout of whole rows (connector/layout.py) the rows of a sequence have
the same numbers in every layer but for an offset: they are computed once per step. Reading them is one index_select,
writing one index_copy_.

A row of a latent cache is both key and value: K and V are the first and the last part of what is read, or the only one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pdbus.bus.messages import KVLayout
from pdbus.connector.layout import row_bytes

Ids = NDArray[np.int64]
SHORT_KEYS = 256  # sequences up to here are attended in one batch; longer ones by themselves, for padding costs more
QUERY_TILE = 16  # deterministic attention: tokens per tile of queries; divides KEY_TILE
KEY_TILE = 256


class KVCache:
    """A KV slab in any layout with K before V, or of latents alone, seen as rows of channels."""

    def __init__(self, memory: Tensor, layout: KVLayout) -> None:
        """`memory` is one-dimensional, of the layout's dtype, as many elements as its region holds."""
        row = row_bytes(layout)
        self.blocks, self.parts = layout.blocks, len(layout.parts)
        self._block_size, self._head_dim = layout.block_size, layout.head_dim
        self._block_rows, self._slot_rows = layout.block_stride // row, layout.slot_stride // row
        rows = memory.view(-1, layout.head_dim)
        self._layers = [rows[start // row :] for start in layout.starts]
        self._read = rows.new_empty(0, layout.head_dim)
        heads = np.arange(len(layout.heads), dtype=np.int64) * (layout.head_stride // row)
        parts = [heads + part * (layout.part_stride // row) for part in range(self.parts)]
        self._head_rows: Ids = np.concatenate(parts)

    def like(self, values: Tensor) -> Tensor:
        """`values` on the cache's device, of its type."""
        return values.to(self._read)

    def rows(self, blocks: Ids, positions: Ids) -> Ids:
        """Row numbers within layer 0: [len(positions), P * K] for P parts of K heads, K's before V's."""
        size = self._block_size
        slots = blocks[positions // size] * self._block_rows + positions % size * self._slot_rows
        return slots[:, None] + self._head_rows

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Put kv [T, P * K, D] into `rows` [T, P * K]."""
        self._layers[layer][rows] = kv

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """The rows of `rows` [...] as [..., D]; they lie in one reused place, until the next read."""
        if self._read.shape[0] < rows.numel():
            self._read = self._read.new_empty(rows.numel(), self._head_dim)
        into = self._read[: rows.numel()]
        torch.index_select(self._layers[layer], 0, rows.view(-1), out=into)
        return into.view(*rows.shape, self._head_dim)


@dataclass(frozen=True)
class Span:
    """Positions `start` to `start + count` of one sequence are computed; its block table; of how many of the last
    positions the logits are wanted."""

    start: int
    count: int
    blocks: Ids
    wanted: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count


# q [T, H, D], fresh kv [T, P * K, D], cache, layer, out [T, H, D]: each attend fills its own rows of `out`
Attend = Callable[[Tensor, Tensor, KVCache, int, Tensor], None]


@dataclass(frozen=True)
class Plan:
    """What one step reads and writes. `rows` counts real rows: padding, if any, comes after them.

    `tail_rows` are the packed rows whose logits are wanted (and padding), `tail` their attention in the last layer.
    """

    rows: int
    write: Tensor  # [rows, P * K]
    body: tuple[Attend, ...]
    tail: tuple[Attend, ...]
    tail_rows: Tensor


@dataclass(frozen=True)
class FreshAttend:
    """A sequence from its first position: all its keys are rows of this very step."""

    at: slice

    def __call__(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, out: Tensor) -> None:
        mine = kv[self.at]
        parts = mine.view(mine.shape[0], cache.parts, -1, mine.shape[-1]).permute(1, 2, 0, 3)
        k, v = parts[0], parts[-1]
        attended = functional.scaled_dot_product_attention(
            q[self.at].transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        out[self.at] = attended[0].transpose(0, 1)


@dataclass(frozen=True)
class PrefixAttend:
    """Several rows of one sequence that has earlier ones. `keys` [P, K, S], `mask` [n, S], 0 where visible."""

    at: slice
    keys: Tensor
    mask: Tensor

    def __call__(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, out: Tensor) -> None:
        parts = cache.read(layer, self.keys)
        k, v = parts[0], parts[-1]
        attended = functional.scaled_dot_product_attention(
            q[self.at].transpose(0, 1)[None], k[None], v[None], attn_mask=self.mask, enable_gqa=True
        )
        out[self.at] = attended[0].transpose(0, 1)


@dataclass(frozen=True)
class DecodeAttend:
    """One row each of N sequences. `keys` [P, N, K, S], `mask` [N, 1, 1, S], 0 where visible, or None when all are.

    The query heads that share a KV head are its rows: no repeated keys, no causal mask.
    """

    at: slice
    keys: Tensor
    mask: Tensor | None

    def __call__(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, out: Tensor) -> None:
        parts = cache.read(layer, self.keys)
        k, v = parts[0], parts[-1]
        n, kv_heads, _, channels = k.shape
        grouped = q[self.at].view(n, kv_heads, -1, channels)
        attended = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask)
        out[self.at] = attended.view(n, -1, channels)


@dataclass(frozen=True)
class TiledAttend:
    """Batch-invariant: what a row gets depends on its own position and prefix alone, bit for bit.

    Queries are taken in tiles aligned to absolute positions, keys in tiles likewise, by an online softmax. So the row
    of position p is always the same row of products of the same shapes, whatever else is in the step and
    however the prompt was cut into chunks. Masked keys weigh exactly nothing; their rows repeat the last real key, so
    that no stale byte of the slab is read.
    """

    at: slice
    start: int
    keys: Tensor  # [tiles, P, K, KEY_TILE]
    masks: Tensor  # [KEY_TILE / QUERY_TILE, QUERY_TILE, KEY_TILE], true where hidden

    def __call__(self, q: Tensor, kv: Tensor, cache: KVCache, layer: int, out: Tensor) -> None:
        mine, result = q[self.at], out[self.at]
        end = self.start + mine.shape[0]
        tiles = cache.read(layer, self.keys).unbind()
        for first in range(self.start - self.start % QUERY_TILE, end, QUERY_TILE):
            low, high = max(first, self.start), min(first + QUERY_TILE, end)
            queries = mine.new_zeros(QUERY_TILE, *mine.shape[1:])
            queries[low - first : high - first] = mine[low - self.start : high - self.start]
            attended = self._query_tile(queries, first, tiles[: first // KEY_TILE + 1])
            result[low - self.start : high - self.start] = attended[low - first : high - first]

    def _query_tile(self, queries: Tensor, first: int, tiles: Sequence[Tensor]) -> Tensor:
        """Queries [QUERY_TILE, H, D] at positions from `first` over all key tiles up to their own."""
        kv_heads, channels = tiles[0].shape[1], queries.shape[-1]
        rows = queries.view(QUERY_TILE, kv_heads, -1, channels).permute(1, 2, 0, 3)
        grouped = rows.reshape(kv_heads, -1, channels) * channels**-0.5
        best = grouped.new_full((*grouped.shape[:2], 1), -torch.inf)
        total, summed = torch.zeros_like(best), torch.zeros_like(grouped)
        for index, tile in enumerate(tiles):
            scores = torch.bmm(grouped, tile[0].mT)
            if index == len(tiles) - 1:
                hidden = self.masks[first % KEY_TILE // QUERY_TILE]
                scores.view(kv_heads, -1, QUERY_TILE, KEY_TILE).masked_fill_(hidden, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, decay = torch.exp(scores - new_best), torch.exp(best - new_best)
            total = total * decay + weights.sum(-1, keepdim=True)
            summed = summed * decay + torch.bmm(weights, tile[-1])
            best = new_best
        attended = (summed / total).view(kv_heads, -1, QUERY_TILE, channels)
        return attended.permute(2, 0, 1, 3).reshape(queries.shape)


def pack_order(spans: Sequence[Span]) -> list[int]:
    """The order in which a step's spans are packed: those that share one batched attend come first."""
    return sorted(range(len(spans)), key=lambda i: not _is_short(spans[i]))


def _is_short(span: Span) -> bool:
    return span.count == 1 and span.end <= SHORT_KEYS


def make_plan(spans: Sequence[Span], cache: KVCache, device: torch.device, *, tiled: bool, pad_to: int = 1) -> Plan:
    """The plan for spans in packed order. `tiled` is the batch-invariant attention; `tail_rows` pad to `pad_to`."""
    ends = np.cumsum([span.count for span in spans])
    starts = ends - [span.count for span in spans]
    written = [cache.rows(span.blocks, np.arange(span.start, span.end)) for span in spans]
    lasts = [Span(s.end - s.wanted, s.wanted, s.blocks) for s in spans if s.wanted]
    tails = np.cumsum([0, *(span.count for span in lasts)])
    tail_rows = np.concatenate(
        [np.arange(end - span.wanted, end) for span, end in zip(spans, ends.tolist(), strict=True)]
    )
    tail_rows = np.pad(tail_rows, (0, -len(tail_rows) % pad_to))
    attends = _tiled if tiled else _attends
    return Plan(
        rows=int(ends[-1]),
        write=torch.from_numpy(np.concatenate(written)).to(device),
        body=attends(spans, starts, cache, device),
        tail=attends(lasts, tails[:-1], cache, device),
        tail_rows=torch.from_numpy(tail_rows).to(device),
    )


def _attends(spans: Sequence[Span], starts: Ids, cache: KVCache, device: torch.device) -> tuple[Attend, ...]:
    attends: list[Attend] = []
    placed = zip(spans, starts.tolist(), strict=True)
    for short, group in groupby(placed, key=lambda pair: _is_short(pair[0])):
        members = list(group)
        if short:
            attends.append(_decode([span for span, _ in members], members[0][1], cache, device))
        else:
            attends.extend(_attend(span, start, cache, device) for span, start in members)
    return tuple(attends)


def _attend(span: Span, start: int, cache: KVCache, device: torch.device) -> Attend:
    if span.count == 1:
        return _decode([span], start, cache, device)
    at = slice(start, start + span.count)
    return FreshAttend(at) if span.start == 0 else _prefix(span, at, cache, device)


def _decode(spans: Sequence[Span], start: int, cache: KVCache, device: torch.device) -> DecodeAttend:
    keys = [span.end for span in spans]
    longest = max(keys)
    # Shorter sequences repeat their last key: a row that was never written may hold NaN, which no mask removes.
    padded = [cache.rows(span.blocks, np.minimum(np.arange(longest), span.end - 1)) for span in spans]
    rows = np.stack(padded).reshape(len(spans), longest, cache.parts, -1).transpose(2, 0, 3, 1)
    mask = None
    if min(keys) < longest:
        mask = _mask(np.arange(longest) < np.array(keys)[:, None], cache)[:, None, None]
    return DecodeAttend(slice(start, start + len(spans)), _on(rows, device), mask)


def _prefix(span: Span, at: slice, cache: KVCache, device: torch.device) -> PrefixAttend:
    rows = cache.rows(span.blocks, np.arange(span.end)).reshape(span.end, cache.parts, -1).transpose(1, 2, 0)
    mask = _mask(np.arange(span.end) <= np.arange(span.start, span.end)[:, None], cache)
    return PrefixAttend(at, _on(rows, device), mask)


def _tiled(spans: Sequence[Span], starts: Ids, cache: KVCache, device: torch.device) -> tuple[Attend, ...]:
    queries = torch.arange(KEY_TILE, device=device).view(-1, QUERY_TILE, 1)
    masks = torch.arange(KEY_TILE, device=device) > queries
    return tuple(
        TiledAttend(slice(int(at), int(at) + span.count), span.start, _key_tiles(span, cache, device), masks)
        for span, at in zip(spans, starts, strict=True)
    )


def _key_tiles(span: Span, cache: KVCache, device: torch.device) -> Tensor:
    tiles = -(-span.end // KEY_TILE)
    rows = cache.rows(span.blocks, np.minimum(np.arange(tiles * KEY_TILE), span.end - 1))
    return _on(rows.reshape(tiles, KEY_TILE, cache.parts, -1).transpose(0, 2, 3, 1), device)


def _mask(visible: NDArray[np.bool_], cache: KVCache) -> Tensor:
    """To add to scores. Made once a step, while one of booleans would be turned into this in every layer."""
    return cache.like(torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))))


def _on(rows: Ids, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)
