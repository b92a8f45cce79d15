"""One prompt offered to a decode node: its states, what moves them, what it knows. Used by `Offers`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdbus.bus.messages import LeaseId, TryId
from pdbus.bus.wire import pack_u32

from .handoff import Cause


class OfferState(StrEnum):
    NONE = "none"
    PREFILLING = "prefilling"
    READY = "ready"
    ENDING = "ending"
    ENDED = "ended"


class Heard(StrEnum):
    """What moves an offer."""

    ADMITTED = "admitted"
    CHUNK = "chunk"
    LAST_CHUNK = "last chunk"
    POPPED = "popped"
    WRITES_ENDED = "writes ended"
    WORKER_LOST = "worker lost"


TRANSITIONS: dict[tuple[OfferState, Heard], OfferState] = {
    (OfferState.NONE, Heard.ADMITTED): OfferState.PREFILLING,
    (OfferState.PREFILLING, Heard.CHUNK): OfferState.PREFILLING,
    (OfferState.PREFILLING, Heard.LAST_CHUNK): OfferState.READY,
    (OfferState.PREFILLING, Heard.POPPED): OfferState.ENDING,
    (OfferState.READY, Heard.POPPED): OfferState.ENDED,
    (OfferState.ENDING, Heard.WRITES_ENDED): OfferState.ENDED,
    (OfferState.ENDING, Heard.WORKER_LOST): OfferState.ENDED,
}

LIVE = (OfferState.PREFILLING, OfferState.READY)  # the lease is held

# Causes that the reader cannot know yet: it is told by prefill.failed, so that its next attempt starts at once.
TOLD = (Cause.EXPIRED, Cause.FAILED, Cause.WORKER_DEAD, Cause.DEADLINE, Cause.SHUTDOWN)


@dataclass(slots=True)
class Offer:
    """One prompt from admission until nothing writes its blocks any more."""

    try_: TryId
    link: str
    lease: LeaseId
    blocks: tuple[int, ...]
    prompt_tokens: int
    prompt_digest: bytes
    have: int
    ready: int  # tokens whose KV can be read from the blocks
    state: OfferState = OfferState.NONE
    first_token: bytes | None = None
    digests: bytes = b""  # of its blocks so far, if the reader wants them

    def announced(self, size: int) -> bytes:
        """u32 ids of the blocks, of `size` tokens, that hold tokens have..ready: whole ones, the partial last one only
        at the end. The reader's blocks may be of another size: the first may hold tokens before `have`."""
        end = len(self.blocks) if self.ready == self.prompt_tokens else self.ready // size
        return pack_u32(self.blocks[self.have // size : end])

    def snapshot(self, size: int) -> dict[str, Any]:
        """How far it is, in blocks of `size` tokens: what answers and renewals have in common."""
        finished = self.state is OfferState.READY
        return {
            "lease": self.lease,
            "ready": self.ready,
            "blocks": self.announced(size),
            "finished": finished,
            "first_token": self.first_token,
            "block_digests": self.digests if finished else b"",
        }

    def row(self) -> dict[str, Any]:
        """For status and ledger."""
        return {
            "request": self.try_.request.hex(),
            "attempt": self.try_.attempt,
            "reader": self.try_.node,
            "generation": self.lease.generation,
            "epoch": self.lease.epoch,
            "state": self.state.value,
            "ready": self.ready,
            "prompt_tokens": self.prompt_tokens,
            "blocks": len(self.blocks),
        }
