"""Runs of bytes cut into slices, each fit for one post."""

from __future__ import annotations

from collections import deque

import numpy as np

from .apply import Runs


def slices(runs: Runs, runs_max: int, bytes_max: int) -> deque[Runs]:
    """The runs in order of source, cut into pieces of at most so many runs and bytes; a longer run is split."""
    order = np.argsort(runs.source, kind="stable")
    whole = _split(Runs(*(column[order] for column in runs)), bytes_max)
    ends = np.cumsum(whole.length)
    pieces: deque[Runs] = deque()
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + bytes_max, side="right"))
        end = min(max(fits, start + 1), start + runs_max)
        pieces.append(Runs(*(column[start:end] for column in whole)))
        start = end
    return pieces


def _split(runs: Runs, bytes_max: int) -> Runs:
    if not (runs.length > bytes_max).any():
        return runs
    counts = (runs.length.astype(np.int64) + bytes_max - 1) // bytes_max
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (steps * bytes_max).astype(np.uint64)
    left = np.repeat(runs.length, counts) - skipped
    return Runs(
        np.repeat(runs.source, counts) + skipped,
        np.repeat(runs.target, counts) + skipped,
        np.minimum(left, np.uint64(bytes_max)),
    )
