"""Which of some blocks to give out, so that they lie side by side.

A read costs a transport some microseconds a contiguous run, and merges neighbours (apply.py): blocks given out side by
side on both nodes make one run of a whole prompt. Cached blocks grow old in the order in which requests ended, so that
the very oldest alone are soon one block here and one there: after some thousand requests every block is a run of its
own. Among a few times as many there are nearly always long runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def side_by_side(blocks: Sequence[int], n: int) -> list[int]:
    """`n` of at least `n` rising block ids, rising: of the shortest run that has so many; of the longest runs when
    none has."""
    runs = _runs(blocks)
    chosen: list[int] = []
    while runs and len(chosen) < n:
        missing = n - len(chosen)
        length, start = min((run for run in runs if run[0] >= missing), default=max(runs, key=lambda run: run[0]))
        runs.remove((length, start))
        chosen += blocks[start : start + min(length, missing)]
    return sorted(chosen)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(length, where it starts in `blocks`) of every run of neighbours."""
    starts = [0, *(i for i, (block, after) in enumerate(pairwise(blocks), 1) if after != block + 1), len(blocks)]
    return [(end - start, start) for start, end in pairwise(starts) if end > start]
