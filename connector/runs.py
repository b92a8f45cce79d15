"""Runs of bytes as they travel to a mover: three packed arrays of u64, checked, then cut into slices for posts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.errors import RemoteProtocolError

from .apply import Runs

U64 = NDArray[np.uint64]
PackedRuns = tuple[bytes, bytes, bytes]  # sources, targets, lengths


def pack(values: Iterable[int] | U64) -> bytes:
    """Offsets or lengths as little-endian u64."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    return array.astype("<u8", copy=False).tobytes()


def unpack(source: bytes, target: bytes, length: bytes) -> Runs:
    """The inverse, as views. Raises RemoteProtocolError when a size is no multiple of eight."""
    for packed in (source, target, length):
        if len(packed) % 8:
            raise RemoteProtocolError(f"{len(packed)} bytes is no list of u64")
    return Runs(*(np.frombuffer(packed, "<u8") for packed in (source, target, length)))


def refusal(runs: Runs, source_bytes: int, target_bytes: int) -> str:
    """Why these runs cannot be read between regions of that many bytes, or ''."""
    counts = [len(column) for column in runs]
    if len(dict.fromkeys(counts)) > 1 or not counts[0]:
        return f"{counts[0]} sources, {counts[1]} targets and {counts[2]} lengths"
    if not runs.length.all():
        return "a run is empty"
    for side, starts, size in (("source", runs.source, source_bytes), ("target", runs.target, target_bytes)):
        outside = (starts > size) | (runs.length > size - np.minimum(starts, size))
        if outside.any():
            first = int(outside.argmax())
            return f"{side} run {starts[first]} + {runs.length[first]} in a region of {size} bytes"
    order = np.argsort(runs.target, kind="stable")
    starts, ends = runs.target[order], (runs.target + runs.length)[order]
    if (starts[1:] < ends[:-1]).any():
        return "two target runs overlap"
    return ""


def slices(runs: Runs, runs_max: int, bytes_max: int) -> deque[PackedRuns]:
    """The runs in order of source, cut into pieces of at most so many runs and bytes; a longer run is split."""
    order = np.argsort(runs.source, kind="stable")
    whole = _split(Runs(*(column[order] for column in runs)), bytes_max)
    ends = np.cumsum(whole.length)
    pieces: deque[PackedRuns] = deque()
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + bytes_max, side="right"))
        end = min(max(fits, start + 1), start + runs_max)
        pieces.append((pack(whole.source[start:end]), pack(whole.target[start:end]), pack(whole.length[start:end])))
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
