"""What a worker computes with. An engine knows nothing of requests' lives, leases, sockets or other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdbus.bus.messages import Sampling
from pdbus.connector.ipc import RowResult, StepRow


class Engine(Protocol):
    """Forward passes over a paged KV slab.

    A sequence is its token ids (prompt, then sampled or forced ones) and its block table. A step computes
    rows of positions whose ids are known, writes their KV into the slab, and samples where it is asked to.
    """

    vocab_size: int

    def open(self, seq: int, prompt: Sequence[int], sampling: Sampling) -> None: ...

    def force(self, seq: int, tokens: Sequence[int], draft: int = -1) -> None:
        """Append tokens that were decided elsewhere. `draft`: what may come after them."""
        ...

    def close(self, seq: int) -> None: ...

    def step(self, rows: Sequence[StepRow]) -> list[RowResult]:
        """One result per row, in order."""
        ...

    def warm_up(self) -> None:
        """Touch what the first step would otherwise pay for. Leaves no sequence and no KV behind."""
        ...

    def touch(self) -> Iterator[None]:
        """Touch what the next step will need, a little at a time; it may be left off anywhere."""
        ...
