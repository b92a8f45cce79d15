"""Scratch: the memory behind a rank's KV, where what is read in another order waits to be permuted.

Parts are given out first fit and given back whole. A part whose read still may write is not given back.
"""

from __future__ import annotations

import bisect

from pdbus.bus.messages import KVLayout

from .layout import rank_bytes_per_token

BLOCK_TOKENS = 128  # the largest blocks of a peer that scratch is sized for
BLOCKS = 2  # of these: one is read while another is permuted
BYTES_MIN = 16 << 20


def scratch_bytes(layout: KVLayout) -> int:
    """How much to have beside this layout's region. What is never used costs no memory: its pages are never touched."""
    return max(BYTES_MIN, BLOCKS * BLOCK_TOKENS * rank_bytes_per_token(layout))


class Scratch:
    """Bytes `start` to `start + size` of a region."""

    def __init__(self, start: int, size: int) -> None:
        self.size = size
        self._end = start + size
        self._taken: list[tuple[int, int]] = [(start, start)]  # begin and end, rising; the first is a sentinel

    def take(self, size: int) -> int | None:
        """Where a free part of that size begins; None when there is none now."""
        at = self._place(size)
        if at is not None:
            bisect.insort(self._taken, (at, at + size))
        return at

    def give_back(self, at: int, size: int) -> None:
        self._taken.remove((at, at + size))

    def has_room(self, size: int) -> bool:
        return self._place(size) is not None

    def _place(self, size: int) -> int | None:
        ends = [*(begin for begin, _ in self._taken[1:]), self._end]
        return next((end for (_, end), until in zip(self._taken, ends, strict=True) if until - end >= size), None)
