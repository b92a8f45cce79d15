"""Digests of KV that do not depend on how it lies: 8 bytes for each block of tokens and each layer.

A digest is the exclusive or, over parts (K, V) and heads, of the xxh3_64 of the rows of the block's tokens in order,
with the seed 2 * head + part. So ranks that hold some of the heads each, in blocks of any size and in any order, come
to the same, once theirs are joined by exclusive or.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import unpack_u32
from pdbus.connector.ipc import StepRow

from .kv_view import on_host, view_of


@dataclass
class _Wanted:
    """A prompt whose blocks are digested as they fill: from token `next`, the rest has been."""

    next: int
    tokens: int
    table: list[int] = field(default_factory=list)


class KvDigests:
    """Over one rank's memory. It follows the block tables of sequences whose digests are wanted."""

    def __init__(self, memory: Any, layout: KVLayout) -> None:
        self._layout = layout
        self._view = view_of(memory, layout)
        self._wanted: dict[int, _Wanted] = {}

    def open(self, seq: int, begin: int, tokens: int) -> None:
        self._wanted[seq] = _Wanted(begin, tokens)

    def close(self, seq: int) -> None:
        self._wanted.pop(seq, None)

    def stepped(self, rows: Iterable[StepRow]) -> dict[int, bytes]:
        """By sequence, the digests of what these rows have filled: whole blocks, and the partial last one at the end
        of the prompt."""
        return {row.seq: self._filled(row, self._wanted[row.seq]) for row in rows if row.seq in self._wanted}

    def _filled(self, row: StepRow, wanted: _Wanted) -> bytes:
        if row.reset:
            wanted.table.clear()
        wanted.table += unpack_u32(row.new_blocks)
        size, end = self._layout.block_size, min(row.start + row.count, wanted.tokens)
        end -= end % size if end < wanted.tokens else 0
        if end <= wanted.next:
            return b""
        begin, wanted.next = wanted.next, end
        return self.of(wanted.table[begin // size :], begin, end, size)

    def of(self, blocks: Sequence[int], begin: int, end: int, size: int) -> bytes:
        """Of tokens `begin` to `end`, which `blocks` hold from the one with `begin` on, cut as if blocks were of `size`
        tokens."""
        first = begin // self._layout.block_size
        cuts = [begin, *range((begin // size + 1) * size, end, size), end]
        digests = [self._block(blocks, first, low, high) for low, high in pairwise(cuts)]
        return np.array(digests, "<u8").tobytes()

    def _block(self, blocks: Sequence[int], first: int, low: int, high: int) -> list[int]:
        """By layer, of tokens `low` to `high`."""
        own = self._layout.block_size
        pieces = [
            on_host(
                self._view[blocks[place - first], :, :, :, max(low - place * own, 0) : min(high - place * own, own)]
            )
            for place in range(low // own, (high - 1) // own + 1)
        ]
        rows = np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=3))
        layers, parts, heads = rows.shape[:3]
        each, step = rows.data.cast("B"), rows.shape[3] * rows.shape[4]
        digests = [0] * layers
        for n in range(layers * parts * heads):
            layer, part, head = n // (parts * heads), n // heads % parts, self._layout.heads[n % heads]
            digests[layer] ^= xxhash.xxh3_64_intdigest(each[n * step : (n + 1) * step], seed=2 * head + part)
        return digests
