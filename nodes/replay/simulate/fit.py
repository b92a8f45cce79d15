"""Lines of a profile out of what was measured: steps, reads and messages, each with what it took.

Nothing here assumes a quiet machine: medians, and slopes that are medians of slopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from statistics import median
from typing import NamedTuple

from .profile import NS_PER_MS, Line

SAME = 1.25  # sizes within this factor share a line, where none of them has enough samples for its own
SAMPLES_MIN = 5  # of a line; fewer say little
SAMPLES_MAX = 150  # that slopes are taken of: every pair counts
SPREAD_MIN = 64.0  # tokens of context that samples of a line must span to tell a slope, and half as much as any other


class Step(NamedTuple):
    size: int  # tokens, or rows
    context: float
    ns: int


class Read(NamedTuple):
    size: int  # bytes
    ns: int


def lines_of(steps: Iterable[Step]) -> tuple[Line, ...]:
    """One line for each size, or for several that are much the same, by size. What contexts cost where they hardly
    differ is taken from the other lines, by size. No samples: no line."""
    groups = _groups(sorted(steps))
    least = max(SPREAD_MIN, max((_span(group) for _, group in groups), default=0.0) / 2)
    slopes = {size: _slope(group, least / 2) for size, group in groups if _span(group) >= least}
    each = median(slope / size for size, slope in slopes.items()) if slopes else 0.0
    lines = []
    for size, group in groups:
        slope = slopes.get(size, each * size)
        base = median(step.ns - slope * step.context for step in group)
        lines.append((float(size), round(max(base, 0.0) / NS_PER_MS, 6), round(slope * 1000 / NS_PER_MS, 6)))
    return tuple(lines)


def _groups(steps: Sequence[Step]) -> list[tuple[int, list[Step]]]:
    """By size, or of about one size, with the median one; thin groups only where there is no other."""
    by_size = [list(group) for _, group in groupby(steps, key=lambda step: step.size)]
    whole = [group for group in by_size if len(group) >= SAMPLES_MIN]
    rest: list[list[Step]] = []
    for group in by_size:
        if len(group) >= SAMPLES_MIN:
            continue
        if rest and group[0].size <= SAME * rest[-1][0].size:
            rest[-1] += group
        else:
            rest.append(group)
    merged = [group for group in rest if len(group) >= SAMPLES_MIN]
    sized = {group[len(group) // 2].size: group for group in (whole + merged or rest)}
    return sorted({**sized, **{group[0].size: group for group in whole}}.items())


def _span(group: Sequence[Step]) -> float:
    contexts = [step.context for step in group]
    return max(contexts) - min(contexts)


def _slope(group: Sequence[Step], apart: float) -> float:
    """ns a token of context: the median over all pairs of steps whose contexts are so far apart."""
    some = sorted(group, key=lambda step: step.context)[:: -(-len(group) // SAMPLES_MAX)]
    slopes = [
        (b.ns - a.ns) / (b.context - a.context) for a, b in combinations(some, 2) if b.context - a.context >= apart
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


def link_of(reads: Sequence[Read], moved: Sequence[Read]) -> tuple[float, float]:
    """GB/s and ms of a read beside its bytes. `reads`: from the post to the node's learning of its end; `moved`: the
    same as the mover measured them. Sizes that are all the same tell no bandwidth: then the mover's word counts."""
    if not reads:
        return 0.0, 0.0
    small, large = (_median_of(reads, size) for size in (min(r.size for r in reads), max(r.size for r in reads)))
    if large.size >= 2 * small.size and large.ns > small.ns:
        rate = (large.size - small.size) / (large.ns - small.ns)
    else:
        busiest = _median_of(moved, max(r.size for r in moved))
        rate = busiest.size / max(1, busiest.ns)
    beside_ns = max(0.0, median(r.ns - r.size / rate for r in reads))
    return rate, beside_ns / NS_PER_MS


def _median_of(reads: Sequence[Read], size: int) -> Read:
    """Of those of about that size."""
    near = [r for r in reads if size / SAME <= r.size <= size * SAME]
    return Read(int(median(r.size for r in near)), int(median(r.ns for r in near)))
