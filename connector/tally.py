"""How many of something each node has. One that has none is not in it."""

from __future__ import annotations


class Tally(dict[str, int]):
    def more(self, node: str) -> None:
        self[node] = self.get(node, 0) + 1

    def less(self, node: str) -> None:
        """One of those that were counted."""
        self[node] -= 1
        if not self[node]:
            del self[node]
