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
    runs = sorted(_runs(blocks), key=lambda run: (-run[0], run[1]))
    chosen: list[int] = []
    for place, (length, start) in enumerate(runs):
        missing = n - len(chosen)
        if length < missing:
            chosen += blocks[start : start + length]
            continue
        _, start = min(run for run in runs[place:] if run[0] >= missing)
        chosen += blocks[start : start + missing]
        break
    return sorted(chosen)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(length, where it starts in `blocks`) of every run of neighbours."""
    starts = [0, *(i for i, (block, after) in enumerate(pairwise(blocks), 1) if after != block + 1), len(blocks)]
    return [(end - start, start) for start, end in pairwise(starts) if end > start]
