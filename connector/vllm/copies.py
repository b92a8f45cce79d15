"""What the scheduler's side tells the workers' of one step, and hears back: which blocks to copy, and which were.

Block ids are the same on all ranks; each copies its own share of the heads, into or out of a slab of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.bus.wire import Declared


class Copy(Declared):
    """Save: vLLM's blocks `source` into the slab's `target`, and KV of `ready` tokens is there. Load: the reverse."""

    request: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    ready: int = 0


class SlabAt(Declared):
    """Where a worker finds its slab."""

    path: str
    size_bytes: int
    blocks: int


class StepCopies(Declared):
    """Loads come before the step's forward pass, saves after it."""

    slabs: tuple[SlabAt, ...]  # by rank
    loads: tuple[Copy, ...] = ()
    saves: tuple[Copy, ...] = ()


class CopiesEnded(Declared):
    """Of one rank, or of all. A save that failed is not among `saved`, but in `failed`. So is a load, whose blocks vLLM
    is told of as well."""

    saved: tuple[Copy, ...] = ()
    loaded: tuple[Copy, ...] = ()
    failed: tuple[Copy, ...] = ()

    def and_then(self, later: CopiesEnded) -> CopiesEnded:
        return CopiesEnded(
            saved=self.saved + later.saved, loaded=self.loaded + later.loaded, failed=self.failed + later.failed
        )


def of_all_ranks(ranks: int, ended: Sequence[CopiesEnded]) -> CopiesEnded:
    """What has ended on all of so many ranks, in any order. What one rank has not copied has failed: all of a block is
    there, or it is of no use."""
    saved, loaded = (_on_all(ranks, [getattr(one, how) for one in ended]) for how in ("saved", "loaded"))
    told = dict.fromkeys(copy for one in ended for copy in (*one.saved, *one.loaded, *one.failed))
    return CopiesEnded(saved=saved, loaded=loaded, failed=tuple(c for c in told if c not in (*saved, *loaded)))


def _on_all(ranks: int, copies: Sequence[tuple[Copy, ...]]) -> tuple[Copy, ...]:
    """Those that every rank has made, in the order of the first."""
    if len(copies) < ranks:
        return ()
    return tuple(copy for copy in copies[0] if all(copy in others for others in copies[1:]))
