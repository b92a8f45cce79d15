"""What the two halves of a hand-off hear and decide: events and effects of `Offers` (on P) and `Fetches` (on D).

The halves know no model, socket or scheduler. They hold blocks through a `BlockOwner`, which under our own
engine is the node's `BlockPool` and elsewhere whoever owns the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from pdbus.bus.messages import (
    LeaseId,
    LeaseReleased,
    LeaseRenew,
    LeaseRenewed,
    Message,
    PrefillAccepted,
    PrefillCancel,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillRequest,
    Sampling,
    StalePeer,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import Declared, Header


class Holder(StrEnum):
    """Why a block in use may not be given to anyone."""

    HELD = "held"  # a sequence on this node
    ADVERTISED = "advertised"  # a lease
    IN_FLIGHT = "in flight"  # a read that may still write into it
    IN_STEP = "in step"  # a forward pass that may still write into it
    IN_COPY = "in copy"  # a copy between device and mirror


class Cause(StrEnum):
    """Why a lease ended. Exactly one is recorded for each (R5)."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    READER_DEAD = "reader dead"
    WORKER_DEAD = "worker dead"
    FAILED = "failed"
    PROTOCOL = "protocol"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class Reservation(Declared):
    """Blocks for a whole prompt, in order; the first `cached_tokens` tokens need no computing."""

    blocks: tuple[int, ...]
    cached_tokens: int


class BlockOwner(Protocol):
    """Who owns the KV memory."""

    block_size: int

    def reserve(self, tokens: int, block_hashes: Sequence[bytes], holder: Holder) -> Reservation | None:
        """Blocks for `tokens` tokens, each held once by `holder`; a cached prefix is shared, at most (tokens - 1)
        // block_size blocks of it, since the last position is always computed. None: no room, nothing changed."""
        ...

    def hold(self, blocks: Sequence[int], holder: Holder) -> None: ...

    def drop(self, blocks: Sequence[int], holder: Holder) -> None: ...


class HandoffConfig(Declared):
    """Timers of the hand-off (docs/protocol.md). For liveness and waste only: no rule needs one to be safe."""

    lease_ns: int = 30_000_000_000
    renew_ns: int = 5_000_000_000
    claim_ns: int = 2_000_000_000
    claim_repeats: int = 2
    answer_ns: int = 1_000_000_000  # accepted or failed, repeated once
    tombstone_ns: int = 60_000_000_000
    tombstones_max: int = 65_536
    read_floor_ns: int = 2_000_000_000  # a read is late after so long, and more by its size (transfer.py)
    block_bytes: int = 0  # of one KV block; 0: the size does not count
    leases_max: int = 4_096  # a bound on what strangers' requests may allocate
    digest_layers: int = 0  # KV digests of so many layers are asked for and checked; 0: none are
    staged: bool = False  # reads begin and land in a mirror of the device's memory (staging.py)

    @property
    def attempt_ns(self) -> int:
        """The least time a further attempt may need beside its prefill: an answer, a slow read, the claim window."""
        return self.answer_ns + self.read_floor_ns + self.claim_ns * (1 + self.claim_repeats)


# ---------------------------------------------------------------- P: what Offers hears


class OfferEvent(Declared, tag_field="t", tag=True):
    pass


class PrefillAsked(OfferEvent):
    """A prefill.request came; the shell adds the hashes of the prompt's full blocks and the opaque prompt handle."""

    link: str
    message: PrefillRequest
    block_hashes: tuple[bytes, ...]
    to_inc: bytes = b""  # from the header; one that is not ours is answered by stale_peer, b'' is not checked


class ReaderSaid(OfferEvent):
    """transfer.done, lease.renew or prefill.cancel, from that incarnation of that node, addressed to `to_inc`."""

    link: str
    node: str
    incarnation: bytes
    to_inc: bytes
    message: Message


class ChunkComputed(OfferEvent):
    """KV of the first `ready` tokens can be read. `last` with the first token (none: sampling skipped)."""

    try_: TryId
    ready: int
    last: bool = False
    first_token: bytes | None = None
    prefill_ns: int = 0
    digests: bytes = b""  # of the blocks that this chunk has filled


class WritesEnded(OfferEvent):
    """After StopPrefill: no step is left that writes this try's blocks."""

    try_: TryId


class PrefillBroke(OfferEvent):
    """The engine failed this one prompt (not the worker): the lease ends with cause failed."""

    try_: TryId
    problem: str


class ReaderGone(OfferEvent):
    """Proof that this incarnation is over: a hello of its successor, or its goodbye."""

    node: str
    incarnation: bytes


class ReaderCame(OfferEvent):
    """This incarnation has said hello: perhaps again, after a goodbye that was not its end."""

    node: str
    incarnation: bytes


class ReaderWatched(OfferEvent):
    """Whether the shell watches this decode node: then its leases do not expire, and need no renewing."""

    node: str
    incarnation: bytes
    watched: bool


class EpochBegan(OfferEvent):
    """The loss of a worker or mover raised the epoch: every lease of an older one ends, before anything else."""

    epoch: int
    pool_reset: bool  # the worker's KV is gone, not only the agent


class DrainBegan(OfferEvent):
    pass


class ShutdownBegan(OfferEvent):
    pass


class OfferTick(OfferEvent):
    pass


# ---------------------------------------------------------------- P: what Offers decides


class OfferEffect(Declared, tag_field="t", tag=True):
    pass


class Answer(OfferEffect):
    """Say this on the connection that asked."""

    link: str
    to: str
    to_inc: bytes
    message: Message


class StartPrefill(OfferEffect):
    """Compute tokens cached_tokens..prompt_tokens into these blocks, chunk by chunk, sampling after the last."""

    try_: TryId
    prompt_tokens: int
    cached_tokens: int
    blocks: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    sampling: Sampling
    have: int = 0  # the reader needs none of the tokens before
    digest_from: int = -1  # KV digests are wanted of tokens from here on; -1: of none


class StopPrefill(OfferEffect):
    """Compute no further chunk of it. Answered by WritesEnded, at once if no step runs."""

    try_: TryId


class LeaseBegan(OfferEffect):
    lease: LeaseId
    try_: TryId
    blocks: int


class LeaseEnded(OfferEffect):
    """The one release. The blocks have been dropped."""

    lease: LeaseId
    try_: TryId
    cause: Cause
    held_ns: int


# ---------------------------------------------------------------- D: what Fetches hears


class FetchEvent(Declared, tag_field="t", tag=True):
    pass


class FetchAsked(FetchEvent):
    """Fetch a prompt's KV from this prefill node into these blocks (the whole prompt's, by position).

    The first `have` tokens are in place already, a multiple of the block size. `source_size` is that of the prefill
    node's blocks, in tokens. `deadline_ns` is absolute.
    """

    request: bytes
    attempt: int
    node: str
    incarnation: bytes
    epoch: int
    link: str
    source_size: int
    prompt_tokens: int
    have: int
    prompt_digest: bytes
    sampling: Sampling
    blocks: tuple[int, ...]
    deadline_ns: int
    pair: bytes = b""  # names the request that the prefill node has of its own; b'': it is told the prompt


class OwnerSaid(FetchEvent):
    """Any hand-off message of a prefill node: the answers, progress, done, stale_peer."""

    link: str
    node: str
    incarnation: bytes
    message: Message


class ReadDone(FetchEvent):
    """Terminal: all bytes are in place."""

    read: int


class ReadFailed(FetchEvent):
    """Terminal: nothing more will be written, what is there is garbage."""

    read: int
    problem: str


class ReadOverdue(FetchEvent):
    """NIXL raised something that proves nothing: treated like a passed deadline; the handle lives on."""

    read: int
    problem: str


class MoverReaped(FetchEvent):
    """Our own mover's process is gone (reaped, not merely silent): no read of it writes any more."""


class PrefixesLost(FetchEvent):
    """The device's memory is gone with its worker, and in it the `have` tokens that attempts build upon. What was read
    is in the mirror, and stays."""


class OwnerGone(FetchEvent):
    """The prefill node is dead by silence, left, or came back as another incarnation."""

    node: str
    incarnation: bytes
    proven: bool


class OwnerEpoch(FetchEvent):
    """The prefill node announced a new agent epoch: leases of older ones have ended."""

    node: str
    incarnation: bytes
    epoch: int


class KvChecked(FetchEvent):
    """The answer to CheckKv. `problem` names the first block and layer whose digest is another, '' if none is."""

    request: bytes
    attempt: int
    problem: str = ""


class OwnerWatched(FetchEvent):
    """Whether the shell watches this prefill node: then its leases do not expire, and nothing is renewed there."""

    node: str
    incarnation: bytes
    watched: bool


class FetchLeft(FetchEvent):
    """The request needs this no longer: cancelled by the client, past its deadline, or ended by its first token."""

    request: bytes


class FetchTick(FetchEvent):
    pass


# ---------------------------------------------------------------- D: what Fetches decides


class FetchEffect(Declared, tag_field="t", tag=True):
    pass


class Ask(FetchEffect):
    """Send this prefill.request; the shell adds the prompt's ids as a raw frame."""

    link: str
    to: str
    to_inc: bytes
    message: PrefillRequest


class Say(FetchEffect):
    link: str
    to: str
    to_inc: bytes
    message: Message


class PostRead(FetchEffect):
    """Read tokens `begin` to `end`: `source` are the prefill node's blocks that hold them, `target` ours. These are
    held IN_FLIGHT until the read's terminal status."""

    read: int
    request: bytes
    node: str
    incarnation: bytes
    epoch: int
    begin: int
    end: int
    source: tuple[int, ...]
    target: tuple[int, ...]


class CheckKv(FetchEffect):
    """All is read: digest tokens `begin` to `end` in `blocks`, cut as if in blocks of `size`, and compare."""

    request: bytes
    attempt: int
    blocks: tuple[int, ...]
    begin: int
    end: int
    size: int
    digests: bytes


class FirstTokenKnown(FetchEffect):
    """Once per request at most: from whichever attempt was first (R8). `payload` is an encoded FirstToken."""

    request: bytes
    attempt: int
    payload: bytes


class PrefillFinished(FetchEffect):
    """prefill.done was heard; for the timeline."""

    request: bytes
    attempt: int


class ReadsFinished(FetchEffect):
    """All reads are terminal and good, the claim is on its way; for the timeline."""

    request: bytes
    attempt: int


class Fetched(FetchEffect):
    """Confirmed: the KV of the whole prompt is valid in the request's blocks."""

    request: bytes
    attempt: int


class AttemptFailed(FetchEffect):
    """This attempt is over; its blocks must not be used again by the request. Another may be tried. `peer_suspect`:
    choose another node for a while."""

    request: bytes
    attempt: int
    cause: str
    node: str
    peer_suspect: bool = False


# ---------------------------------------------------------------- what of the bus is whose


READER_MESSAGES = (TransferDone, LeaseRenew, PrefillCancel)
OWNER_MESSAGES = (
    PrefillAccepted, PrefillProgress, PrefillDone, PrefillFailed, PrefillCancelled, LeaseReleased, LeaseRenewed,
    StalePeer,
)  # fmt: skip


def said(link: str, header: Header, message: Message) -> ReaderSaid | OwnerSaid | None:
    """A message of the hand-off, as the half that it is for hears it; None for any other."""
    node, incarnation = header.from_, header.from_inc
    if isinstance(message, READER_MESSAGES):
        return ReaderSaid(link=link, node=node, incarnation=incarnation, to_inc=header.to_inc, message=message)
    if isinstance(message, OWNER_MESSAGES):
        return OwnerSaid(link=link, node=node, incarnation=incarnation, message=message)
    return None
