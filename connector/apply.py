"""A transfer plan (plan.py) applied to a request's block ids: arrays in, arrays out, no loop over blocks.

pairing = pair(plan, have, read, ready, source, target)     which block goes to which, for every kind of piece
direct_runs(rank_plan, pairing)                             from the owner's region into ours
scratch_runs(rank_plan, pairing)                            from the owner's region into scratch, then
permute(plan, rank_plan, pairing, scratch, region)          from scratch into our region
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.errors import LocalProtocolError, RemoteProtocolError

from .layout import blocks_for
from .plan import Box, RankPlan, TransferPlan

U64 = NDArray[np.uint64]

BOXES_KEPT = 4_096  # expanded boxes in the cache; a pair of layouts has a few per source rank


class Pairing(NamedTuple):
    """Pieces to move, in no particular order: each one's number in the plan, and its blocks. Three equal lengths."""

    piece: U64
    source: U64
    target: U64

    @property
    def pieces(self) -> int:
        return len(self.piece)

    def part(self, start: int, end: int) -> Pairing:
        """Some of the pieces, by their places here: as many as scratch has room for."""
        return Pairing(self.piece[start:end], self.source[start:end], self.target[start:end])


class Runs(NamedTuple):
    """Contiguous bytes: offsets into the source and the target, lengths. Sorted by source, neighbours merged."""

    source: U64
    target: U64
    length: U64

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


# ---------------------------------------------------------------- blocks


def pair(plan: TransferPlan, have: int, read: int, ready: int, source: Sequence[int], target: Sequence[int]) -> Pairing:
    """What is still to be read, by token position; never by count of blocks.

    `have` tokens were here before, `read` are read or asked for already, `ready` the owner has announced. `source` are
    the owner's blocks from the one that holds token `have` on, as announced; `target` is our block table from
    token 0. The pieces that hold the first missing and the last token move whole. Raises RemoteProtocolError when
    `source` cannot be right, LocalProtocolError when `target` cannot.
    """
    first = have // plan.source_size
    expected = max(0, blocks_for(ready, plan.source_size) - first)
    if len(source) != expected:
        raise RemoteProtocolError(
            f"{len(source)} blocks do not hold tokens {have} to {ready} in blocks of {plan.source_size}", field="blocks"
        )
    begin = max(have, read)
    theirs = _ids(source, plan.source_blocks, "source")
    ours = _ids(target, plan.target_blocks, "target")
    if ready <= begin:
        return Pairing(*(np.empty(0, np.uint64) for _ in range(3)))
    if (needed := blocks_for(ready, plan.target_size)) > len(ours):
        raise LocalProtocolError(f"{ready} tokens need {needed} target blocks, but only {len(ours)} are reserved")
    _check_distinct(ours[begin // plan.target_size : needed])
    return _paired(plan, begin, ready, theirs, first, ours)


def _paired(plan: TransferPlan, begin: int, ready: int, theirs: U64, first: int, ours: U64) -> Pairing:
    """A plan without ranks reads nothing; all ranks have the same pieces."""
    found = []
    source_step, target_step = plan.period // plan.source_size, plan.period // plan.target_size
    for number, piece in enumerate(plan.ranks[0].pieces if plan.ranks else ()):
        periods = np.arange(
            max(0, (begin - piece.start - piece.tokens) // plan.period + 1),
            blocks_for(ready - piece.start, plan.period),
        )
        source = theirs[periods * source_step + piece.source_block - first]
        target = ours[periods * target_step + piece.target_block]
        found.append(Pairing(np.full(len(periods), number, np.uint64), source, target))
    if not found:
        return Pairing(*(np.empty(0, np.uint64) for _ in range(3)))
    return Pairing(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _ids(blocks: Sequence[int], count: int, side: str) -> U64:
    ids = np.asarray(blocks, np.uint64)
    if len(ids) and (last := int(ids.max())) >= count:
        problem = f"{side} block {last}, but there are {count}"
        raise RemoteProtocolError(problem, field="blocks") if side == "source" else LocalProtocolError(problem)
    return ids


def _check_distinct(ids: U64) -> None:
    ordered = np.sort(ids)
    if len(same := np.flatnonzero(ordered[1:] == ordered[:-1])):
        raise LocalProtocolError(f"target block {ordered[same[0]]} is named twice")


# ---------------------------------------------------------------- runs


def direct_runs(rank: RankPlan, pairing: Pairing) -> Runs:
    """The runs that go straight into the target's region."""
    return _runs(rank, pairing, "direct", pairing.target * np.uint64(rank.target_stride))


def scratch_runs(rank: RankPlan, pairing: Pairing) -> Runs:
    """The runs that go into scratch, where the i-th piece of `pairing` has its place at i * rank.scratch_bytes."""
    places = np.arange(pairing.pieces, dtype=np.uint64) * np.uint64(rank.scratch_bytes)
    return _runs(rank, pairing, "reads", places)


def _runs(rank: RankPlan, pairing: Pairing, kind: str, target_at: U64) -> Runs:
    columns: list[tuple[U64, U64, U64]] = []
    source_at = pairing.source * np.uint64(rank.source_stride)
    for number, piece in enumerate(rank.pieces):
        boxes: tuple[Box, ...] = getattr(piece, kind)
        here = pairing.piece == number if boxes and len(rank.pieces) > 1 else slice(None)
        for box in boxes:
            source, target = _places(box)
            starts = (source_at[here][:, None] + source).reshape(-1)
            ends = (target_at[here][:, None] + target).reshape(-1)
            columns.append((starts, ends, np.full(len(starts), box.length, np.uint64)))
    if not columns:
        return Runs(*(np.empty(0, np.uint64) for _ in range(3)))
    return merged(*(np.concatenate(column) for column in zip(*columns, strict=True)))


@lru_cache(BOXES_KEPT)
def _places(box: Box) -> tuple[U64, U64]:
    """Where a box's runs begin, on both sides, relative to its blocks."""
    source, target = np.array([box.source], np.uint64), np.array([box.target], np.uint64)
    for axis in reversed(box.axes):
        steps = np.arange(axis.count, dtype=np.uint64)
        source = (source[:, None] + steps * np.uint64(axis.source)).reshape(-1)
        target = (target[:, None] + steps * np.uint64(axis.target)).reshape(-1)
    return source, target


def merged(source: U64, target: U64, length: U64) -> Runs:
    """Runs in order of source, those that continue another on both sides made part of it."""
    if not (source[1:] > source[:-1]).all():
        order = np.argsort(source, kind="stable")
        source, target, length = source[order], target[order], length[order]
    if not len(source):
        return Runs(source, target, length)
    goes_on = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    firsts = np.concatenate((np.zeros(1, np.intp), np.flatnonzero(~goes_on) + 1))
    return Runs(source[firsts], target[firsts], np.add.reduceat(length, firsts))


# ---------------------------------------------------------------- out of scratch


def permute(plan: TransferPlan, rank: RankPlan, pairing: Pairing, scratch: memoryview, region: memoryview) -> None:
    """Bring what `scratch_runs` of this pairing read to its places. Raises LocalProtocolError for too little memory."""
    if len(region) < plan.target_bytes or len(scratch) < pairing.pieces * rank.scratch_bytes:
        raise LocalProtocolError(f"{len(scratch)} bytes of scratch or {len(region)} bytes of region are too few")
    for number, piece in enumerate(rank.pieces):
        here = np.flatnonzero(pairing.piece == number)
        for box in piece.permutes if len(here) else ():
            axes = sorted(box.axes, key=lambda axis: -axis.target)  # writes go on side by side
            width = _word_bytes(box, rank)
            source, target = [(a.count, a.source) for a in axes], [(a.count, a.target) for a in axes]
            read = _view(scratch, box.source, [(pairing.pieces, rank.scratch_bytes), *source], box.length, width)
            kept = _view(region, box.target, [(plan.target_blocks, rank.target_stride), *target], box.length, width)
            kept[pairing.target[here]] = read if len(here) == pairing.pieces else read[here]


def _word_bytes(box: Box, rank: RankPlan) -> int:
    """The widest word that every offset and step of a box is a multiple of: fewer, larger elements to copy."""
    steps = (step for axis in box.axes for step in (axis.source, axis.target))
    return math.gcd(8, box.source, box.target, box.length, rank.scratch_bytes, rank.target_stride, *steps)


def _view(memory: memoryview, at: int, steps: list[tuple[int, int]], length: int, width: int) -> NDArray[Any]:
    """Runs in memory as an array of words: one dimension for each (count, bytes) of `steps`, then the run's words."""
    flat = np.frombuffer(memory, np.uint8)[at:]
    return np.lib.stride_tricks.as_strided(
        flat[: len(flat) // width * width].view(f"u{width}"),
        (*(count for count, _ in steps), length // width),
        (*(step for _, step in steps), width),
    )
