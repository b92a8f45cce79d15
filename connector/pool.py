"""BlockPool: which KV block belongs to whom, and which content is kept for a prefix hit.

Theory of operation. A block has a count per `Holder` and perhaps a hash. Its state is derived, never stored:

    no holder, no hash           free         given out first, lowest ids and neighbours (contiguous.py) preferred
    no holder, a hash            cached       evicted only when no free one is left, neighbours among the least
                                              recently used
    IN_FLIGHT holders only       quarantined  a read may still write into it: given to nobody
    any other holder             in use       IN_STEP, IN_COPY alone count too: a step or a copy may still write into it

    free, cached -reserve, take-> in use        in use -hold-> in use        in use, quarantined -drop-> any

A block leaves its holders only through `drop`, so a block that a read or step can still write is never in the free
heap or the cache: invariant 2 holds by construction. It knows no tokens, tensors, leases or requests.

With a mirror in host memory (staging.py) it remembers whose mirror holds what the block does, until either is
written.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice, takewhile

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.wire import Declared

from .contiguous import side_by_side
from .handoff import Holder, Reservation

CHOICE = 4  # times as many blocks are looked at as are wanted: with 2 reads have twice as many runs, with 8 as many
CHOICE_MAX = 1_024  # blocks beyond those wanted: looking at them takes 1 ms; a run of so many needs no company
PASSED_OVER_MAX = 2  # times as many blocks as the pool has are evicted before one that has not been used meanwhile
OLDEST = 4  # of the cached blocks, no more than the oldest 1 / OLDEST may go before older ones


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    IN_USE = "in use"
    QUARANTINED = "quarantined"


class PoolCounts(Declared):
    """In blocks. free + cached + in_use + quarantined = total."""

    total: int
    free: int
    cached: int
    in_use: int
    quarantined: int


class CacheEvent(Declared, tag_field="t", tag=True):
    """What happened to shareable content, for publishing."""


class BlockStored(CacheEvent):
    """`parent` is the hash of the block before it, b'' for the first of a prompt."""

    block_hash: bytes
    parent: bytes
    block: int


class BlockRemoved(CacheEvent):
    block_hash: bytes


class BlocksCleared(CacheEvent):
    pass


WRITERS = (Holder.IN_STEP, Holder.IN_FLIGHT)  # of one of a block's two memories


class BlockPool:
    """`blocks` KV blocks of `block_size` tokens, ids 0 to blocks - 1. Implements `BlockOwner`."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise LocalProtocolError(f"a pool of {blocks} blocks of {block_size} tokens: both must be at least 1")
        self.blocks = blocks
        self.block_size = block_size
        self._held: dict[Holder, list[int]] = {holder: [0] * blocks for holder in Holder}
        self._holders: list[int] = [0] * blocks  # all holders of a block together
        self._hash: list[bytes | None] = [None] * blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: list[int] = list(range(blocks))  # a heap
        self._cached: OrderedDict[int, int] = OrderedDict()  # least recently used first; how many were evicted before
        self._quarantined = 0
        self._evicted = 0  # so far
        self.changes = 0  # so often has something happened after which a reservation may find the room it did not find
        self._mirrored: dict[int, None] = {}
        self._events: list[CacheEvent] = []

    # ------------------------------------------------------------ giving out

    def reserve(self, tokens: int, block_hashes: Sequence[bytes], holder: Holder) -> Reservation | None:
        """Blocks for `tokens` tokens, in order, each held once by `holder`; None when there is no room.

        The longest cached prefix is shared, at most (tokens - 1) // block_size blocks of it: the last position is
        always computed, and never into a shared block.
        """
        if tokens < 1:
            raise LocalProtocolError(f"blocks for {tokens} tokens: at least 1")
        hits = self._hits(block_hashes[: (tokens - 1) // self.block_size])
        fresh = -(-tokens // self.block_size) - len(hits)
        if fresh > self.available() - len([block for block in hits if not self._holders[block]]):
            return None
        self._add(hits, holder)
        blocks = (*hits, *self._fresh(fresh, holder))
        return Reservation(blocks=blocks, cached_tokens=len(hits) * self.block_size)

    def take(self, n: int, holder: Holder) -> tuple[int, ...] | None:
        """`n` fresh blocks, for a sequence that grows; None when there is no room."""
        if n < 0:
            raise LocalProtocolError(f"{n} blocks: at least 0")
        return tuple(self._fresh(n, holder)) if n <= self.available() else None

    def hold(self, blocks: Sequence[int], holder: Holder) -> None:
        """Another holder for blocks that a sequence or lease has. Raises LocalProtocolError, and changes nothing, for
        any other block, and for a read into a block that is shared or already being read into."""
        self._named_once(blocks)
        held, advertised = self._held[Holder.HELD], self._held[Holder.ADVERTISED]
        in_flight = self._held[Holder.IN_FLIGHT]
        for block in blocks:
            if not (held[block] or advertised[block]):
                raise LocalProtocolError(f"block {block} ({self.state(block)}) has no sequence or lease to hold it for")
            if holder is Holder.IN_FLIGHT and (self._hash[block] is not None or in_flight[block]):
                raise LocalProtocolError(f"block {block} is shared or being read into: no read may write it")
        self._add(blocks, holder)
        if self._mirrored and holder in WRITERS:
            for block in blocks:
                self._mirrored.pop(block, None)

    def drop(self, blocks: Sequence[int], holder: Holder) -> None:
        """The inverse of one `hold`, `reserve` or `take`. Raises LocalProtocolError, and changes nothing, for a block
        without that holder."""
        self._named_once(blocks)
        held = self._held[holder]
        for block in blocks:
            if not held[block]:
                raise LocalProtocolError(f"block {block} has no holder '{holder.value}'")
        self._remove(blocks, holder)

    # ------------------------------------------------------------ prefix cache

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of these would hit. Changes nothing."""
        return len(self._hits(hashes))

    def publish(self, block: int, block_hash: bytes, parent: bytes = b"") -> None:
        """The block is full, its content final and shareable from now on, until evicted.

        A hash that is known already stays with its first block. Raises LocalProtocolError for a block that is not in
        use, may still be written by a read, or has another hash.
        """
        if not 0 <= block < self.blocks:
            raise self._stranger(block)
        if block_hash in self._by_hash:
            return
        if not self._holders[block] or self._held[Holder.IN_FLIGHT][block]:
            raise LocalProtocolError(f"block {block} is {self.state(block).value} or being read into: not final")
        if self._hash[block] is not None:
            raise LocalProtocolError(f"block {block} has another hash already")
        self._hash[block] = block_hash
        self._by_hash[block_hash] = block
        self.changes += 1
        self._events.append(BlockStored(block_hash=block_hash, parent=parent, block=block))

    def reset(self) -> None:
        """The worker's KV is gone: no content is worth a hit any more. Holders stay until they drop what they hold;
        above all reads that are in flight, which write into the memory whatever became of the worker."""
        if self._by_hash:
            self._events.append(BlocksCleared())
        for block in self._by_hash.values():
            self._hash[block] = None
        self._by_hash.clear()
        self._mirrored.clear()
        for block in self._cached:
            heapq.heappush(self._free, block)
        self._cached.clear()

    def mirrored(self, blocks: Sequence[int]) -> None:
        """The mirrors of these blocks, which are in use or cached, hold what they do."""
        self._mirrored.update(dict.fromkeys(blocks))

    def take_events(self) -> list[CacheEvent]:
        """What happened to shareable content since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ asking

    def shareable(self) -> list[bytes]:
        """The hashes that would hit now: what a snapshot of the cache events says."""
        return list(self._by_hash)

    def is_mirrored(self, block: int) -> bool:
        return block in self._mirrored

    def available(self) -> int:
        """Blocks that could be given out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def state(self, block: int) -> BlockState:
        if self._holders[block] == 0:
            return BlockState.FREE if self._hash[block] is None else BlockState.CACHED
        in_flight_only = self._holders[block] == self._held[Holder.IN_FLIGHT][block]
        return BlockState.QUARANTINED if in_flight_only else BlockState.IN_USE

    def holders(self, block: int) -> dict[Holder, int]:
        """Who holds it, how often."""
        return {holder: held[block] for holder, held in self._held.items() if held[block]}

    def counts(self) -> PoolCounts:
        used = self.blocks - self.available()
        return PoolCounts(
            free=len(self._free),
            cached=len(self._cached),
            in_use=used - self._quarantined,
            quarantined=self._quarantined,
            total=self.blocks,
        )

    def check(self) -> None:
        """Invariant 1, by looking at every block: each is exactly one of the four, and all books agree."""
        states = [self.state(block) for block in range(self.blocks)]
        assert sorted(self._free) == [b for b, s in enumerate(states) if s is BlockState.FREE], "free list"
        assert sorted(self._cached) == [b for b, s in enumerate(states) if s is BlockState.CACHED], "cache list"
        assert self._quarantined == states.count(BlockState.QUARANTINED), "quarantine gauge"
        assert not any(states[b] is BlockState.FREE for b in self._mirrored), "a free block has a mirror"
        in_flight = self._held[Holder.IN_FLIGHT]
        assert not any(in_flight[block] for block in self._by_hash.values()), "a shared block is being read into"
        assert self._by_hash == {h: b for b, h in enumerate(self._hash) if h is not None}, "hashes"
        for block in range(self.blocks):
            counts = [held[block] for held in self._held.values()]
            assert min(counts) >= 0 and sum(counts) == self._holders[block], f"holders of block {block}"

    # ------------------------------------------------------------ block by block

    def _hits(self, hashes: Sequence[bytes]) -> list[int]:
        hits = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _fresh(self, n: int, holder: Holder) -> list[int]:
        blocks = self._chosen(n)
        held, holders = self._held[holder], self._holders
        for block in blocks:
            held[block] = holders[block] = 1
        if holder is Holder.IN_FLIGHT:
            self._quarantined += n
        return blocks

    def _chosen(self, n: int) -> list[int]:
        """`n` available blocks, rising. Cached ones go only when all free ones do."""
        if n <= 1 <= len(self._free):
            return [heapq.heappop(self._free) for _ in range(n)]
        more = min(CHOICE * n, CHOICE_MAX)
        free = [heapq.heappop(self._free) for _ in range(min(n + more, len(self._free)))]
        if n <= len(free):
            chosen = side_by_side(free, n)
            for block in sorted(set(free).difference(chosen)):
                heapq.heappush(self._free, block)
            return chosen
        missing = n - len(free)
        oldest = list(islice(self._cached, missing + min(more, len(self._cached) // OLDEST)))
        due = list(takewhile(self._passed_over, oldest[:missing]))
        evicted = due + side_by_side(sorted(oldest[len(due) :]), missing - len(due))
        self._evict(sorted(evicted))
        return sorted(free + evicted)

    def _passed_over(self, block: int) -> bool:
        """It has no neighbours, and would stay for ever."""
        return self._evicted - self._cached[block] >= PASSED_OVER_MAX * self.blocks

    def _evict(self, blocks: Sequence[int]) -> None:
        cached, mirrored, events = self._cached, self._mirrored, self._events
        hashes, by_hash = self._hash, self._by_hash
        self._evicted += len(blocks)
        for block in blocks:
            del cached[block]
            mirrored.pop(block, None)
            block_hash = hashes[block]
            assert block_hash is not None
            hashes[block] = None
            del by_hash[block_hash]
            events.append(BlockRemoved(block_hash=block_hash))

    def _add(self, blocks: Sequence[int], holder: Holder) -> None:
        """One more holder for blocks that are in use or cached."""
        held, holders, cached = self._held[holder], self._holders, self._cached
        for block in blocks:
            if not holders[block]:
                del cached[block]
            held[block] += 1
            holders[block] += 1

    def _remove(self, blocks: Sequence[int], holder: Holder) -> None:
        held, holders, in_flight = self._held[holder], self._holders, self._held[Holder.IN_FLIGHT]
        hashes, cached, free, mirrored = self._hash, self._cached, self._free, self._mirrored
        evicted = self._evicted
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            was_quarantined = holders[block] == in_flight[block]
            held[block] -= 1
            left = holders[block] = holders[block] - 1
            self._quarantined += (0 < left == in_flight[block]) - was_quarantined
            if left:
                continue
            self.changes += 1
            if hashes[block] is None:
                mirrored.pop(block, None)
                heapq.heappush(free, block)
            else:
                cached[block] = evicted

    def _named_once(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.blocks:
            raise self._stranger(next(block for block in blocks if not 0 <= block < self.blocks))
        if len(set(blocks)) != len(blocks):
            raise LocalProtocolError("a block is named twice")

    def _stranger(self, block: int) -> LocalProtocolError:
        return LocalProtocolError(f"block {block} is none of the pool's 0 to {self.blocks - 1}")
