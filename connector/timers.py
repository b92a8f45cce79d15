"""Timers: named deadlines of a machine, one per key. They read no clock: the shell asks when to come back."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K")

SLACK = 64  # stale heap entries tolerated beside as many as there are timers, before the heap is rebuilt


def earliest(*deadlines: int | None) -> int | None:
    """The first of those that there are."""
    first = None
    for deadline in deadlines:
        if deadline is not None and (first is None or deadline < first):
            first = deadline
    return first


class Timers(Generic[K]):
    """Setting a key again moves its deadline. Of equal deadlines the one set first is due first."""

    def __init__(self) -> None:
        self._at: dict[K, tuple[int, int]] = {}  # key -> (deadline, order)
        self._heap: list[tuple[int, int, K]] = []  # entries that differ from `_at` are stale
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at_ns: int) -> None:
        self._order += 1
        self._at[key] = (at_ns, self._order)
        heapq.heappush(self._heap, (at_ns, self._order, key))
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [(at, order, k) for k, (at, order) in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, key: K) -> None:
        self._at.pop(key, None)

    def at(self, key: K) -> int | None:
        entry = self._at.get(key)
        return entry[0] if entry else None

    def next_deadline(self) -> int | None:
        heap, current = self._heap, self._at
        while heap:
            at_ns, order, key = heap[0]
            if current.get(key) == (at_ns, order):
                return at_ns
            heapq.heappop(heap)
        return None

    def pop_due(self, now_ns: int) -> K | None:
        """The key whose deadline passed longest ago, removed; None when none has."""
        due = self.next_deadline()
        if due is None or due > now_ns:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._at[key]
        return key
