"""Prompts computed here for other nodes: what `Offers` decides becomes sequences, and steps become its news.

Where readers read from a mirror of the device's memory, a chunk is news only once it has been staged down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdbus.bus.messages import TryId
from pdbus.connector.handoff import ChunkComputed, OfferEvent, PrefillBroke, StartPrefill, StopPrefill, WritesEnded
from pdbus.connector.offer import Offers
from pdbus.connector.offering import Offering
from pdbus.connector.staging import StageDown

from .events import CloseSequence, NodeEffect, OpenSequence, StepRowEnded
from .scheduler import Progress, Scheduler, Sequence

PREFILL_ORDER = 1 << 40  # a prompt for another node is younger than any request of this one's own


Stage = Callable[[StageDown, int], list[NodeEffect]]


@dataclass(slots=True)
class _Unstaged:
    """Of a prompt's blocks those from place `next` on, which its reader wants, have not been staged."""

    blocks: tuple[int, ...]
    next: int


class Prefills(Offering):
    """One sequence for each try whose prompt is not yet computed."""

    def __init__(
        self, offers: Offers, scheduler: Scheduler, *, block_size: int, skip_sampling: bool, stage: Stage | None = None
    ) -> None:
        """`stage(down, now)` has a chunk staged, and it is handled then; None: steps write where readers read."""
        super().__init__(offers)
        self._scheduler = scheduler
        self._block_size = block_size
        self._skip_sampling = skip_sampling
        self._stage = stage
        self._unstaged: dict[TryId, _Unstaged] = {}
        self._tries: dict[int, TryId] = {}
        self._seqs: dict[TryId, int] = {}
        self._started_ns: dict[int, int] = {}
        self._stopping: dict[int, TryId] = {}  # stopped while in the step that is out
        self._next_seq = 0

    def owns(self, seq: int) -> bool:
        return seq in self._tries

    def progressed(self, p: Progress, row: StepRowEnded, now: int) -> list[NodeEffect]:
        """A step computed a chunk of a prompt that is still wanted."""
        try_ = self._tries[p.seq]
        if row.problem:
            return self.handle(PrefillBroke(try_=try_, problem=row.problem), now)
        if not p.prompt_done:
            return self._computed(ChunkComputed(try_=try_, ready=p.computed, digests=row.digests), now)
        prefill_ns = now - self._started_ns[p.seq]
        last = ChunkComputed(
            try_=try_,
            ready=p.computed,
            last=True,
            first_token=row.payload,
            prefill_ns=prefill_ns,
            digests=row.digests,
        )
        told = self._computed(last, now)
        return [*told, *self._forget(try_)]

    def _computed(self, chunk: ChunkComputed, now: int) -> list[NodeEffect]:
        """Of a chunk whole blocks can be read, and the partial last one at the end of the prompt."""
        if self._stage is None:
            return self.handle(chunk, now)
        unstaged = self._unstaged[chunk.try_]
        end = len(unstaged.blocks) if chunk.last else chunk.ready // self._block_size
        begin, unstaged.next = unstaged.next, max(unstaged.next, end)
        return self._stage(StageDown(chunk=chunk, blocks=unstaged.blocks[begin:end]), now)

    def step_ended(self, now: int) -> list[NodeEffect]:
        """Whatever was stopped while the step ran is written no more."""
        stopping, self._stopping = self._stopping, {}
        return [e for t in stopping.values() for e in self.handle(WritesEnded(try_=t), now)]

    def _stop(self, stop: StopPrefill, out: list[NodeEffect], queue: list[OfferEvent]) -> None:
        seq = self._seqs.get(stop.try_)
        if seq is not None and self._scheduler.in_step(seq):
            self._stopping[seq] = stop.try_
        else:
            queue.append(WritesEnded(try_=stop.try_))
        out += self._forget(stop.try_)

    def _start(self, start: StartPrefill, now: int, out: list[NodeEffect], queue: list[OfferEvent]) -> None:
        self._next_seq -= 1  # below zero: never a number of a request's
        seq = self._next_seq
        self._tries[seq], self._seqs[start.try_], self._started_ns[seq] = start.try_, seq, now
        self._scheduler.add(
            Sequence(
                seq=seq,
                order=PREFILL_ORDER - seq,
                prompt_tokens=start.prompt_tokens,
                blocks=list(start.blocks),
                block_hashes=start.block_hashes,
                computed=start.cached_tokens,
                known=start.prompt_tokens,
                growing=False,
                sample_prompt=not self._skip_sampling,
            )
        )
        self._unstaged[start.try_] = _Unstaged(start.blocks, start.have // self._block_size)
        opened = OpenSequence(seq=seq, sampling=start.sampling, try_=start.try_, digest_from=start.digest_from)
        out.append(opened)
        if self._stage is not None and start.cached_tokens > start.have:
            out += self._computed(ChunkComputed(try_=start.try_, ready=start.cached_tokens), now)

    def _forget(self, try_: TryId) -> list[NodeEffect]:
        seq = self._seqs.pop(try_, None)
        if seq is None:
            return []
        del self._tries[seq], self._started_ns[seq], self._unstaged[try_]
        self._scheduler.remove(seq)
        return [CloseSequence(seq=seq)]
