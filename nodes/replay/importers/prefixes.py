"""Block ids as other sources name them, as ids of one workload: small numbers, one for every block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Prefixes:
    """`mismatched`: prompts that came with fewer ids than they have full blocks, or more than they have blocks."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self._next = 0
        self.mismatched = 0

    def ids(self, names: Iterable[Hashable], tokens: int, block_tokens: int, rest: Hashable = None) -> tuple[int, ...]:
        """One id for every block of a prompt of so many tokens. `names` are those of its blocks; sources name the
        partial last one or not. A block without a name is like no other, but for prompts whose `rest` is the same."""
        ids = [self._of(name) for name in names]
        blocks, full = -(-tokens // block_tokens), tokens // block_tokens
        self.mismatched += not full <= len(ids) <= blocks
        missing = (self._new() if rest is None else self._of((rest, i)) for i in range(len(ids), blocks))
        return (*ids[:blocks], *missing)

    def _of(self, name: Hashable) -> int:
        found = self._ids.get(name)
        if found is None:
            found = self._ids[name] = self._new()
        return found

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
