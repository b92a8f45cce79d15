"""One attempt to fetch a prompt: its states, what moves them, what ends it, and what it knows. Used by `Fetches`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import (
    LeaseId,
    PrefillAccepted,
    PrefillDone,
    PrefillProgress,
    PrefillRequest,
    RenewedEntry,
    TryId,
)

from .handoff import CheckKv, FetchAsked
from .transfer import Peer

ID_BYTES = 4  # of a block id on the wire
MS = 1_000_000
DIGEST_BYTES = 8  # of one block's KV in one layer

Announcement = PrefillAccepted | PrefillProgress | PrefillDone


class FetchState(StrEnum):
    NEXT = "next"
    READING = "reading"
    CLAIMING = "claiming"
    FETCHED = "fetched"
    LEFT = "left"


class Step(StrEnum):
    """What moves a fetch."""

    ASKED = "asked"
    COMPLETE = "complete"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    LEFT = "left"


TRANSITIONS: dict[tuple[FetchState, Step], FetchState] = {
    (FetchState.NEXT, Step.ASKED): FetchState.READING,
    (FetchState.READING, Step.COMPLETE): FetchState.CLAIMING,
    (FetchState.CLAIMING, Step.CONFIRMED): FetchState.FETCHED,
    (FetchState.READING, Step.FAILED): FetchState.NEXT,
    (FetchState.CLAIMING, Step.FAILED): FetchState.NEXT,
    (FetchState.NEXT, Step.LEFT): FetchState.LEFT,
    (FetchState.READING, Step.LEFT): FetchState.LEFT,
    (FetchState.CLAIMING, Step.LEFT): FetchState.LEFT,
}

ACTIVE = (FetchState.READING, FetchState.CLAIMING)
OVER = (FetchState.FETCHED, FetchState.LEFT)  # the request is forgotten


class Why(StrEnum):
    """Why an attempt failed."""

    REFUSED = "refused"
    NO_ANSWER = "no answer"
    NOT_HELD = "lease not held"
    NOT_RENEWED = "lease not renewed"
    STALE_PEER = "stale peer"
    OTHER_LEASE = "other lease"
    PROTOCOL = "protocol"
    READ_FAILED = "read failed"
    READ_OVERDUE = "read overdue"
    WRONG_DIGEST = "wrong digest"
    PEER_BLOCKED = "peer has an overdue read"
    MOVER_REAPED = "own mover lost"
    PREFIX_LOST = "own worker lost"
    OWNER_SILENT = "prefill node silent"
    OWNER_RESTARTED = "prefill node restarted"
    EPOCH_ENDED = "prefill node's epoch ended"
    INVALID = "claim invalid"
    UNCONFIRMED = "claim not answered"
    DEADLINE = "deadline"


class Check(StrEnum):
    """Of what was read, against its digests."""

    DUE = "due"
    OUT = "out"
    PASSED = "passed"


class Failure(NamedTuple):
    """In which states it counts, whether P still has to be told, whether to choose another node for a while."""

    states: tuple[FetchState, ...]
    cancel: bool
    suspect: bool


_READING, _CLAIMING = (FetchState.READING,), (FetchState.CLAIMING,)
_BOTH = _READING + _CLAIMING

FAILURES: dict[Why, Failure] = {
    Why.REFUSED: Failure(_READING, cancel=False, suspect=False),
    Why.NO_ANSWER: Failure(_READING, cancel=True, suspect=True),
    Why.NOT_HELD: Failure(_READING, cancel=False, suspect=False),
    Why.NOT_RENEWED: Failure(_BOTH, cancel=True, suspect=True),
    Why.STALE_PEER: Failure(_BOTH, cancel=False, suspect=True),
    Why.OTHER_LEASE: Failure(_BOTH, cancel=False, suspect=False),  # whoever named that lease is sent its cancel
    Why.PROTOCOL: Failure(_READING, cancel=True, suspect=True),
    Why.READ_FAILED: Failure(_READING, cancel=True, suspect=True),
    Why.READ_OVERDUE: Failure(_READING, cancel=True, suspect=True),
    Why.WRONG_DIGEST: Failure(_READING, cancel=True, suspect=True),
    Why.PEER_BLOCKED: Failure(_READING, cancel=True, suspect=True),
    Why.MOVER_REAPED: Failure(_READING, cancel=True, suspect=False),
    Why.PREFIX_LOST: Failure(_BOTH, cancel=True, suspect=False),
    Why.OWNER_SILENT: Failure(_BOTH, cancel=True, suspect=True),
    Why.OWNER_RESTARTED: Failure(_BOTH, cancel=False, suspect=False),
    Why.EPOCH_ENDED: Failure(_BOTH, cancel=False, suspect=False),
    Why.INVALID: Failure(_CLAIMING, cancel=False, suspect=False),
    Why.UNCONFIRMED: Failure(_CLAIMING, cancel=True, suspect=True),
    Why.DEADLINE: Failure(_BOTH, cancel=True, suspect=False),
}


class Clock(StrEnum):
    """The timers of one attempt."""

    ANSWER = "answer"
    CLAIM = "claim"
    RENEWED = "renewed"
    DEADLINE = "deadline"


@dataclass(slots=True)
class Fetch:
    """One request: its present attempt, and the token that is frozen over all of them."""

    asked: FetchAsked
    try_: TryId
    epoch: int
    first_token: bytes | None = None
    state: FetchState = FetchState.NEXT
    lease: LeaseId | None = None
    source: bytes = b""  # u32 ids of P's blocks announced so far, from the one that holds token `have` on
    ready: int = 0
    finished: bool = False
    posted: int = 0  # tokens up to which reads were posted, or that were here before
    reading: dict[int, None] = field(default_factory=dict)  # open reads of this attempt
    asks: int = 0
    claims: int = 0
    digests: bytes = b""  # as announced, of what is read
    check: Check = Check.DUE

    @property
    def peer(self) -> Peer:
        return self.asked.node, self.asked.incarnation

    def request(self, now_ns: int, *, digests: bool) -> PrefillRequest:
        """What P is asked."""
        asked = self.asked
        return PrefillRequest(
            try_=self.try_,
            sampling=asked.sampling,
            have=asked.have,
            deadline_ms=max(1, (asked.deadline_ns - now_ns) // MS),
            prompt_tokens=asked.prompt_tokens,
            prompt_digest=asked.prompt_digest,
            digests=digests,
            pair=asked.pair,
        )

    def row(self, target_size: int) -> dict[str, Any]:
        """For status and ledger."""
        return {
            "request": self.try_.request.hex(),
            "attempt": self.try_.attempt,
            "node": self.asked.node,
            "generation": self.lease.generation if self.lease else 0,
            "state": self.state.value,
            "ready": self.ready,
            "prompt_tokens": self.asked.prompt_tokens,
            "blocks_posted": -(-(self.posted - self.asked.have) // target_size),
            "reads": len(self.reading),
            "first_token": self.first_token is not None,
        }

    def consistent(self, told: RenewedEntry) -> bool:
        """As many blocks as `ready` says, and none that differs from what was announced before."""
        prompt_tokens = self.asked.prompt_tokens
        if not 0 <= told.ready <= prompt_tokens or (told.finished and told.ready < prompt_tokens):
            return False
        if len(told.blocks) != ID_BYTES * self._source_place(self._announced(told.ready)):
            return False
        longer, shorter = sorted((told.blocks, self.source), key=len, reverse=True)
        return longer.startswith(shorter)

    def readable(self, target_size: int) -> int:
        """Tokens up to which the blocks announced can be read so that each of ours, of `target_size`, is written by
        one read alone."""
        announced = self._announced(self.ready)
        return announced if announced == self.asked.prompt_tokens else announced - announced % target_size

    def source_blocks(self, begin: int, end: int) -> bytes:
        """u32 ids of P's blocks that hold these tokens."""
        first = begin // self.asked.source_size - self.asked.have // self.asked.source_size
        return self.source[ID_BYTES * first : ID_BYTES * self._source_place(end)]

    def check_kv(self, layers: int, target_size: int) -> CheckKv | None:
        """What has to be checked before the claim; None when the digests of so many layers did not come."""
        asked = self.asked
        if len(self.digests) != DIGEST_BYTES * layers * self._source_place(asked.prompt_tokens):
            return None
        return CheckKv(
            request=asked.request,
            attempt=asked.attempt,
            blocks=asked.blocks[asked.have // target_size :],
            begin=asked.have,
            end=asked.prompt_tokens,
            size=asked.source_size,
            digests=self.digests,
        )

    def _announced(self, ready: int) -> int:
        """Tokens in blocks that are announced: whole ones, and the partial last one at the end."""
        return ready if ready == self.asked.prompt_tokens else ready - ready % self.asked.source_size

    def _source_place(self, tokens: int) -> int:
        """How many of P's blocks hold tokens `have` to `tokens`."""
        size = self.asked.source_size
        return max(0, -(-tokens // size) - self.asked.have // size)


def snapshot_of(told: Announcement) -> RenewedEntry:
    """What all announcements have in common: they say how far P is."""
    return RenewedEntry(
        try_=told.try_,
        held=True,
        lease=told.lease,
        ready=told.ready,
        blocks=told.blocks,
        finished=isinstance(told, PrefillDone) or (isinstance(told, PrefillAccepted) and told.finished),
        first_token=None if isinstance(told, PrefillProgress) else told.first_token,
        block_digests=b"" if isinstance(told, PrefillProgress) else told.block_digests,
    )


def check_asked(event: FetchAsked, last: Fetch | None, size: int) -> None:
    """Raises LocalProtocolError for an attempt that makes no sense after the `last` one, in blocks of `size` tokens."""
    if last is not None and last.state is not FetchState.NEXT:
        raise LocalProtocolError(f"attempt {last.try_.attempt} of {event.request.hex()} is still {last.state}")
    if event.attempt <= (last.try_.attempt if last else 0):
        raise LocalProtocolError(f"attempt {event.attempt} of {event.request.hex()} is not higher than the last")
    if event.prompt_tokens < 1 or len(event.blocks) != -(-event.prompt_tokens // size):
        raise LocalProtocolError(f"{len(event.blocks)} blocks of {size} for {event.prompt_tokens} tokens")
    if event.source_size < 1:
        raise LocalProtocolError(f"source blocks of {event.source_size} tokens")
    if not 0 <= event.have <= event.prompt_tokens or event.have % size:
        raise LocalProtocolError(f"have {event.have}: whole blocks of {size} tokens within the prompt")
