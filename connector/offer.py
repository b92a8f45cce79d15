"""Offers: the prefill node's half of the hand-off. One machine holds every prompt computed for a decode node.

Theory of operation. A prompt is admitted with blocks for all of it, under one lease, before its first chunk. After
each chunk the reader hears which blocks it may read; the lease ends exactly once, by its reader's claim or any other
cause, through `_end` alone (R5). What an ended lease was worth is the ledger's tombstone, not a state kept here.

Blocks go free after the pop *and* after the step that writes them, by construction: the pop drops the lease's
ADVERTISED hold, and whoever runs a step holds its blocks IN_STEP from queueing to result. So `ending` delays nothing
and is only the bookkeeping of a prompt whose last step has not reported yet.

    | state      | hears                           | becomes    | and                                              |
    |------------|---------------------------------|------------|--------------------------------------------------|
    | none       | request, room                   | prefilling | grant, accepted, start                           |
    | none       | request, no room, draining, ... | none       | failed                                           |
    | prefilling | chunk                           | prefilling | progress                                         |
    | prefilling | last chunk                      | ready      | done                                             |
    | prefilling | claim                           | ending     | pop(protocol), stop, released(invalid)           |
    | prefilling | any other cause                 | ending     | pop, stop                                        |
    | ready      | claim                           | ended      | pop(done), released(valid)                       |
    | ready      | any other cause                 | ended      | pop                                              |
    | ending     | writes ended, worker lost       | ended      |                                                  |

Whatever else arrives is ordinary, late or doubled: counted, answered, without effect.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from pdbus.bus.errors import LocalProtocolError
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
    RenewedEntry,
    RenewEntry,
    StalePeer,
    TransferDone,
    TryId,
)

from .handoff import (
    Answer,
    BlockOwner,
    Cause,
    ChunkComputed,
    DrainBegan,
    EpochBegan,
    HandoffConfig,
    Holder,
    LeaseBegan,
    LeaseEnded,
    OfferEffect,
    OfferEvent,
    OfferTick,
    PrefillAsked,
    PrefillBroke,
    ReaderCame,
    ReaderGone,
    ReaderSaid,
    ReaderWatched,
    ShutdownBegan,
    StartPrefill,
    StopPrefill,
    WritesEnded,
)
from .ledger import LeaseLedger
from .offered import LIVE, TOLD, TRANSITIONS, Heard, Offer, OfferState

READERS_GONE_MAX = 1_024  # as many retired incarnations as membership remembers
RETRY_AFTER_MS = 250  # hint with no_room: about one prefill of a middling prompt
MS = 1_000_000


class Offers:
    """`name` and `incarnation` are this node's; `epoch` that of its NIXL agents, raised by EpochBegan."""

    def __init__(self, name: str, incarnation: bytes, epoch: int, owner: BlockOwner, config: HandoffConfig) -> None:
        self.name = name
        self.incarnation = incarnation
        self.epoch = epoch
        self.draining = False
        self.counters: Counter[str] = Counter()
        self._owner = owner
        self._config = config
        self._ledger = LeaseLedger(name, incarnation, config)
        self._offers: dict[TryId, Offer] = {}  # live and ending
        self._gone: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # readers proven over, oldest first
        self._watched: dict[tuple[str, bytes], None] = {}  # readers that the shell watches

    def handle(self, event: OfferEvent, now_ns: int) -> list[OfferEffect]:
        """The one door. Raises LocalProtocolError, and changes nothing, when our own engine reports nonsense."""
        match event:
            case PrefillAsked():
                return self._asked(event, now_ns)
            case ReaderSaid():
                return self._reader_said(event, now_ns)
            case ChunkComputed():
                return self._chunk_computed(event)
            case WritesEnded():
                return self._writes_ended(event.try_)
            case PrefillBroke():
                return self._prefill_broke(event, now_ns)
            case ReaderGone():
                return self._reader_gone(event, now_ns)
            case ReaderCame():
                self._gone.pop((event.node, event.incarnation), None)
                return []
            case ReaderWatched():
                return self._reader_watched(event, now_ns)
            case EpochBegan():
                return self._epoch_began(event, now_ns)
            case DrainBegan():
                self.draining = True
                return []
            case ShutdownBegan():
                self.draining = True
                return self._end_all(Cause.SHUTDOWN, now_ns)
            case OfferTick():
                return self._tick(now_ns)
        raise LocalProtocolError(f"no offer event: {type(event).__name__}")

    def next_deadline(self) -> int | None:
        return self._ledger.next_deadline()

    def held(self) -> int:
        """How many leases are held; the mover polls fast while any is."""
        return len(self._ledger)

    def oldest_ns(self) -> int | None:
        """Since when the oldest lease is held."""
        return self._ledger.oldest_ns()

    def tombstones(self) -> int:
        return self._ledger.tombstones()

    def rows(self) -> list[dict[str, Any]]:
        """Every prompt that is live or ending, for status and ledger."""
        return [offer.row() for offer in self._offers.values()]

    # ------------------------------------------------------------ a request

    def _asked(self, event: PrefillAsked, now_ns: int) -> list[OfferEffect]:
        message, try_ = event.message, event.message.try_
        if event.to_inc not in (b"", self.incarnation):
            return [self._stale(event.link, try_)]
        if (try_.node, try_.incarnation) in self._gone:
            return self._refuse(event, "stale")
        if self._ledger.of_try(try_) is not None:
            return self._asked_again(event)
        effects: list[OfferEffect] = []
        newest = self._ledger.newest(try_)
        if newest is not None:
            if newest.attempt > try_.attempt:
                return self._refuse(event, Cause.SUPERSEDED.value)
            effects += self._end_live(newest, Cause.SUPERSEDED, now_ns)
        problem = self._problem(message)
        if problem:
            return effects + self._refuse(event, problem)
        return effects + self._admit(event, now_ns)

    def _asked_again(self, event: PrefillAsked) -> list[OfferEffect]:
        """One try has one lease, ever: answered by a snapshot, or by why it ended."""
        try_ = event.message.try_
        offer = self._offers.get(try_)
        if offer is None or offer.state not in LIVE:
            lease = self._ledger.of_try(try_)
            cause = self._ledger.cause(lease) if lease else None
            return self._refuse(event, cause.value if cause else "ended", lease)
        if offer.prompt_digest != event.message.prompt_digest:
            return self._refuse(event, "conflict")
        self.counters["request.repeated"] += 1
        offer.link = event.link
        return [self._accepted(offer)]

    def _problem(self, message: PrefillRequest) -> str:
        """What no node could do, or this one not now; '' for nothing."""
        if self.draining:
            return "draining"
        if message.prompt_tokens < 1:
            return f"invalid: prompt_tokens {message.prompt_tokens}: at least 1"
        if not 0 <= message.have <= message.prompt_tokens:
            return f"invalid: have {message.have}: must be within the prompt"
        if message.deadline_ms < 1:
            return f"invalid: deadline_ms {message.deadline_ms}: at least 1"
        return ""

    def _admit(self, event: PrefillAsked, now_ns: int) -> list[OfferEffect]:
        """Blocks for the whole prompt, or none."""
        message = event.message
        room = len(self._ledger) < self._config.leases_max
        reserved = self._owner.reserve(message.prompt_tokens, event.block_hashes, Holder.ADVERTISED) if room else None
        if reserved is None:
            return self._refuse(event, "no_room", retry_after_ms=RETRY_AFTER_MS)
        deadline_ns = now_ns + message.deadline_ms * MS
        lease = self._ledger.grant(message.try_, reserved.blocks, self.epoch, deadline_ns, now_ns)
        if (message.try_.node, message.try_.incarnation) in self._watched:
            self._ledger.keep(lease)
        offer = Offer(
            try_=message.try_,
            link=event.link,
            lease=lease,
            blocks=reserved.blocks,
            prompt_tokens=message.prompt_tokens,
            prompt_digest=message.prompt_digest,
            have=message.have,
            ready=0 if self._config.staged else reserved.cached_tokens,
        )
        self._offers[offer.try_] = offer
        self._move(offer, Heard.ADMITTED)
        start = StartPrefill(
            try_=offer.try_,
            prompt_tokens=offer.prompt_tokens,
            cached_tokens=reserved.cached_tokens,
            blocks=offer.blocks,
            block_hashes=event.block_hashes,
            sampling=message.sampling,
            have=message.have,
            digest_from=message.have if message.digests else -1,
        )
        began = LeaseBegan(lease=lease, try_=offer.try_, blocks=len(offer.blocks))
        return [began, self._accepted(offer), start]

    # ------------------------------------------------------------ the engine

    def _chunk_computed(self, event: ChunkComputed) -> list[OfferEffect]:
        offer = self._offers.get(event.try_)
        heard = Heard.LAST_CHUNK if event.last else Heard.CHUNK
        if offer is None or (offer.state, heard) not in TRANSITIONS:
            self.counters["chunk.late"] += 1
            return []
        if not offer.ready <= event.ready <= offer.prompt_tokens or event.last != (event.ready == offer.prompt_tokens):
            raise LocalProtocolError(
                f"a chunk up to token {event.ready} (last: {event.last}) of {offer.prompt_tokens}, after {offer.ready}"
            )
        offer.ready, offer.first_token = event.ready, event.first_token
        offer.digests += event.digests
        self._move(offer, heard)
        if not event.last:
            blocks = offer.announced(self._owner.block_size)
            progress = PrefillProgress(try_=offer.try_, lease=offer.lease, ready=offer.ready, blocks=blocks)
            return [self._answer(offer.link, offer.try_, progress)]
        done = PrefillDone(
            try_=offer.try_,
            lease=offer.lease,
            ready=offer.ready,
            blocks=offer.announced(self._owner.block_size),
            first_token=offer.first_token,
            prefill_ns=event.prefill_ns,
            block_digests=offer.digests,
        )
        return [self._answer(offer.link, offer.try_, done)]

    def _writes_ended(self, try_: TryId) -> list[OfferEffect]:
        offer = self._offers.get(try_)
        if offer is None or (offer.state, Heard.WRITES_ENDED) not in TRANSITIONS:
            self.counters["writes_ended.late"] += 1
        else:
            self._move(offer, Heard.WRITES_ENDED)
        return []

    def _prefill_broke(self, event: PrefillBroke, now_ns: int) -> list[OfferEffect]:
        return self._end_live(event.try_, Cause.FAILED, now_ns, f"{Cause.FAILED}: {event.problem}")

    # ------------------------------------------------------------ the reader

    def _reader_said(self, event: ReaderSaid, now_ns: int) -> list[OfferEffect]:
        message = event.message
        if isinstance(message, StalePeer):
            self.counters["stale_peer"] += 1  # no proof that the reader is over: hello or goodbye is (R11)
            return []
        if not isinstance(message, (TransferDone, PrefillCancel, LeaseRenew)):
            self.counters[f"unexpected.{message.KIND}"] += 1
            return []
        if event.to_inc != self.incarnation:
            tries = [e.try_ for e in message.entries] if isinstance(message, LeaseRenew) else [message.try_]
            return [self._stale(event.link, try_, event.node, event.incarnation) for try_ in tries]
        if isinstance(message, LeaseRenew):
            entries = tuple(self._renewed(event, entry, now_ns) for entry in message.entries)
            return [self._answer_to(event, LeaseRenewed(entries=entries))]
        if isinstance(message, TransferDone):
            return self._claimed(event, message, now_ns)
        return self._cancelled(event, message, now_ns)

    def _claimed(self, event: ReaderSaid, message: TransferDone, now_ns: int) -> list[OfferEffect]:
        """R1, R2: the only answer that makes KV valid."""
        offer = self._offer_of(event, message.try_)
        effects: list[OfferEffect] = []
        if offer is not None and offer.lease == message.lease and offer.state in LIVE:
            cause = Cause.DONE if offer.state is OfferState.READY else Cause.PROTOCOL
            effects = self._end(offer, cause, now_ns)
        else:
            self.counters["claim.late"] += 1
        valid = self._ledger.claim(message.lease, message.try_) and _is_from(event, message.try_)
        ended = self._ledger.cause(message.lease)
        cause_text = ended.value if ended else "unknown"
        released = LeaseReleased(try_=message.try_, lease=message.lease, valid=valid, cause=cause_text)
        return [*effects, self._answer_to(event, released)]

    def _cancelled(self, event: ReaderSaid, message: PrefillCancel, now_ns: int) -> list[OfferEffect]:
        offer = self._offer_of(event, message.try_)
        effects: list[OfferEffect] = []
        if offer is not None and offer.state in LIVE and message.lease in (None, offer.lease):
            effects = self._end(offer, Cause.CANCELLED, now_ns)
        else:
            self.counters["cancel.late"] += 1
        return [*effects, self._answer_to(event, PrefillCancelled(try_=message.try_))]

    def _renewed(self, event: ReaderSaid, entry: RenewEntry, now_ns: int) -> RenewedEntry:
        """Extends what is held; never creates, never revives."""
        offer = self._offer_of(event, entry.try_)
        if offer is None or offer.state not in LIVE or entry.lease not in (None, offer.lease):
            self.counters["renew.not_held"] += 1
            return RenewedEntry(try_=entry.try_, held=False, lease=entry.lease)
        if (event.node, event.incarnation) not in self._watched:
            self._ledger.renew(offer.lease, now_ns)
        offer.link = event.link
        return RenewedEntry(try_=offer.try_, held=True, **offer.snapshot(self._owner.block_size))

    def _reader_gone(self, event: ReaderGone, now_ns: int) -> list[OfferEffect]:
        reader = (event.node, event.incarnation)
        self._gone[reader] = None
        if len(self._gone) > READERS_GONE_MAX:
            self._gone.popitem(last=False)
        gone = [o for o in self._offers.values() if (o.try_.node, o.try_.incarnation) == reader and o.state in LIVE]
        return [effect for offer in gone for effect in self._end(offer, Cause.READER_DEAD, now_ns)]

    def _reader_watched(self, event: ReaderWatched, now_ns: int) -> list[OfferEffect]:
        """Every lease counts as renewed now."""
        reader = (event.node, event.incarnation)
        if event.watched:
            self._watched[reader] = None
        else:
            self._watched.pop(reader, None)
        for offer in self._offers.values():
            if (offer.try_.node, offer.try_.incarnation) == reader and offer.state in LIVE:
                if event.watched:
                    self._ledger.keep(offer.lease)
                else:
                    self._ledger.renew(offer.lease, now_ns)
        return []

    # ------------------------------------------------------------ the node

    def _epoch_began(self, event: EpochBegan, now_ns: int) -> list[OfferEffect]:
        """Every lease of an older epoch ends before anything is admitted to the new one."""
        if event.epoch <= self.epoch:
            raise LocalProtocolError(f"epoch {event.epoch} after {self.epoch}: epochs only rise")
        self.epoch = event.epoch
        effects = self._end_all(Cause.WORKER_DEAD, now_ns)
        if event.pool_reset:  # no worker, no step left that writes
            for offer in list(self._offers.values()):
                self._move(offer, Heard.WORKER_LOST)
        return effects

    def _tick(self, now_ns: int) -> list[OfferEffect]:
        effects: list[OfferEffect] = []
        while (due := self._ledger.due(now_ns)) is not None:
            lease, cause = due
            grant = self._ledger.held(lease)
            if grant is not None:
                effects += self._end_live(grant.try_, cause, now_ns)
        return effects

    # ------------------------------------------------------------ the one end

    def _end(self, offer: Offer, cause: Cause, now_ns: int, told: str = "") -> list[OfferEffect]:
        """Exactly once for each lease: the ledger refuses a second pop."""
        grant = self._ledger.pop(offer.lease, cause, now_ns)
        self._owner.drop(grant.blocks, Holder.ADVERTISED)
        effects: list[OfferEffect] = []
        if offer.state is OfferState.PREFILLING:
            effects.append(StopPrefill(try_=offer.try_))
        held_ns = now_ns - grant.granted_ns
        effects.append(LeaseEnded(lease=offer.lease, try_=offer.try_, cause=cause, held_ns=held_ns))
        if cause in TOLD:
            failed = PrefillFailed(try_=offer.try_, cause=told or cause.value, lease=offer.lease)
            effects.append(self._answer(offer.link, offer.try_, failed))
        self._move(offer, Heard.POPPED)
        return effects

    def _end_live(self, try_: TryId, cause: Cause, now_ns: int, told: str = "") -> list[OfferEffect]:
        offer = self._offers.get(try_)
        if offer is None or offer.state not in LIVE:
            return []
        return self._end(offer, cause, now_ns, told)

    def _end_all(self, cause: Cause, now_ns: int) -> list[OfferEffect]:
        return [effect for grant in self._ledger.grants() for effect in self._end_live(grant.try_, cause, now_ns)]

    def _move(self, offer: Offer, heard: Heard) -> None:
        offer.state = TRANSITIONS[offer.state, heard]
        if offer.state is OfferState.ENDED:
            del self._offers[offer.try_]

    # ------------------------------------------------------------ words

    def _offer_of(self, event: ReaderSaid, try_: TryId) -> Offer | None:
        """Only its own reader speaks for a try."""
        return self._offers.get(try_) if _is_from(event, try_) else None

    def _accepted(self, offer: Offer) -> Answer:
        so_far = offer.snapshot(self._owner.block_size)
        return self._answer(offer.link, offer.try_, PrefillAccepted(try_=offer.try_, **so_far))

    def _refuse(
        self, event: PrefillAsked, cause: str, lease: LeaseId | None = None, retry_after_ms: int = 0
    ) -> list[OfferEffect]:
        self.counters["request.refused"] += 1
        try_ = event.message.try_
        failed = PrefillFailed(try_=try_, cause=cause, lease=lease, retry_after_ms=retry_after_ms)
        return [self._answer(event.link, try_, failed)]

    def _stale(self, link: str, try_: TryId, to: str = "", to_inc: bytes = b"") -> Answer:
        self.counters["request.stale"] += 1
        stale = StalePeer(current=self.incarnation, try_=try_)
        return Answer(link=link, to=to or try_.node, to_inc=to_inc or try_.incarnation, message=stale)

    def _answer(self, link: str, try_: TryId, message: Message) -> Answer:
        return Answer(link=link, to=try_.node, to_inc=try_.incarnation, message=message)

    def _answer_to(self, event: ReaderSaid, message: Message) -> Answer:
        return Answer(link=event.link, to=event.node, to_inc=event.incarnation, message=message)


def _is_from(event: ReaderSaid, try_: TryId) -> bool:
    return (event.node, event.incarnation) == (try_.node, try_.incarnation)
