"""Prompts computed here for other nodes: what `Offers` decides becomes sequences, and steps become its news.

Where readers read from a mirror of the device's memory, a chunk is news only once it has been staged down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdbus.bus.messages import TryId
from pdbus.connector.events import lease_event
from pdbus.connector.handoff import (
    Answer,
    ChunkComputed,
    LeaseBegan,
    LeaseEnded,
    OfferEffect,
    OfferEvent,
    PrefillBroke,
    StartPrefill,
    StopPrefill,
    WritesEnded,
)
from pdbus.connector.offer import Offers
from pdbus.connector.staging import StageDown

from .events import AdvertiseLeases, CloseSequence, NodeEffect, OpenSequence, Send, StepRowEnded
from .scheduler import Progress, Scheduler, Sequence

PREFILL_ORDER = 1 << 40  # a prompt for another node is younger than any request of this one's own


Stage = Callable[[StageDown, int], list[NodeEffect]]


@dataclass(slots=True)
class _Unstaged:
    """Of a prompt's blocks those from place `next` on, which its reader wants, have not been staged."""

    blocks: tuple[int, ...]
    next: int


class Prefills:
    """One sequence for each try whose prompt is not yet computed."""

    def __init__(
        self, offers: Offers, scheduler: Scheduler, *, block_size: int, skip_sampling: bool, stage: Stage | None = None
    ) -> None:
        """`stage(down, now)` has a chunk staged, and it is handled then; None: steps write where readers read."""
        self._offers = offers
        self._scheduler = scheduler
        self._block_size = block_size
        self._skip_sampling = skip_sampling
        self._stage = stage
        self._unstaged: dict[TryId, _Unstaged] = {}
        self._tries: dict[int, TryId] = {}
        self._seqs: dict[TryId, int] = {}
        self._started_ns: dict[int, int] = {}
        self._stopping: dict[int, TryId] = {}  # stopped while in the step that is out
        self._leases: dict[str, int] = {}  # how many each decode node holds
        self._next_seq = 0

    def handle(self, event: OfferEvent, now: int) -> list[NodeEffect]:
        """Let the offering half decide, and carry out what it decides."""
        out: list[NodeEffect] = []
        held = self._offers.held()
        queue: list[OfferEvent] = [event]
        while queue:
            for effect in self._offers.handle(queue.pop(0), now):
                self._carry_out(effect, now, out, queue)
        if self._offers.held() != held:
            out.append(AdvertiseLeases(leases=self._offers.held()))
        return out

    def owns(self, seq: int) -> bool:
        return seq in self._tries

    def readers(self) -> Mapping[str, int]:
        """How many leases each decode node holds that holds any, now."""
        return self._leases

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

    def _carry_out(self, effect: OfferEffect, now: int, out: list[NodeEffect], queue: list[OfferEvent]) -> None:
        match effect:
            case Answer():
                out.append(Send(link=effect.link, to=effect.to, to_inc=effect.to_inc, message=effect.message))
            case StartPrefill():
                out += self._start(effect, now)
            case StopPrefill():
                seq = self._seqs.get(effect.try_)
                if seq is not None and self._scheduler.in_step(seq):
                    self._stopping[seq] = effect.try_
                else:
                    queue.append(WritesEnded(try_=effect.try_))
                out += self._forget(effect.try_)
            case LeaseBegan():
                self._leases[effect.try_.node] = self._leases.get(effect.try_.node, 0) + 1
                out.append(lease_event("lease.began", effect, blocks=effect.blocks))
            case LeaseEnded():
                self._leases[effect.try_.node] -= 1
                if not self._leases[effect.try_.node]:
                    del self._leases[effect.try_.node]
                out.append(lease_event("lease.ended", effect, cause=str(effect.cause), held_ns=effect.held_ns))

    def _start(self, start: StartPrefill, now: int) -> list[NodeEffect]:
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
        if self._stage is None or start.cached_tokens <= start.have:
            return [opened]
        return [opened, *self._computed(ChunkComputed(try_=start.try_, ready=start.cached_tokens), now)]

    def _forget(self, try_: TryId) -> list[NodeEffect]:
        seq = self._seqs.pop(try_, None)
        if seq is None:
            return []
        del self._tries[seq], self._started_ns[seq], self._unstaged[try_]
        self._scheduler.remove(seq)
        return [CloseSequence(seq=seq)]
