"""Staging: KV that travels between a device's memory, where steps compute, and its mirror in host memory, where reads
begin and land. For devices whose memory NIXL cannot address.

Theory of operation. Every block is there twice, under one id. What a step has completed is copied down before it is
announced to anyone; what was read is copied up once it is confirmed, before a step computes upon it. Copies run beside
the steps. Who asks is told when every copy that had begun by then has ended: so a chunk never overtakes the one before,
and blocks that another request is having copied are waited for, not copied again.

    | hears       | does                                                                                       |
    |-------------|--------------------------------------------------------------------------------------------|
    | stage down  | begin to copy those blocks that are neither mirrored nor being copied; told: staged down   |
    | stage up    | begin to copy all of the blocks; told: staged up                                           |
    | copy ended  | let go of its blocks, which are mirrored from now on; tell whoever waits for nothing else  |
    | copier gone | no copy goes on, and nobody is told of any: let go of all blocks                           |

A copy holds its blocks IN_COPY until its end, whatever becomes of the lease or request behind it. So neither of a
block's two memories is given to anyone while a copy still reads the one or writes the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.wire import Declared

from .handoff import BlockOwner, ChunkComputed, Holder


class Way(StrEnum):
    DOWN = "down"  # from the device into the mirror
    UP = "up"


class MirroredOwner(BlockOwner, Protocol):
    """Who owns KV memory that has a mirror."""

    def is_mirrored(self, block: int) -> bool:
        """Its mirror holds what the device does."""
        ...

    def mirrored(self, blocks: Sequence[int]) -> None: ...


class StagingEvent(Declared, tag_field="t", tag=True):
    pass


class StageDown(StagingEvent):
    """These blocks are complete on the device; when their mirrors are, `chunk` is true of what can be read."""

    chunk: ChunkComputed
    blocks: tuple[int, ...]


class StageUp(StagingEvent):
    """The mirrors of these blocks hold confirmed KV, which the request is to compute upon."""

    request: bytes
    blocks: tuple[int, ...]


class CopyEnded(StagingEvent):
    """The fence has been passed: all bytes are in place. What is beside the number is only counted."""

    copy: int
    bytes: int = 0
    in_step: bool = False


class CopierGone(StagingEvent):
    """Its process has been reaped, and the device's memory with it."""


class StagingEffect(Declared, tag_field="t", tag=True):
    pass


class StartCopy(StagingEffect):
    """`request` tells people whose copy it is."""

    copy: int
    way: Way
    blocks: tuple[int, ...]
    request: bytes


class StagedDown(StagingEffect):
    chunk: ChunkComputed


class StagedUp(StagingEffect):
    request: bytes


class Staging:
    """All copies of one node."""

    def __init__(self, owner: MirroredOwner) -> None:
        self.counters: Counter[str] = Counter()
        self._owner = owner
        self._last = 0
        self._copies: dict[int, tuple[int, ...]] = {}  # that go on, oldest first: their blocks
        self._in_copy: dict[int, None] = {}
        self._waiting: list[tuple[int, StagedDown | StagedUp]] = []  # for all copies up to that one

    def __len__(self) -> int:
        """How many copies go on."""
        return len(self._copies)

    def handle(self, event: StagingEvent, now_ns: int) -> list[StagingEffect]:
        """The one door."""
        match event:
            case StageDown(chunk=chunk, blocks=blocks):
                missing = tuple(b for b in blocks if b not in self._in_copy and not self._owner.is_mirrored(b))
                return self._begin(Way.DOWN, missing, chunk.try_.request, StagedDown(chunk=chunk))
            case StageUp(request=request, blocks=blocks):
                return self._begin(Way.UP, blocks, request, StagedUp(request=request))
            case CopyEnded():
                return self._ended(event)
            case CopierGone():
                return self._gone()
        raise LocalProtocolError(f"no staging event: {type(event).__name__}")

    def _begin(
        self, way: Way, blocks: tuple[int, ...], request: bytes, then: StagedDown | StagedUp
    ) -> list[StagingEffect]:
        effects: list[StagingEffect] = []
        if blocks:
            self._owner.hold(blocks, Holder.IN_COPY)
            self._last += 1
            self._copies[self._last] = blocks
            self._in_copy.update(dict.fromkeys(blocks))
            effects.append(StartCopy(copy=self._last, way=way, blocks=blocks, request=request))
        if not self._copies:
            return [then]
        self._waiting.append((self._last, then))
        return effects

    def _ended(self, event: CopyEnded) -> list[StagingEffect]:
        blocks = self._copies.pop(event.copy, None)
        if blocks is None:
            self.counters["late"] += 1
            return []
        self.counters.update(copies=1, bytes=event.bytes, in_step=int(event.in_step))
        self._owner.mirrored(blocks)
        self._let_go(blocks)
        oldest = next(iter(self._copies), self._last + 1)
        due = [then for copy, then in self._waiting if copy < oldest]
        del self._waiting[: len(due)]
        return [*due]

    def _gone(self) -> list[StagingEffect]:
        for blocks in self._copies.values():
            self._let_go(blocks)
        self._copies.clear()
        self._waiting.clear()
        return []

    def _let_go(self, blocks: tuple[int, ...]) -> None:
        self._owner.drop(blocks, Holder.IN_COPY)
        for block in blocks:
            del self._in_copy[block]
