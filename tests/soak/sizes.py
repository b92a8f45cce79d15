"""How large each process was after each turn, and what has grown that should not have. Pure but for `size_of`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.live.test_soak import descriptors_of, rss_kib_of

# A link that is just being made or closed has two, and a monitor's two.
DESCRIPTORS_SLACK = 4
THREADS_SLACK = 1
SETTLING_TURNS = 2  # the first ones fill caches and tables
TURNS_MIN = 3  # to say anything


class Size(NamedTuple):
    """Of one process. Memory without what is shared: the KV fills once."""

    pid: int
    rss_kib: int
    descriptors: int
    threads: int


class Sample(NamedTuple):
    """After one turn, when nobody asks."""

    at_s: float  # since the start
    requests: int  # that had ended, since the start
    latency_ms: float  # median of some requests of one length, one after the other
    sizes: Mapping[str, Size]  # by node and process, of nodes that are never hurt


class Trend(NamedTuple):
    """`first` and `last`: medians of the first and last third of the samples; `growth`: what all of the last third have
    more than any of the first, which a single odd sample cannot make."""

    first: float
    last: float
    growth: float


def size_of(pid: int) -> Size:
    return Size(pid, rss_kib_of(pid), descriptors_of(pid), len(os.listdir(Path(f"/proc/{pid}/task"))))


def trend(values: Sequence[float]) -> Trend:
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    return Trend(median(first), median(last), max(0.0, min(last) - max(first)))


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Without those in which things fill for the first time, where there are enough."""
    return samples[SETTLING_TURNS:] if len(samples) >= SETTLING_TURNS + TURNS_MIN else samples


def series(samples: Sequence[Sample], process: str) -> list[Size]:
    """Of the life that it has now: a mover may end with the one that it sends to."""
    sizes = [sample.sizes[process] for sample in samples if process in sample.sizes]
    return [size for size in sizes if size.pid == sizes[-1].pid]


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What grew in processes that nothing was done to."""
    found: list[str] = []
    for process in samples[-1].sizes if samples else ():
        sizes = series(settled(samples), process)
        if len(sizes) < TURNS_MIN:
            continue
        for what, slack in (("descriptors", DESCRIPTORS_SLACK), ("threads", THREADS_SLACK)):
            grown = trend([getattr(size, what) for size in sizes])
            if grown.growth > slack:
                found.append(f"{process}: {what} grew from {grown.first:g} to {grown.last:g}")
    return found
