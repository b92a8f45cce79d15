"""What the scheduler's side tells the worker's of one step, and hears back: which blocks to copy, and which were."""

from __future__ import annotations

from pdbus.bus.wire import Declared


class Copy(Declared):
    """Save: vLLM's blocks `source` into the slab's `target`, and KV of `ready` tokens is there. Load: the reverse."""

    request: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    ready: int = 0


class SlabAt(Declared):
    """Where the worker finds the slab."""

    path: str
    size_bytes: int
    blocks: int


class StepCopies(Declared):
    """Loads come before the step's forward pass, saves after it."""

    slab: SlabAt
    loads: tuple[Copy, ...] = ()
    saves: tuple[Copy, ...] = ()


class CopiesEnded(Declared):
    """A save that failed is not among `saved`, but in `failed`. So is a load, whose blocks vLLM is told of as well."""

    saved: tuple[Copy, ...] = ()
    loaded: tuple[Copy, ...] = ()
    failed: tuple[Copy, ...] = ()

    def and_then(self, later: CopiesEnded) -> CopiesEnded:
        return CopiesEnded(
            saved=self.saved + later.saved, loaded=self.loaded + later.loaded, failed=self.failed + later.failed
        )
