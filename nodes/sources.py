"""What this node knows of each prefill node from what it had of it: how fast reads and answers are, what it has cached.

All of it is of one epoch of one life (`peers.peer_key`); of another nothing is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .rates import Ratio

SOURCES_MAX = 64  # the latest; one more takes the place of the one longest unused
PREFIXES_MAX = 8192  # blocks of prompts that a node has computed for this one: a prefill node forgets the oldest, too


class SourceFacts:
    def __init__(self) -> None:
        self.read = Ratio()  # a byte
        self.round = Ratio()
        self._computed: OrderedDict[bytes, None] = OrderedDict()

    def computed(self, hashes: Iterable[bytes]) -> None:
        """It has computed a prompt of these blocks for us. The first ones are what others share: forgotten last."""
        for block_hash in reversed(list(hashes)):
            self._computed[block_hash] = None
            self._computed.move_to_end(block_hash)
        while len(self._computed) > PREFIXES_MAX:
            self._computed.popitem(last=False)

    def match(self, hashes: Iterable[bytes]) -> int:
        """How many leading blocks of a prompt it may have cached."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._computed:
                break
            count += 1
        return count


class Sources:
    """By peer key."""

    def __init__(self) -> None:
        self._facts: OrderedDict[str, SourceFacts] = OrderedDict()

    def read_bytes_per_s(self, key: str, now: int) -> int:
        """What reads from there lately brought in a second; 0: not known."""
        facts = self._facts.get(key)
        byte_ns = facts.read.per(now) if facts is not None else 0.0
        return int(1e9 / byte_ns) if byte_ns else 0

    def of(self, key: str) -> SourceFacts:
        facts = self._facts.setdefault(key, SourceFacts())
        self._facts.move_to_end(key)
        if len(self._facts) > SOURCES_MAX:
            self._facts.popitem(last=False)
        return facts
