"""Which blocks of prompts a node has cached, as its published events tell: a set of hashes, each of a whole prefix.

The stream (bus/stream.py) repairs holes and notices another life of the publisher: both come as a snapshot, which
replaces all that was known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

SNAPSHOT, BLOCKS = "snapshot", "blocks"


class PrefixIndex:
    def __init__(self) -> None:
        self._hashes: set[bytes] = set()  # only ever asked whether one is in it

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, event: str, data: dict[str, Any]) -> None:
        """One event of `kv@NODE`. What is not understood changes nothing."""
        with suppress(TypeError, ValueError):  # of another form: the node may be of another version
            if event == SNAPSHOT:
                self._hashes = {bytes.fromhex(text) for text in data.get("hashes", ())}
            elif event == BLOCKS:
                for change in data.get("events", ()):
                    self._change(change)

    def clear(self) -> None:
        """Nothing is known of it any more."""
        self._hashes.clear()

    def match(self, hashes: Iterable[bytes]) -> int:
        """How many leading blocks of a prompt it has."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._hashes:
                break
            count += 1
        return count

    def same_as(self, hashes: Sequence[bytes]) -> bool:
        """Whether it holds exactly these."""
        return self._hashes == set(hashes)

    def _change(self, change: dict[str, Any]) -> None:
        match change:
            case {"t": "BlockStored", "block_hash": block_hash}:
                self._hashes.add(block_hash)
            case {"t": "BlockRemoved", "block_hash": block_hash}:
                self._hashes.discard(block_hash)
            case {"t": "BlocksCleared"}:
                self._hashes.clear()
