"""Fetches: the decode node's half of the hand-off. One machine holds every prompt that is fetched from a prefill node.

Theory of operation. An attempt asks one prefill node, learns block ids chunk by chunk and posts a read for each
announcement. Announcements (accepted, progress, done, a renewal's answer) are cumulative and may come in any order:
the longest wins, the first one binds the attempt to its lease, another lease ends it (R3). When everything is
announced and every read terminal, the claim asks whether the lease was held throughout; only its answer makes the KV
valid (R1). No clock decides that: timers repeat what may be lost and leave what does not answer.

    | state    | hears                                  | becomes  | and                                       |
    |----------|----------------------------------------|----------|-------------------------------------------|
    | next     | asked                                  | reading  | request                                   |
    | reading  | accepted, progress, done, renewed      | reading  | bind, first token, post                   |
    | reading  | the last of: all announced, all read   | claiming | claim                                     |
    | reading  | no answer in time                      | reading  | request again, once                       |
    | claiming | no answer in time                      | claiming | claim again, `claim_repeats` times        |
    | claiming | released(valid), of this lease         | fetched  | forget the request                        |
    | reading, | a failure that counts in this state    | next     | cancel unless P said ended, leave reads   |
    | claiming | (attempt.py, FAILURES)                 |          |                                           |
    | any      | left                                   | left     | cancel, leave reads, forget the request   |

Leaving reads quarantines their blocks (transfer.py); the caller gives the next attempt other blocks (R7). The first
token is frozen over all attempts of a request (R8), and remembered only as long as the request is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import (
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
    RenewedEntry,
    RenewEntry,
    StalePeer,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import unpack_u32

from .attempt import (
    ACTIVE,
    FAILURES,
    OVER,
    TRANSITIONS,
    Announcement,
    Check,
    Clock,
    Fetch,
    FetchState,
    Step,
    Why,
    check_asked,
    snapshot_of,
)
from .handoff import (
    Ask,
    AttemptFailed,
    BlockOwner,
    FetchAsked,
    Fetched,
    FetchEffect,
    FetchEvent,
    FetchLeft,
    FetchTick,
    FirstTokenKnown,
    HandoffConfig,
    KvChecked,
    MoverReaped,
    OwnerEpoch,
    OwnerGone,
    OwnerSaid,
    OwnerWatched,
    PostRead,
    PrefillFinished,
    PrefixesLost,
    ReadDone,
    ReadFailed,
    ReadOverdue,
    ReadsFinished,
    Say,
)
from .timers import Timers, earliest
from .transfer import Heard, Peer, Transfers

ASKS_MAX = 2  # the request and one repeat; a third silence in a row would cost more than another node


class Fetches:
    """`name` and `incarnation` are this node's. The caller holds the blocks of a request HELD; reads hold them too."""

    def __init__(self, name: str, incarnation: bytes, owner: BlockOwner, config: HandoffConfig) -> None:
        self.name = name
        self.incarnation = incarnation
        self.transfers = Transfers(owner, config)
        self.counters: Counter[str] = Counter()
        self._owner = owner
        self._config = config
        self._fetches: dict[bytes, Fetch] = {}
        self._by_peer: dict[Peer, dict[bytes, None]] = {}  # requests in reading or claiming
        self._watched: dict[Peer, None] = {}  # by the shell
        self._cancels: dict[TryId, Say] = {}  # said once, to be said once more
        self._clocks: Timers[tuple[Clock, bytes]] = Timers()
        self._renewals: Timers[Peer] = Timers()
        self._cancel_clocks: Timers[TryId] = Timers()

    def handle(self, event: FetchEvent, now_ns: int) -> list[FetchEffect]:
        """The one door. Raises LocalProtocolError, and changes nothing, for a FetchAsked that makes no sense."""
        match event:
            case FetchAsked():
                return self._asked(event, now_ns)
            case OwnerSaid():
                return self._owner_said(event, now_ns)
            case ReadDone():
                return self._read_done(event.read, now_ns)
            case ReadFailed():
                return self._read_ended(event.read, Heard.FAILED, Why.READ_FAILED, now_ns)
            case ReadOverdue():
                return self._read_ended(event.read, Heard.OVERDUE, Why.READ_OVERDUE, now_ns)
            case KvChecked():
                return self._kv_checked(event, now_ns)
            case MoverReaped():
                return self._mover_reaped(now_ns)
            case PrefixesLost():
                lost = [fetch for fetch in self._fetches.values() if fetch.asked.have and fetch.state in ACTIVE]
                return self._fail_all(lost, Why.PREFIX_LOST, now_ns)
            case OwnerGone():
                why = Why.OWNER_RESTARTED if event.proven else Why.OWNER_SILENT
                return self._fail_all(self._at((event.node, event.incarnation)), why, now_ns)
            case OwnerEpoch():
                return self._owner_epoch(event, now_ns)
            case OwnerWatched():
                return self._owner_watched(event, now_ns)
            case FetchLeft():
                return self._left(event.request, now_ns)
            case FetchTick():
                return self._tick(now_ns)
        raise LocalProtocolError(f"no fetch event: {type(event).__name__}")

    def next_deadline(self) -> int | None:
        return earliest(
            self._clocks.next_deadline(),
            self._renewals.next_deadline(),
            self._cancel_clocks.next_deadline(),
            self.transfers.next_deadline(),
        )

    def peer_blocked(self, node: str, incarnation: bytes) -> bool:
        """R9: asking this node now would fail at once."""
        return self.transfers.peer_blocked(node, incarnation)

    def rows(self) -> list[dict[str, Any]]:
        """Every request known here, for status and ledger; open reads are in `transfers.rows()`."""
        return [fetch.row(self._owner.block_size) for fetch in self._fetches.values()]

    # ------------------------------------------------------------ an attempt begins

    def _asked(self, event: FetchAsked, now_ns: int) -> list[FetchEffect]:
        last = self._fetches.get(event.request)
        check_asked(event, last, self._owner.block_size)
        try_ = TryId(node=self.name, incarnation=self.incarnation, request=event.request, attempt=event.attempt)
        first = last.first_token if last else None
        fetch = Fetch(asked=event, try_=try_, epoch=event.epoch, first_token=first, posted=event.have)
        fetch.state = TRANSITIONS[fetch.state, Step.ASKED]
        self._fetches[event.request] = fetch
        self._by_peer.setdefault(fetch.peer, {})[event.request] = None
        if event.deadline_ns <= now_ns:
            return self._fail(fetch, Why.DEADLINE, now_ns)
        if self.peer_blocked(*fetch.peer):
            return self._fail(fetch, Why.PEER_BLOCKED, now_ns)
        self._clocks.set((Clock.DEADLINE, event.request), event.deadline_ns)
        if fetch.peer not in self._watched:
            self._await_renewal(fetch, now_ns)
        return [self._ask(fetch, now_ns)]

    def _await_renewal(self, fetch: Fetch, now_ns: int) -> None:
        self._clocks.set((Clock.RENEWED, fetch.asked.request), now_ns + self._renewed_within_ns())
        if fetch.peer not in self._renewals:
            self._renewals.set(fetch.peer, now_ns + self._config.renew_ns)

    def _ask(self, fetch: Fetch, now_ns: int) -> Ask:
        fetch.asks += 1
        asked = fetch.asked
        self._clocks.set((Clock.ANSWER, asked.request), now_ns + self._config.answer_ns)
        request = fetch.request(now_ns, digests=self._config.digest_layers > 0)
        return Ask(link=asked.link, to=asked.node, to_inc=asked.incarnation, message=request)

    # ------------------------------------------------------------ what the prefill node says

    def _owner_said(self, event: OwnerSaid, now_ns: int) -> list[FetchEffect]:
        match event.message:
            case PrefillAccepted() | PrefillProgress() | PrefillDone() as told:
                return self._told(event, told, now_ns)
            case LeaseRenewed(entries=entries):
                return [effect for entry in entries for effect in self._renewed(event, entry, now_ns)]
            case LeaseReleased() as released:
                return self._released(event, released, now_ns)
            case PrefillFailed() as failed:
                return self._refused(event, failed, now_ns)
            case PrefillCancelled(try_=try_):
                self._cancels.pop(try_, None)
                self._cancel_clocks.clear(try_)
                return []
            case StalePeer() as stale:
                return self._stale_peer(event, stale, now_ns)
        self.counters[f"unexpected.{event.message.KIND}"] += 1
        return []

    def _told(self, event: OwnerSaid, told: Announcement, now_ns: int) -> list[FetchEffect]:
        fetch = self._current(told.try_)
        if fetch is None:
            return self._told_too_late(event, told)
        return self._announced(event, fetch, snapshot_of(told), now_ns)

    def _told_too_late(self, event: OwnerSaid, told: Announcement) -> list[FetchEffect]:
        """P works for a try that is over. Not stored: if this cancel is lost too, the lease expires."""
        self.counters[f"{told.KIND}.late"] += 1
        if isinstance(told, PrefillProgress):
            return []
        message: Message = PrefillCancel(try_=told.try_, lease=told.lease)
        if (told.try_.node, told.try_.incarnation) != (self.name, self.incarnation):
            message = StalePeer(current=self.incarnation, try_=told.try_)
        return [Say(link=event.link, to=event.node, to_inc=event.incarnation, message=message)]

    def _renewed(self, event: OwnerSaid, entry: RenewedEntry, now_ns: int) -> list[FetchEffect]:
        fetch = self._current(entry.try_)
        if fetch is None:
            self.counters["lease.renewed.late"] += 1
            return []
        if entry.held:
            if fetch.peer not in self._watched:
                self._clocks.set((Clock.RENEWED, fetch.asked.request), now_ns + self._renewed_within_ns())
            return self._announced(event, fetch, entry, now_ns)
        if fetch.lease is None or entry.lease != fetch.lease or not self._is_from(event, fetch):
            return []  # said before P had the request, or of another lease: nothing about ours
        return self._fail(fetch, Why.NOT_HELD, now_ns)

    def _released(self, event: OwnerSaid, released: LeaseReleased, now_ns: int) -> list[FetchEffect]:
        """Obeyed only while claiming, and of exactly the claimed lease."""
        fetch = self._current(released.try_)
        obeyed = fetch is not None and fetch.state is FetchState.CLAIMING and released.lease == fetch.lease
        if fetch is None or not obeyed or not self._is_from(event, fetch):
            self.counters["lease.released.late"] += 1
            return []
        if not released.valid:
            return self._fail(fetch, Why.INVALID, now_ns, f"{Why.INVALID}: {released.cause}")
        self._end_attempt(fetch, Step.CONFIRMED)
        return [Fetched(request=released.try_.request, attempt=released.try_.attempt)]

    def _refused(self, event: OwnerSaid, failed: PrefillFailed, now_ns: int) -> list[FetchEffect]:
        """A refusal that names no lease, or another one, says nothing about the lease that we are bound to."""
        fetch = self._current(failed.try_)
        if fetch is None or not self._is_from(event, fetch) or fetch.lease not in (None, failed.lease):
            self.counters["prefill.failed.late"] += 1
            return []
        return self._fail(fetch, Why.REFUSED, now_ns, failed.cause)

    def _stale_peer(self, event: OwnerSaid, stale: StalePeer, now_ns: int) -> list[FetchEffect]:
        """What we said reached another life of the node than it was meant for."""
        if stale.try_ is not None:
            fetch = self._current(stale.try_)
            fetches = [fetch] if fetch is not None and fetch.asked.node == event.node else []
        else:
            older = [peer for peer in self._by_peer if peer[0] == event.node and peer[1] != stale.current]
            fetches = [fetch for peer in older for fetch in self._at(peer)]
        if not fetches:
            self.counters["stale_peer.late"] += 1
        return self._fail_all(fetches, Why.STALE_PEER, now_ns)

    def _owner_epoch(self, event: OwnerEpoch, now_ns: int) -> list[FetchEffect]:
        """Leases of older epochs have ended; an attempt without a lease yet will get one of the new epoch."""
        fetches = self._at((event.node, event.incarnation))
        for fetch in fetches:
            fetch.epoch = max(fetch.epoch, event.epoch)
        ended = [fetch for fetch in fetches if fetch.lease is not None and fetch.lease.epoch < event.epoch]
        return self._fail_all(ended, Why.EPOCH_ENDED, now_ns)

    def _owner_watched(self, event: OwnerWatched, now_ns: int) -> list[FetchEffect]:
        """Every lease there counts as renewed now."""
        peer = (event.node, event.incarnation)
        if event.watched:
            self._watched[peer] = None
            self._renewals.clear(peer)
            for fetch in self._at(peer):
                self._clocks.clear((Clock.RENEWED, fetch.asked.request))
        else:
            self._watched.pop(peer, None)
            for fetch in self._at(peer):
                self._await_renewal(fetch, now_ns)
        return []

    # ------------------------------------------------------------ announcements and reads

    def _announced(self, event: OwnerSaid, fetch: Fetch, told: RenewedEntry, now_ns: int) -> list[FetchEffect]:
        """Binds the lease, freezes the first token, posts reads for what is new, claims when that was all."""
        lease = told.lease
        if lease is None or not self._is_from(event, fetch) or lease != (fetch.lease or lease):
            cancel = PrefillCancel(try_=fetch.try_)
            say = Say(link=event.link, to=event.node, to_inc=event.incarnation, message=cancel)
            return [say, *self._fail(fetch, Why.OTHER_LEASE, now_ns)]
        if fetch.state is not FetchState.READING:
            return []
        if fetch.lease is None:
            fetch.lease = lease
            self._clocks.clear((Clock.ANSWER, fetch.asked.request))
        if lease.epoch < fetch.epoch:
            return self._fail(fetch, Why.EPOCH_ENDED, now_ns)
        if not fetch.consistent(told):
            return self._fail(fetch, Why.PROTOCOL, now_ns)
        effects = self._learn(fetch, told)
        return effects + self._post(fetch, now_ns) + self._claim_if_complete(fetch, now_ns)

    def _learn(self, fetch: Fetch, told: RenewedEntry) -> list[FetchEffect]:
        effects: list[FetchEffect] = []
        request, attempt = fetch.try_.request, fetch.try_.attempt
        if told.ready > fetch.ready:
            fetch.ready, fetch.source = told.ready, told.blocks
        if told.first_token is not None and fetch.first_token is None:
            fetch.first_token = told.first_token
            effects.append(FirstTokenKnown(request=request, attempt=attempt, payload=told.first_token))
        if told.finished and not fetch.finished:
            fetch.finished, fetch.digests = True, told.block_digests
            effects.append(PrefillFinished(request=request, attempt=attempt))
        return effects

    def _post(self, fetch: Fetch, now_ns: int) -> list[FetchEffect]:
        """One read for all that has become readable; each of our blocks is written by one read alone."""
        size, asked, lease = self._owner.block_size, fetch.asked, fetch.lease
        begin, end = fetch.posted, fetch.readable(size)
        if end <= begin:
            return []
        if self.peer_blocked(*fetch.peer):
            return self._fail(fetch, Why.PEER_BLOCKED, now_ns)
        assert lease is not None
        target = asked.blocks[begin // size : -(-end // size)]
        read = self.transfers.post(asked.request, asked.attempt, fetch.peer, target, now_ns)
        fetch.reading[read] = None
        fetch.posted = end
        return [
            PostRead(
                read=read,
                request=asked.request,
                node=asked.node,
                incarnation=asked.incarnation,
                epoch=lease.epoch,
                begin=begin,
                end=end,
                source=tuple(unpack_u32(fetch.source_blocks(begin, end))),
                target=target,
            )
        ]

    def _read_done(self, read: int, now_ns: int) -> list[FetchEffect]:
        transfer = self.transfers.hear(read, Heard.DONE)
        fetch = self._fetches.get(transfer.request) if transfer else None
        if fetch is None or read not in fetch.reading:
            return []
        del fetch.reading[read]
        return self._claim_if_complete(fetch, now_ns)

    def _read_ended(self, read: int, heard: Heard, why: Why, now_ns: int) -> list[FetchEffect]:
        transfer = self.transfers.hear(read, heard)
        fetch = self._fetches.get(transfer.request) if transfer else None
        return self._fail(fetch, why, now_ns) if fetch is not None and read in fetch.reading else []

    def _mover_reaped(self, now_ns: int) -> list[FetchEffect]:
        hit = dict.fromkeys(transfer.request for transfer in self.transfers.reap())
        fetches = [fetch for request in hit if (fetch := self._fetches.get(request)) is not None and fetch.reading]
        return self._fail_all(fetches, Why.MOVER_REAPED, now_ns)

    # ------------------------------------------------------------ the claim

    def _claim_if_complete(self, fetch: Fetch, now_ns: int) -> list[FetchEffect]:
        """R6: all chunks announced, all reads done; nothing is posted under this lease afterwards."""
        if fetch.state is not FetchState.READING or not fetch.finished or fetch.reading or fetch.check is Check.OUT:
            return []
        if self._config.digest_layers and fetch.check is Check.DUE and fetch.asked.have < fetch.asked.prompt_tokens:
            fetch.check = Check.OUT
            check = fetch.check_kv(self._config.digest_layers, self._owner.block_size)
            return [check] if check else self._fail(fetch, Why.PROTOCOL, now_ns, f"{Why.PROTOCOL}: no digests came")
        fetch.state = TRANSITIONS[fetch.state, Step.COMPLETE]
        finished = ReadsFinished(request=fetch.try_.request, attempt=fetch.try_.attempt)
        return [self._claim(fetch, now_ns), finished]

    def _kv_checked(self, event: KvChecked, now_ns: int) -> list[FetchEffect]:
        fetch = self._fetches.get(event.request)
        if fetch is None or fetch.try_.attempt != event.attempt or fetch.check is not Check.OUT:
            self.counters["check.late"] += 1
            return []
        fetch.check = Check.PASSED
        self.counters["digest.wrong" if event.problem else "digest.right"] += 1
        if event.problem:
            return self._fail(fetch, Why.WRONG_DIGEST, now_ns, f"{Why.WRONG_DIGEST}: {event.problem}")
        return self._claim_if_complete(fetch, now_ns)

    def _claim(self, fetch: Fetch, now_ns: int) -> Say:
        assert fetch.lease is not None
        fetch.claims += 1
        self._clocks.set((Clock.CLAIM, fetch.try_.request), now_ns + self._config.claim_ns)
        return self._say(fetch, TransferDone(try_=fetch.try_, lease=fetch.lease))

    # ------------------------------------------------------------ time

    def _tick(self, now_ns: int) -> list[FetchEffect]:
        effects: list[FetchEffect] = []
        while (read := self.transfers.due(now_ns)) is not None:
            effects += self._read_ended(read, Heard.OVERDUE, Why.READ_OVERDUE, now_ns)
        while (due := self._clocks.pop_due(now_ns)) is not None:
            effects += self._timed_out(due[0], self._fetches[due[1]], now_ns)
        while (peer := self._renewals.pop_due(now_ns)) is not None:
            effects += self._renew(peer, now_ns)
        while (try_ := self._cancel_clocks.pop_due(now_ns)) is not None:
            effects.append(self._cancels.pop(try_))
        return effects

    def _timed_out(self, clock: Clock, fetch: Fetch, now_ns: int) -> list[FetchEffect]:
        match clock:
            case Clock.ANSWER if fetch.asks < ASKS_MAX:
                return [self._ask(fetch, now_ns)]
            case Clock.ANSWER:
                return self._fail(fetch, Why.NO_ANSWER, now_ns)
            case Clock.CLAIM if fetch.claims <= self._config.claim_repeats:
                return [self._claim(fetch, now_ns)]
            case Clock.CLAIM:
                return self._fail(fetch, Why.UNCONFIRMED, now_ns)
            case Clock.RENEWED:
                return self._fail(fetch, Why.NOT_RENEWED, now_ns)
            case Clock.DEADLINE:
                return self._fail(fetch, Why.DEADLINE, now_ns)

    def _renew(self, peer: Peer, now_ns: int) -> list[FetchEffect]:
        """R10: exactly the tries in reading or claiming, one message for all of a peer's."""
        fetches = self._at(peer)
        self._renewals.set(peer, now_ns + self._config.renew_ns)
        entries = tuple(RenewEntry(try_=fetch.try_, lease=fetch.lease) for fetch in fetches)
        return [self._say(fetches[-1], LeaseRenew(entries=entries))]

    def _renewed_within_ns(self) -> int:
        """A lease that was not seen renewed for so long may expire before its claim is answered."""
        return self._config.lease_ns - self._config.claim_ns * (1 + self._config.claim_repeats)

    # ------------------------------------------------------------ an attempt ends

    def _fail(self, fetch: Fetch, why: Why, now_ns: int, cause: str = "") -> list[FetchEffect]:
        failure = FAILURES[why]
        if fetch.state not in failure.states:
            self.counters[f"ignored.{why}"] += 1
            return []
        effects = self._cancel(fetch, now_ns) if failure.cancel else []
        self._end_attempt(fetch, Step.FAILED)
        failed = AttemptFailed(
            request=fetch.try_.request,
            attempt=fetch.try_.attempt,
            cause=cause or why.value,
            node=fetch.asked.node,
            peer_suspect=failure.suspect,
        )
        return [*effects, failed]

    def _fail_all(self, fetches: list[Fetch], why: Why, now_ns: int) -> list[FetchEffect]:
        return [effect for fetch in fetches for effect in self._fail(fetch, why, now_ns)]

    def _left(self, request: bytes, now_ns: int) -> list[FetchEffect]:
        fetch = self._fetches.get(request)
        if fetch is None:
            self.counters["left.late"] += 1
            return []
        effects = self._cancel(fetch, now_ns) if fetch.state is not FetchState.NEXT else []
        self._end_attempt(fetch, Step.LEFT)
        return effects

    def _end_attempt(self, fetch: Fetch, step: Step) -> None:
        """R7. What is open stays IN_FLIGHT; nothing of this attempt is renewed, timed or obeyed any more."""
        request = fetch.try_.request
        fetch.state = TRANSITIONS[fetch.state, step]
        if fetch.state in OVER:
            del self._fetches[request]
        for read in fetch.reading:
            self.transfers.hear(read, Heard.LEFT)
        fetch.reading.clear()
        for clock in Clock:
            self._clocks.clear((clock, request))
        requests = self._by_peer.get(fetch.peer, {})
        requests.pop(request, None)
        if not requests:
            self._by_peer.pop(fetch.peer, None)
            self._renewals.clear(fetch.peer)

    def _cancel(self, fetch: Fetch, now_ns: int) -> list[FetchEffect]:
        """Said now and, unless answered, once more; then the lease is left to expire."""
        if not fetch.asks:
            return []
        say = self._say(fetch, PrefillCancel(try_=fetch.try_, lease=fetch.lease))
        self._cancels[fetch.try_] = say
        self._cancel_clocks.set(fetch.try_, now_ns + self._config.answer_ns)
        return [say]

    # ------------------------------------------------------------ words

    def _say(self, fetch: Fetch, message: Message) -> Say:
        return Say(link=fetch.asked.link, to=fetch.asked.node, to_inc=fetch.asked.incarnation, message=message)

    def _current(self, try_: TryId) -> Fetch | None:
        """The fetch whose present attempt this is."""
        fetch = self._fetches.get(try_.request)
        return fetch if fetch is not None and fetch.state is not FetchState.NEXT and fetch.try_ == try_ else None

    def _is_from(self, event: OwnerSaid, fetch: Fetch) -> bool:
        return (event.node, event.incarnation) == fetch.peer

    def _at(self, peer: Peer) -> list[Fetch]:
        return [self._fetches[request] for request in self._by_peer.get(peer, {})]
