"""A worker's side of the connector: copies pages, as told, within the step it was told for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from pdbus.bus.errors import Broken

from ..slab import Slab
from .copies import CopiesEnded, Copy, SlabAt, StepCopies
from .pages import Pages

log = logging.getLogger("vllm.pdbus")


class WorkerSide:
    """One rank's. All calls from the thread that runs steps."""

    def __init__(self, layers: Sequence[str], page_bytes: int, heads: int, rank: int = 0) -> None:
        """`page_bytes` and `heads`: of what one rank has of a block of a layer."""
        self._layers = layers
        self._page_bytes = page_bytes
        self._heads = heads
        self._rank = rank
        self._pages: Pages | None = None
        self._slab: Slab | None = None
        self._memory: torch.Tensor | None = None
        self._ended = CopiesEnded()
        self._wrong: set[int] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Raises Broken for caches that cannot be copied by whole blocks."""
        self._pages = Pages(caches, self._layers, self._page_bytes, self._heads)

    def load(self, step: StepCopies) -> None:
        """Before the forward pass."""
        for copy in step.loads:
            if self._copied(copy, step, lambda p, m, c: p.load(m, c.source, c.target)):
                self._ended = self._ended.and_then(CopiesEnded(loaded=(copy,)))
            else:
                self._wrong.update(copy.target)
                self._ended = self._ended.and_then(CopiesEnded(failed=(copy,)))

    def save(self, step: StepCopies) -> None:
        """After the forward pass."""
        for copy in step.saves:
            saved = self._copied(copy, step, lambda p, m, c: p.save(m, c.source, c.target))
            told = CopiesEnded(saved=(copy,)) if saved else CopiesEnded(failed=(copy,))
            self._ended = self._ended.and_then(told)

    def _copied(self, copy: Copy, step: StepCopies, how: Callable[[Pages, torch.Tensor, Copy], None]) -> bool:
        """Whatever goes wrong is this request's trouble, not the engine's."""
        try:
            how(self._registered(), self._mapped(step.slabs[self._rank]), copy)
        except (Broken, RuntimeError, IndexError, ValueError) as e:
            log.error("cannot copy KV of request %s: %s", copy.request, e)
            return False
        return True

    def _registered(self) -> Pages:
        if self._pages is None:
            raise Broken("vLLM has registered no KV cache")
        return self._pages

    def _mapped(self, at: SlabAt) -> torch.Tensor:
        if self._memory is None:
            self._slab = Slab.open(at.path, at.size_bytes)
            self._memory = self._registered().slab_pages(self._slab, at.blocks)
        return self._memory

    def take_ended(self) -> CopiesEnded | None:
        """What has been copied since the last call."""
        ended, self._ended = self._ended, CopiesEnded()
        return ended if ended.saved or ended.loaded or ended.failed else None

    def take_wrong_blocks(self) -> set[int]:
        """vLLM's blocks that were to be loaded and were not."""
        wrong, self._wrong = self._wrong, set()
        return wrong

    def close(self) -> None:
        self._memory = None
        if self._slab is not None:
            self._slab.close()
            self._slab = None
