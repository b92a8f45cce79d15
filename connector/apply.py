"""A transfer plan (plan.py) applied to a request's block ids: arrays in, arrays out, no loop over blocks.

pairing = pair(plan, begin, end, source, target)        which block goes to which, for every kind of piece
direct_runs(rank_plan, pairing)                         from the owner's region into ours
scratch_runs(rank_plan, pairing)                        from the owner's region into scratch, then
permute(plan, rank_plan, pairing, scratch, region)      from scratch into our region
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.errors import LocalProtocolError, RemoteProtocolError

from .layout import blocks_for
from .plan import Box, RankPlan, TransferPlan

U64 = NDArray[np.uint64]

BOXES_KEPT = 4_096  # expanded boxes in the cache; a pair of layouts has a few per source rank


class Pairing(NamedTuple):
    """Pieces to move, in order of position: each one's number in the plan, and its blocks. Three equal lengths."""

    piece: U64
    source: U64
    target: U64

    @property
    def source_blocks(self) -> int:
        """How many source blocks there are, each counted once."""
        return int(_fresh(self).sum())


class Runs(NamedTuple):
    """Contiguous bytes: offsets into the source and the target, lengths. Sorted by source, neighbours merged."""

    source: U64
    target: U64
    length: U64

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


# ---------------------------------------------------------------- blocks


def pair(plan: TransferPlan, begin: int, end: int, source: Sequence[int], target: Sequence[int]) -> Pairing:
    """Where tokens `begin` to `end` are, by position; never by count of blocks.

    `source` and `target` are the owner's blocks and ours that hold these tokens, in order. The pieces that hold the
    first and the last token move whole. Raises RemoteProtocolError when `source` cannot be right, LocalProtocolError
    when `target` cannot.
    """
    first = begin // plan.source_size, begin // plan.target_size
    if len(source) != (needed := max(0, blocks_for(end, plan.source_size) - first[0])):
        raise RemoteProtocolError(
            f"{len(source)} blocks of {plan.source_size} for tokens {begin} to {end}, which need {needed}",
            field="blocks",
        )
    if len(target) != (needed := max(0, blocks_for(end, plan.target_size) - first[1])):
        raise LocalProtocolError(
            f"{len(target)} target blocks of {plan.target_size} for tokens {begin} to {end}, which need {needed}"
        )
    theirs = _ids(source, plan.source_blocks, "source")
    ours = _ids(target, plan.target_blocks, "target")
    _check_distinct(ours)
    return _paired(plan, begin, end, theirs, ours) if begin < end else _nothing()


def _paired(plan: TransferPlan, begin: int, end: int, theirs: U64, ours: U64) -> Pairing:
    """A plan without ranks reads nothing; all ranks have the same pieces."""
    found, starts = [_nothing()], [np.empty(0, np.intp)]
    source_step, target_step = plan.period // plan.source_size, plan.period // plan.target_size
    for number, piece in enumerate(plan.ranks[0].pieces if plan.ranks else ()):
        first_period = max(0, (begin - piece.start - piece.tokens) // plan.period + 1)
        periods = np.arange(first_period, blocks_for(end - piece.start, plan.period))
        source = theirs[periods * source_step + piece.source_block - begin // plan.source_size]
        target = ours[periods * target_step + piece.target_block - begin // plan.target_size]
        found.append(Pairing(np.full(len(periods), number, np.uint64), source, target))
        starts.append(periods * plan.period + piece.start)
    order = np.argsort(np.concatenate(starts), kind="stable")
    return Pairing(*(np.concatenate(column)[order] for column in zip(*found, strict=True)))


def _nothing() -> Pairing:
    return Pairing(*(np.empty(0, np.uint64) for _ in range(3)))


def batches(pairing: Pairing, source_blocks: int) -> Iterator[Pairing]:
    """The pieces in order, those of at most so many source blocks at a time."""
    begins = [*np.flatnonzero(_fresh(pairing))[::source_blocks], len(pairing.source)]
    for start, end in pairwise(begins):
        yield Pairing(*(column[start:end] for column in pairing))


def _fresh(pairing: Pairing) -> NDArray[np.bool_]:
    """Whether a piece's source block is another than that of the piece before; the pieces of one stand together."""
    fresh = np.ones(len(pairing.source), np.bool_)
    np.not_equal(pairing.source[1:], pairing.source[:-1], out=fresh[1:])
    return fresh


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
    source_at = pairing.source * np.uint64(rank.source_stride)
    target_at = pairing.target * np.uint64(rank.target_stride)
    columns = []
    for number, piece in enumerate(rank.pieces):
        here = pairing.piece == number if piece.direct and len(rank.pieces) > 1 else slice(None)
        columns += [_expanded(box, source_at[here], target_at[here]) for box in piece.direct]
    return _together(columns)


def scratch_runs(rank: RankPlan, pairing: Pairing) -> Runs:
    """The runs that go into scratch, where the pairing's i-th source block has its place at i * rank.scratch_bytes."""
    blocks = pairing.source[_fresh(pairing)]
    source_at = blocks * np.uint64(rank.source_stride)
    target_at = np.arange(len(blocks), dtype=np.uint64) * np.uint64(rank.scratch_bytes)
    return _together([_expanded(box, source_at, target_at) for box in rank.reads])


def _expanded(box: Box, source_at: U64, target_at: U64) -> tuple[U64, U64, U64]:
    """A box's runs for every pair of places, nearly in order of source: it saves most of a later sort."""
    order = np.argsort(source_at)
    places = source_at[order][:, None], target_at[order][:, None]
    steps = _places(box)
    if len(order) and steps[0][-1] - steps[0][0] > places[0][-1] - places[0][0]:  # blocks lie inside layers
        source, target = ((step[:, None] + at.T).reshape(-1) for at, step in zip(places, steps, strict=True))
    else:
        source, target = ((at + step).reshape(-1) for at, step in zip(places, steps, strict=True))
    return source, target, np.full(len(source), box.length, np.uint64)


def _together(columns: list[tuple[U64, U64, U64]]) -> Runs:
    if not columns:
        return Runs(*_nothing())
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
    places = np.cumsum(_fresh(pairing)) - 1
    blocks = int(places[-1]) + 1 if len(places) else 0
    if len(region) < plan.target_bytes or len(scratch) < blocks * rank.scratch_bytes:
        raise LocalProtocolError(f"{len(scratch)} bytes of scratch or {len(region)} bytes of region are too few")
    for number, piece in enumerate(rank.pieces):
        here = np.flatnonzero(pairing.piece == number)
        for box in piece.permutes if len(here) else ():
            axes = sorted(box.axes, key=lambda axis: -axis.target)  # writes go on side by side
            source, target = [(a.count, a.source) for a in axes], [(a.count, a.target) for a in axes]
            read = _view(scratch, box.source, [(blocks, rank.scratch_bytes), *source], box.length)
            kept = _view(region, box.target, [(plan.target_blocks, rank.target_stride), *target], box.length)
            kept[pairing.target[here]] = read[_as_slice(places[here])]


def _as_slice(places: NDArray[np.intp]) -> Any:
    """Places that rise one by one as a slice, which copies nothing."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first == len(places) - 1 else places


def _view(memory: memoryview, at: int, steps: list[tuple[int, int]], length: int) -> NDArray[np.void]:
    """Runs in memory as an array of whole runs, one dimension for each (count, bytes) of `steps`."""
    shape, strides = zip(*steps, strict=True)
    return np.ndarray(shape, np.dtype(f"V{length}"), memory, at, strides)
