"""Fetches: the decode node's half of the hand-off, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

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
    Sampling,
    StalePeer,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.fetch import Fetches
from pdbus.connector.handoff import (
    Ask,
    AttemptFailed,
    CheckKv,
    FetchAsked,
    Fetched,
    FetchEffect,
    FetchLeft,
    FetchTick,
    FirstTokenKnown,
    HandoffConfig,
    Holder,
    KvChecked,
    MoverReaped,
    OwnerEpoch,
    OwnerGone,
    OwnerSaid,
    OwnerWatched,
    PostRead,
    PrefillFinished,
    ReadDone,
    ReadFailed,
    ReadOverdue,
    ReadsFinished,
    Say,
)
from pdbus.connector.pool import BlockPool
from pdbus.connector.transfer import READ_BYTES_PER_S_LEAST

CONFIG = HandoffConfig()
S = 1_000_000_000
PROMPT, SIZE = 10, 4  # tokens; three blocks, the last one partial
TRY = TryId(node="d", incarnation=b"d1", request=b"r", attempt=1)
LEASE = LeaseId(node="p", incarnation=b"p1", epoch=1, generation=1)
SOURCE = (7, 5, 9)  # the prefill node's block ids
DONE = PrefillDone(try_=TRY, lease=LEASE, ready=PROMPT, blocks=pack_u32(SOURCE), first_token=b"t", prefill_ns=3)
CLAIM = Say(link="l", to="p", to_inc=b"p1", message=TransferDone(try_=TRY, lease=LEASE))
CANCEL = Say(link="l", to="p", to_inc=b"p1", message=PrefillCancel(try_=TRY, lease=LEASE))


def progress(blocks: int, lease: LeaseId = LEASE) -> PrefillProgress:
    return PrefillProgress(try_=TRY, lease=lease, ready=blocks * SIZE, blocks=pack_u32(SOURCE[:blocks]))


def accepted(try_: TryId = TRY, lease: LeaseId = LEASE) -> PrefillAccepted:
    return PrefillAccepted(try_=try_, lease=lease)


def renewed(**changes: Any) -> LeaseRenewed:
    fields: dict[str, Any] = {"try_": TRY, "held": True, "lease": LEASE, **changes}
    return LeaseRenewed(entries=(RenewedEntry(**fields),))


class Decode:
    """A decode node's Fetches over a real pool."""

    def __init__(self, config: HandoffConfig = CONFIG) -> None:
        self.pool = BlockPool(12, SIZE)
        self.fetches = Fetches("d", b"d1", self.pool, config)

    def ask(self, request: bytes = b"r", attempt: int = 1, now: int = 0, **changes: Any) -> list[FetchEffect]:
        fields: dict[str, Any] = {
            "node": "p",
            "incarnation": b"p1",
            "epoch": 1,
            "link": "l",
            "source_size": SIZE,
            "prompt_tokens": PROMPT,
            "have": 0,
            "prompt_digest": b"x",
            "sampling": Sampling(),
            "deadline_ns": 300 * S,
            **changes,
        }
        if "blocks" not in fields:
            fields["blocks"] = self.pool.take(-(-fields["prompt_tokens"] // SIZE), Holder.HELD)
        return self.fetches.handle(FetchAsked(request=request, attempt=attempt, **fields), now)

    def said(self, message: Message, inc: bytes = b"p1", node: str = "p", now: int = 0) -> list[FetchEffect]:
        event = OwnerSaid(link="l", node=node, incarnation=inc, message=message)
        return self.fetches.handle(event, now)

    def hear(self, event: Any, now: int = 0) -> list[FetchEffect]:
        return self.fetches.handle(event, now)

    def claiming(self) -> None:
        self.ask()
        self.said(DONE)
        self.hear(ReadDone(read=1))


@pytest.fixture
def d() -> Decode:
    return Decode()


def failure(effects: list[FetchEffect]) -> AttemptFailed:
    (failed,) = [effect for effect in effects if isinstance(effect, AttemptFailed)]
    return failed


def reads(effects: list[FetchEffect]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(effect.source, effect.target) for effect in effects if isinstance(effect, PostRead)]


def test_an_attempt_asks_its_prefill_node(d: Decode) -> None:
    (ask,) = d.ask(deadline_ns=2 * S, have=4)
    assert isinstance(ask, Ask) and isinstance(ask.message, PrefillRequest)
    assert (ask.link, ask.to, ask.to_inc) == ("l", "p", b"p1")
    assert (ask.message.try_, ask.message.have, ask.message.deadline_ms) == (TRY, 4, 2000)


def test_reads_start_after_every_chunk_and_pair_by_position(d: Decode) -> None:
    d.ask()
    d.said(accepted())
    assert reads(d.said(progress(1))) == [((7,), (0,))]
    assert reads(d.said(DONE)) == [((5, 9), (1, 2))]
    assert d.pool.holders(2) == {Holder.HELD: 1, Holder.IN_FLIGHT: 1}


def test_reads_leave_out_what_is_there_already(d: Decode) -> None:
    d.ask(have=4)
    effects = d.said(replace(DONE, blocks=pack_u32((5, 9))))
    assert reads(effects) == [((5, 9), (1, 2))]


def test_a_warm_prefill_node_announces_with_its_acceptance(d: Decode) -> None:
    d.ask()
    assert reads(d.said(replace(accepted(), ready=8, blocks=pack_u32(SOURCE[:2])))) == [((7, 5), (0, 1))]


def test_announcements_come_in_any_order_and_number(d: Decode) -> None:
    """Progress before accepted is kept, the longest wins, nothing is read twice."""
    d.ask()
    assert reads(d.said(progress(2))) == [((7, 5), (0, 1))]
    assert [d.said(m) for m in (accepted(), progress(1), progress(2))] == [[], [], []]


def test_the_first_token_goes_out_before_the_reads_are_done(d: Decode) -> None:
    d.ask()
    first, finished, _ = d.said(DONE)
    assert first == FirstTokenKnown(request=b"r", attempt=1, payload=b"t")
    assert finished == PrefillFinished(request=b"r", attempt=1)


def test_the_claim_waits_for_every_chunk_and_every_read(d: Decode) -> None:
    d.ask()
    d.said(progress(1))
    assert d.hear(ReadDone(read=1)) == []
    d.said(progress(2))
    d.said(DONE)
    assert d.hear(ReadDone(read=3)) == []
    assert d.hear(ReadDone(read=2)) == [CLAIM, ReadsFinished(request=b"r", attempt=1)]


def test_smaller_blocks_there_are_read_when_they_fill_one_of_ours(d: Decode) -> None:
    """Half of one of our blocks would have to be written by two reads, and one could fail."""
    d.ask(source_size=2)
    ids = (1, 2, 3, 4, 5)
    said = [d.said(PrefillProgress(try_=TRY, lease=LEASE, ready=n, blocks=pack_u32(ids[: n // 2]))) for n in (2, 6, 7)]
    assert [reads(effects) for effects in said] == [[], [((1, 2), (0,))], []]
    (post,) = [e for e in d.said(replace(DONE, blocks=pack_u32(ids))) if isinstance(e, PostRead)]
    assert (post.begin, post.end, post.source, post.target) == (4, PROMPT, (3, 4, 5), (1, 2))


def test_larger_blocks_there_are_read_in_whole_ones_of_ours(d: Decode) -> None:
    d.ask(source_size=6)
    said = [d.said(PrefillProgress(try_=TRY, lease=LEASE, ready=n, blocks=pack_u32((7,)[: n // 6]))) for n in (5, 6)]
    assert [reads(effects) for effects in said] == [[], [((7,), (0,))]]
    assert reads(d.said(replace(DONE, blocks=pack_u32((7, 5))))) == [((7, 5), (1, 2))]


def test_their_list_begins_with_the_block_that_holds_the_first_missing_token(d: Decode) -> None:
    d.ask(source_size=8, have=4)
    effects = d.said(replace(DONE, blocks=pack_u32((7, 5))))
    assert reads(effects) == [((7, 5), (1, 2))]
    assert failure(d.said(renewed(ready=PROMPT, blocks=pack_u32((7,))))).cause == "protocol"


def test_with_nothing_to_read_the_claim_follows_done(d: Decode) -> None:
    d.ask(prompt_tokens=8, have=8)
    effects = d.said(replace(DONE, ready=8, blocks=b""))
    assert effects[-2:] == [CLAIM, ReadsFinished(request=b"r", attempt=1)]


def test_a_confirmed_claim_makes_the_kv_valid_and_ends_the_book(d: Decode) -> None:
    d.claiming()
    effects = d.said(LeaseReleased(try_=TRY, lease=LEASE, valid=True))
    assert effects == [Fetched(request=b"r", attempt=1)]
    assert d.fetches.rows() == [] and d.fetches.next_deadline() is None
    assert d.pool.holders(0) == {Holder.HELD: 1}


def test_a_claim_that_is_not_valid_fails_the_attempt(d: Decode) -> None:
    d.claiming()
    failed = failure(d.said(LeaseReleased(try_=TRY, lease=LEASE, valid=False, cause="expired")))
    assert failed.cause == "claim invalid: expired"


@pytest.mark.parametrize(
    "late",
    [
        LeaseReleased(try_=TRY, lease=replace(LEASE, generation=2), valid=True),
        LeaseReleased(try_=replace(TRY, attempt=2), lease=LEASE, valid=True),
        LeaseReleased(try_=replace(TRY, incarnation=b"d0"), lease=LEASE, valid=True),
    ],
)
def test_only_the_claimed_lease_is_released(d: Decode, late: LeaseReleased) -> None:
    d.claiming()
    assert d.said(late) == []


def test_released_is_obeyed_while_claiming_only(d: Decode) -> None:
    d.ask()
    d.said(DONE)
    assert d.said(LeaseReleased(try_=TRY, lease=LEASE, valid=True)) == []
    assert d.fetches.counters["lease.released.late"] == 1


def test_released_by_somebody_else_is_not_obeyed(d: Decode) -> None:
    d.claiming()
    assert d.said(LeaseReleased(try_=TRY, lease=LEASE, valid=True), inc=b"p2") == []


def test_an_unanswered_request_is_repeated_once(d: Decode) -> None:
    d.ask()
    (again,) = d.hear(FetchTick(), now=1 * S)
    assert isinstance(again, Ask)
    effects = d.hear(FetchTick(), now=2 * S)
    assert failure(effects).cause == "no answer" and failure(effects).peer_suspect
    assert replace(CANCEL, message=PrefillCancel(try_=TRY)) in effects


def test_an_unanswered_claim_is_repeated_twice(d: Decode) -> None:
    d.claiming()
    assert [d.hear(FetchTick(), now=t * S) for t in (2, 4)] == [[CLAIM], [CLAIM]]
    effects = d.hear(FetchTick(), now=6 * S)
    assert failure(effects).cause == "claim not answered" and CANCEL in effects


def test_a_refusal_fails_the_attempt_with_its_cause_and_hint(d: Decode) -> None:
    d.ask()
    effects = d.said(PrefillFailed(try_=TRY, cause="no_room", retry_after_ms=7))
    assert effects == [AttemptFailed(request=b"r", attempt=1, cause="no_room", node="p")]


def test_a_late_refusal_says_nothing_about_a_lease_that_was_granted_since(d: Decode) -> None:
    """The first request found no room, its repeat did; the answers came in the other order."""
    d.ask()
    d.said(accepted())
    assert d.said(PrefillFailed(try_=TRY, cause="no_room")) == []
    assert failure(d.said(PrefillFailed(try_=TRY, cause="expired", lease=LEASE))).cause == "expired"


def test_a_refusal_is_ignored_while_claiming(d: Decode) -> None:
    d.claiming()
    assert d.said(PrefillFailed(try_=TRY, cause="expired", lease=LEASE)) == []
    assert d.said(renewed(held=False)) == []


def test_another_lease_fails_the_attempt(d: Decode) -> None:
    d.ask()
    d.said(accepted())
    effects = d.said(progress(1, replace(LEASE, generation=2)))
    assert failure(effects).cause == "other lease"
    assert replace(CANCEL, message=PrefillCancel(try_=TRY)) in effects


def test_a_lease_of_another_node_is_another_lease(d: Decode) -> None:
    d.ask()
    effects = d.said(accepted(lease=replace(LEASE, incarnation=b"p2")), inc=b"p2")
    assert failure(effects).cause == "other lease"
    assert isinstance(effects[0], Say) and effects[0].to_inc == b"p2"


@pytest.mark.parametrize(
    "wrong",
    [
        replace(progress(2), blocks=pack_u32((8, 5))),
        replace(progress(2), blocks=pack_u32((7,))),
        replace(progress(2), blocks=b"abc"),
        replace(progress(2), ready=11),
        replace(progress(2), ready=-1),
        replace(DONE, ready=8),
    ],
)
def test_announcements_that_cannot_be_fail_the_attempt(d: Decode, wrong: Message) -> None:
    d.ask()
    d.said(progress(1))
    effects = d.said(wrong)
    assert failure(effects).cause == "protocol" and CANCEL in effects and reads(effects) == []


def test_what_comes_for_an_attempt_that_is_over_is_cancelled(d: Decode) -> None:
    old = TryId(node="d", incarnation=b"d1", request=b"old", attempt=1)
    cancel = PrefillCancel(try_=old, lease=LEASE)
    assert d.said(accepted(old)) == [Say(link="l", to="p", to_inc=b"p1", message=cancel)]
    assert d.said(replace(DONE, try_=old)) == [Say(link="l", to="p", to_inc=b"p1", message=cancel)]
    assert d.said(replace(progress(1), try_=old)) == []
    assert d.fetches.next_deadline() is None, "nothing is stored"


def test_what_comes_for_an_earlier_life_is_answered_stale_peer(d: Decode) -> None:
    old = replace(TRY, incarnation=b"d0")
    stale = StalePeer(current=b"d1", try_=old)
    assert d.said(accepted(old)) == [Say(link="l", to="p", to_inc=b"p1", message=stale)]


def test_leaving_says_cancel_once_more_unless_answered(d: Decode) -> None:
    d.ask()
    d.said(accepted())
    assert d.hear(FetchLeft(request=b"r")) == [CANCEL]
    assert d.hear(FetchTick(), now=1 * S) == [CANCEL]
    assert d.fetches.next_deadline() is None
    d.ask(b"q")
    d.said(accepted(replace(TRY, request=b"q")))
    d.hear(FetchLeft(request=b"q"))
    d.said(PrefillCancelled(try_=replace(TRY, request=b"q")))
    assert d.fetches.next_deadline() is None


def test_leaving_quarantines_open_reads_until_they_end(d: Decode) -> None:
    d.ask()
    d.said(progress(2))
    d.hear(FetchLeft(request=b"r"))
    d.pool.drop((0, 1, 2), Holder.HELD)
    assert d.pool.counts().quarantined == 2
    assert d.hear(ReadDone(read=1)) == []
    assert d.pool.counts().free == 12


def test_a_failed_read_fails_the_attempt(d: Decode) -> None:
    d.ask()
    d.said(progress(1))
    effects = d.hear(ReadFailed(read=1, problem="remote disconnect"))
    assert failure(effects).cause == "read failed" and failure(effects).peer_suspect and CANCEL in effects


@pytest.mark.parametrize("by_deadline", [True, False])
def test_an_overdue_read_fails_the_attempt_and_blocks_the_peer_until_it_ends(d: Decode, by_deadline: bool) -> None:
    d.ask()
    d.said(progress(1))
    effects = d.hear(FetchTick(), now=2 * S) if by_deadline else d.hear(ReadOverdue(read=1, problem="odd"))
    assert failure(effects).cause == "read overdue"
    assert d.fetches.peer_blocked("p", b"p1")
    blocked = d.ask(b"q")
    assert failure(blocked).cause == "peer has an overdue read" and len(blocked) == 1
    d.hear(ReadDone(read=1))
    assert not d.fetches.peer_blocked("p", b"p1")


def test_a_quarantined_read_that_grows_late_blocks_the_peer_too(d: Decode) -> None:
    d.ask()
    d.said(progress(1))
    d.hear(FetchLeft(request=b"r"))
    d.hear(FetchTick(), now=2 * S)
    assert d.fetches.peer_blocked("p", b"p1")


def test_nothing_new_is_read_from_a_blocked_peer(d: Decode) -> None:
    d.ask()
    d.ask(b"q")
    d.said(progress(1))
    d.hear(ReadOverdue(read=1, problem="odd"))
    effects = d.said(replace(progress(1), try_=replace(TRY, request=b"q"), lease=replace(LEASE, generation=2)))
    assert failure(effects).cause == "peer has an overdue read" and reads(effects) == []


def test_patience_grows_with_the_bytes_to_read() -> None:
    pool = BlockPool(4, SIZE)
    d = Decode()
    d.pool, d.fetches = pool, Fetches("d", b"d1", pool, HandoffConfig(block_bytes=2 * READ_BYTES_PER_S_LEAST))
    d.ask()
    d.said(progress(1))  # 2 s at least, and 2 s for the block
    assert not any(isinstance(e, AttemptFailed) for e in d.hear(FetchTick(), now=4 * S - 1))
    assert failure(d.hear(FetchTick(), now=4 * S)).cause == "read overdue"


def test_one_renewal_per_peer_lists_what_is_read_or_claimed(d: Decode) -> None:
    d.ask()
    d.ask(b"q")
    d.ask(b"gone")
    d.said(accepted())
    d.hear(FetchLeft(request=b"gone"))
    said = [e for e in d.hear(FetchTick(), now=5 * S) if isinstance(e, Say) and isinstance(e.message, LeaseRenew)]
    entries = (RenewEntry(try_=TRY, lease=LEASE), RenewEntry(try_=replace(TRY, request=b"q")))
    assert [say.message for say in said] == [LeaseRenew(entries=entries)]


def test_renewal_before_acceptance_lists_the_try_alone(d: Decode) -> None:
    d.fetches = Fetches("d", b"d1", d.pool, HandoffConfig(renew_ns=S // 2))
    d.ask()
    (say,) = d.hear(FetchTick(), now=S // 2)
    assert isinstance(say, Say) and say.message == LeaseRenew(entries=(RenewEntry(try_=TRY),))


def test_a_renewal_brings_what_was_lost(d: Decode) -> None:
    d.ask()
    effects = d.said(renewed(ready=PROMPT, blocks=pack_u32(SOURCE), finished=True, first_token=b"t"))
    assert reads(effects) == [(SOURCE, (0, 1, 2))]
    assert FirstTokenKnown(request=b"r", attempt=1, payload=b"t") in effects


def test_not_held_fails_the_bound_attempt_only(d: Decode) -> None:
    d.ask()
    assert d.said(renewed(held=False, lease=None)) == [], "the renewal overtook the request"
    d.said(accepted())
    assert d.said(renewed(held=False, lease=None)) == []
    assert failure(d.said(renewed(held=False))).cause == "lease not held"


def test_an_attempt_whose_lease_may_soon_expire_is_left(d: Decode) -> None:
    d.ask()
    d.said(accepted())
    d.said(renewed(), now=10 * S)
    assert not any(isinstance(e, AttemptFailed) for e in d.hear(FetchTick(), now=33 * S))
    effects = d.hear(FetchTick(), now=34 * S)
    assert failure(effects).cause == "lease not renewed" and CANCEL in effects


def test_the_deadline_fails_the_attempt(d: Decode) -> None:
    d.ask(deadline_ns=3 * S)
    d.said(accepted())
    assert failure(d.hear(FetchTick(), now=3 * S)).cause == "deadline"
    assert failure(d.ask(b"late", deadline_ns=3 * S, now=3 * S)).cause == "deadline"


def test_the_first_token_is_frozen_over_attempts(d: Decode) -> None:
    d.ask()
    d.said(DONE)
    d.hear(ReadFailed(read=1, problem="remote disconnect"))
    d.ask(attempt=2)
    second = replace(DONE, try_=replace(TRY, attempt=2), lease=replace(LEASE, generation=2), first_token=b"u")
    assert not any(isinstance(e, FirstTokenKnown) for e in d.said(second))


@pytest.mark.parametrize(("proven", "cancelled"), [(True, False), (False, True)])
def test_a_prefill_node_that_is_gone_fails_its_attempts(d: Decode, proven: bool, cancelled: bool) -> None:
    d.ask()
    d.said(accepted())
    d.ask(b"q", node="other", incarnation=b"o1")
    effects = d.hear(OwnerGone(node="p", incarnation=b"p1", proven=proven))
    assert failure(effects).request == b"r" and (CANCEL in effects) is cancelled


def test_a_new_epoch_fails_what_is_bound_to_an_older_one(d: Decode) -> None:
    d.ask()
    d.ask(b"q")
    d.said(accepted())
    effects = d.hear(OwnerEpoch(node="p", incarnation=b"p1", epoch=2))
    assert failure(effects) == AttemptFailed(request=b"r", attempt=1, cause="prefill node's epoch ended", node="p")
    unbound = replace(TRY, request=b"q")
    assert failure(d.said(accepted(unbound, replace(LEASE, generation=2)))).request == b"q"
    d.ask(b"n")
    assert d.said(accepted(replace(TRY, request=b"n"), replace(LEASE, epoch=2, generation=3))) == []


def test_stale_peer_fails_the_try_that_it_names(d: Decode) -> None:
    d.ask()
    assert d.said(StalePeer(current=b"p2", try_=replace(TRY, attempt=7)), inc=b"p2") == []
    assert failure(d.said(StalePeer(current=b"p2", try_=TRY), inc=b"p2")).cause == "stale peer"


def test_stale_peer_without_a_try_fails_what_is_bound_to_older_lives(d: Decode) -> None:
    d.ask()
    d.ask(b"q", incarnation=b"p2")
    assert failure(d.said(StalePeer(current=b"p2"), inc=b"p2")).request == b"r"


def test_the_loss_of_our_own_mover_ends_every_read(d: Decode) -> None:
    d.ask()
    d.said(progress(1))
    d.ask(b"q")
    effects = d.hear(MoverReaped())
    assert failure(effects).cause == "own mover lost"
    assert d.pool.holders(0) == {Holder.HELD: 1} and len(d.fetches.transfers) == 0
    assert [row["state"] for row in d.fetches.rows()] == ["next", "reading"], "an attempt without open reads goes on"


def test_late_reports_of_reads_are_counted(d: Decode) -> None:
    assert d.hear(ReadDone(read=9)) == [] and d.hear(ReadOverdue(read=9, problem="odd")) == []
    counters = d.fetches.transfers.counters
    assert (counters["read.done.late"], counters["read.overdue.late"]) == (1, 1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attempt": 1}, id="attempt not higher"),
        pytest.param({"attempt": 2, "blocks": (3, 4)}, id="too few blocks"),
        pytest.param({"attempt": 2, "have": 5}, id="have within a block"),
        pytest.param({"attempt": 2, "have": 12}, id="have beyond the prompt"),
    ],
)
def test_an_attempt_that_makes_no_sense_raises(d: Decode, changes: dict[str, Any]) -> None:
    d.ask()
    with pytest.raises(LocalProtocolError, match="still reading"):
        d.ask(attempt=2)
    d.said(PrefillFailed(try_=TRY, cause="no_room"))
    with pytest.raises(LocalProtocolError):
        d.ask(**changes)
    assert [row["state"] for row in d.fetches.rows()] == ["next"]


def test_nothing_is_remembered_of_a_request_that_left(d: Decode) -> None:
    d.ask()
    d.said(PrefillFailed(try_=TRY, cause="no_room"))
    assert d.fetches.rows()[0]["state"] == "next"
    assert d.hear(FetchLeft(request=b"r")) == []
    assert d.fetches.rows() == [] and d.fetches.next_deadline() is None
    assert d.hear(FetchLeft(request=b"r")) == [] and d.fetches.counters["left.late"] == 1


# ---------------------------------------------------------------- digests

LAYERS = 2
DIGESTS = bytes(range(3 * LAYERS * 8))
DIGESTED = replace(DONE, block_digests=DIGESTS)
CHECK = CheckKv(request=b"r", attempt=1, blocks=(0, 1, 2), begin=0, end=PROMPT, size=SIZE, digests=DIGESTS)


@pytest.fixture
def checking() -> Decode:
    """All is read, and being checked."""
    d = Decode(replace(CONFIG, digest_layers=LAYERS))
    (ask,) = d.ask()
    assert isinstance(ask, Ask) and ask.message.digests
    d.said(DIGESTED)
    assert d.hear(ReadDone(read=1)) == [CHECK]
    return d


def test_nothing_is_claimed_before_the_digests_are_right(checking: Decode) -> None:
    assert checking.said(renewed(ready=PROMPT, blocks=pack_u32(SOURCE), finished=True)) == []
    assert checking.hear(KvChecked(request=b"r", attempt=1))[0] == CLAIM
    assert checking.fetches.counters["digest.right"] == 1


def test_a_wrong_digest_fails_the_attempt_and_is_counted(checking: Decode) -> None:
    effects = checking.hear(KvChecked(request=b"r", attempt=1, problem="block 1 layer 0"))
    assert CANCEL in effects and failure(effects).cause == "wrong digest: block 1 layer 0"
    assert failure(effects).peer_suspect and checking.fetches.counters["digest.wrong"] == 1


@pytest.mark.parametrize("digests", [b"", DIGESTS[:-8], DIGESTS + bytes(8)])
def test_digests_that_did_not_come_fail_the_attempt(digests: bytes) -> None:
    """The prefill node was asked for them: a node that leaves them out is not believed."""
    d = Decode(replace(CONFIG, digest_layers=LAYERS))
    d.ask()
    d.said(replace(DONE, block_digests=digests))
    assert failure(d.hear(ReadDone(read=1))).cause == "protocol: no digests came"


def test_an_answer_about_another_attempt_is_of_no_effect(checking: Decode) -> None:
    checking.hear(KvChecked(request=b"r", attempt=1, problem="block 1 layer 0"))
    checking.ask(attempt=2)
    again = {"try_": replace(TRY, attempt=2), "lease": replace(LEASE, generation=2)}
    checking.said(replace(DIGESTED, **again))
    checking.hear(ReadDone(read=2))
    assert checking.hear(KvChecked(request=b"r", attempt=1, problem="old")) == []
    assert checking.hear(KvChecked(request=b"r", attempt=2))


def test_what_was_not_read_is_not_checked() -> None:
    d = Decode(replace(CONFIG, digest_layers=LAYERS))
    d.ask(prompt_tokens=8, have=8)
    assert d.said(replace(DONE, ready=8, blocks=b""))[-2] == CLAIM


def test_nothing_is_renewed_at_an_owner_that_the_shell_watches(d: Decode) -> None:
    """Neither what was asked before nor what is asked afterwards; no silence fails it, only the request's deadline."""
    d.ask(b"r")
    d.said(accepted())
    d.hear(OwnerWatched(node="p", incarnation=b"p1", watched=True))
    d.ask(b"s")
    d.said(accepted(replace(TRY, request=b"s"), replace(LEASE, generation=2)))
    assert d.fetches.next_deadline() == 300 * S
    assert d.hear(FetchTick(), now=200 * S) == []


def test_renewals_go_on_where_watching_ends(d: Decode) -> None:
    d.hear(OwnerWatched(node="p", incarnation=b"p1", watched=True))
    d.ask()
    d.said(accepted())
    d.hear(OwnerWatched(node="p", incarnation=b"p1", watched=False), now=100 * S)
    (say,) = d.hear(FetchTick(), now=105 * S)
    assert isinstance(say, Say) and isinstance(say.message, LeaseRenew)
    assert failure(d.hear(FetchTick(), now=124 * S)).cause == "lease not renewed"
