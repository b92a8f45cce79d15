"""A BlockPool that has served for a while: block tables as the reads of a node get them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from pdbus.bus.errors import LocalProtocolError
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool

PROMPTS_PER_POOL = 8  # the longest prompt takes this part of a pool
REQUESTS = 1_000  # before it counts as used: some ten times the pool
AT_ONCE = 6  # requests that have blocks at a time
GROWN_BLOCKS = 4  # at most, by an answer
BLOCK_TOKENS = 16


class UsedPool:
    """Requests of all lengths come to it, grow, and leave their full blocks in the prefix cache in any order."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._pool = BlockPool(blocks, BLOCK_TOKENS)
        self._random = random.Random(seed)
        self._running: list[list[int]] = []
        self._hashes = itertools.count()
        for _ in range(REQUESTS):
            self.table(self._random.randint(1, blocks // PROMPTS_PER_POOL))

    def table(self, n: int) -> Sequence[int]:
        """The `n` blocks of a new request; others may have ended for it. Raises LocalProtocolError when n is more
        than there are."""
        while len(self._running) >= AT_ONCE:
            self._end_one()
        while (blocks := self._pool.take(n, Holder.HELD)) is None:
            if not self._running:
                raise LocalProtocolError(f"{n} blocks of a pool of {self._pool.blocks}")
            self._end_one()
        self._running.append(list(blocks))
        return blocks

    def _end_one(self) -> None:
        """Any one. What its answer has taken lies elsewhere; its last block is not full, so not kept."""
        blocks = self._running.pop(self._random.randrange(len(self._running)))
        blocks += self._pool.take(self._random.randint(0, GROWN_BLOCKS), Holder.HELD) or ()
        for block in blocks[:-1]:
            self._pool.publish(block, next(self._hashes).to_bytes(16, "little"))
        self._pool.drop(blocks, Holder.HELD)
        self._pool.take_events()
