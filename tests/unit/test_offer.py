"""Offers: the prefill node's half of the hand-off, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import (
    LeaseId,
    LeaseReleased,
    LeaseRenew,
    LeaseRenewed,
    PrefillAccepted,
    PrefillCancel,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillRequest,
    RenewEntry,
    Sampling,
    StalePeer,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import replace, unpack_u32
from pdbus.connector.handoff import (
    Answer,
    Cause,
    ChunkComputed,
    DrainBegan,
    EpochBegan,
    HandoffConfig,
    Holder,
    LeaseBegan,
    LeaseEnded,
    OfferEffect,
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
from pdbus.connector.offer import Offers
from pdbus.connector.pool import BlockPool

CONFIG = HandoffConfig(leases_max=3)
S = 1_000_000_000
TRY = TryId(node="d", incarnation=b"d1", request=b"r", attempt=1)
PROMPT, SIZE = 10, 4  # tokens; three blocks, the last one partial


class Prefill:
    """A prefill node's Offers over a real pool."""

    def __init__(self, blocks: int = 8) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.offers = Offers("p", b"p1", 1, self.pool, CONFIG)

    def ask(self, try_: TryId = TRY, hashes: tuple[bytes, ...] = (), now: int = 0, **changes: Any) -> list[OfferEffect]:
        to_inc = changes.pop("to_inc", b"p1")
        fields: dict[str, Any] = {"have": 0, "deadline_ms": 300_000, "prompt_tokens": PROMPT, "prompt_digest": b"x"}
        message = PrefillRequest(try_=try_, sampling=Sampling(), **{**fields, **changes})
        return self.offers.handle(PrefillAsked(link="l", message=message, block_hashes=hashes, to_inc=to_inc), now)

    def lease(self, try_: TryId = TRY) -> LeaseId:
        effects = self.ask(try_)
        began = effects[-3]
        assert isinstance(began, LeaseBegan)
        return began.lease

    def chunk(self, ready: int, try_: TryId = TRY, last: bool = False, token: bytes | None = None) -> list[OfferEffect]:
        return self.offers.handle(ChunkComputed(try_=try_, ready=ready, last=last, first_token=token), 0)

    def ready_lease(self) -> LeaseId:
        lease = self.lease()
        self.chunk(PROMPT, last=True, token=b"t")
        return lease

    def said(self, message: Any, inc: bytes = b"d1", to_inc: bytes = b"p1", now: int = 0) -> list[OfferEffect]:
        event = ReaderSaid(link="l2", node="d", incarnation=inc, to_inc=to_inc, message=message)
        return self.offers.handle(event, now)

    def claim(self, lease: LeaseId, try_: TryId = TRY, inc: bytes = b"d1") -> list[OfferEffect]:
        return self.said(TransferDone(try_=try_, lease=lease), inc)


@pytest.fixture
def p() -> Prefill:
    return Prefill()


def message_of(effects: list[OfferEffect]) -> Any:
    (answer,) = [effect for effect in effects if isinstance(effect, Answer)]
    return answer.message


def ended(effects: list[OfferEffect]) -> list[Cause]:
    return [effect.cause for effect in effects if isinstance(effect, LeaseEnded)]


def test_admission_reserves_the_whole_prompt_under_a_lease(p: Prefill) -> None:
    began, accepted, start = p.ask()
    lease = LeaseId(node="p", incarnation=b"p1", epoch=1, generation=1)
    assert began == LeaseBegan(lease=lease, try_=TRY, blocks=3)
    assert accepted == Answer(link="l", to="d", to_inc=b"d1", message=PrefillAccepted(try_=TRY, lease=lease))
    assert isinstance(start, StartPrefill) and start.blocks == (0, 1, 2) and start.cached_tokens == 0
    assert p.pool.holders(2) == {Holder.ADVERTISED: 1} and p.offers.held() == 1


def test_progress_is_cumulative_and_in_whole_blocks(p: Prefill) -> None:
    p.ask()
    first, second = message_of(p.chunk(5)), message_of(p.chunk(8))
    assert isinstance(first, PrefillProgress) and isinstance(second, PrefillProgress)
    assert (first.ready, list(unpack_u32(first.blocks))) == (5, [0])
    assert (second.ready, list(unpack_u32(second.blocks))) == (8, [0, 1])


def test_done_brings_the_partial_last_block_and_the_first_token(p: Prefill) -> None:
    p.ask()
    done = message_of(p.chunk(PROMPT, last=True, token=b"t"))
    assert isinstance(done, PrefillDone)
    assert (list(unpack_u32(done.blocks)), done.first_token) == ([0, 1, 2], b"t")


def test_blocks_that_the_reader_has_are_not_announced(p: Prefill) -> None:
    p.ask(have=4)
    assert list(unpack_u32(message_of(p.chunk(8)).blocks)) == [1]


def test_a_reader_that_has_all_hears_no_blocks(p: Prefill) -> None:
    p.ask(have=8, prompt_tokens=8)
    done = message_of(p.chunk(8, last=True))
    assert done.blocks == b"" and done.ready == 8


def test_a_warm_prefix_cache_is_announced_at_once(p: Prefill) -> None:
    cached = p.pool.take(2, Holder.HELD) or ()
    for block, block_hash in zip(cached, (b"h0", b"h1"), strict=True):
        p.pool.publish(block, block_hash)
    effects = p.ask(hashes=(b"h0", b"h1"), have=4)
    assert message_of(effects).ready == 8 and list(unpack_u32(message_of(effects).blocks)) == [1]
    assert isinstance(effects[-1], StartPrefill) and effects[-1].cached_tokens == 8


def test_a_repeated_request_is_answered_by_a_snapshot(p: Prefill) -> None:
    lease = p.ready_lease()
    assert message_of(p.ask()) == PrefillAccepted(
        try_=TRY, lease=lease, ready=PROMPT, blocks=message_of(p.ask()).blocks, finished=True, first_token=b"t"
    )
    assert p.offers.held() == 1


def test_the_same_try_with_another_prompt_is_a_conflict(p: Prefill) -> None:
    p.lease()
    failed = message_of(p.ask(prompt_digest=b"y"))
    assert failed == PrefillFailed(try_=TRY, cause="conflict")
    assert p.offers.held() == 1


def test_an_ended_try_is_told_why(p: Prefill) -> None:
    lease = p.lease()
    p.said(PrefillCancel(try_=TRY))
    assert message_of(p.ask()) == PrefillFailed(try_=TRY, cause="cancelled", lease=lease)
    assert p.offers.held() == 0


def test_no_room_is_refused_with_a_hint_and_leaves_nothing(p: Prefill) -> None:
    failed = message_of(p.ask(prompt_tokens=100))
    assert failed.cause == "no_room" and failed.retry_after_ms > 0
    assert p.pool.counts().free == 8 and p.offers.held() == 0


def test_leases_are_bounded(p: Prefill) -> None:
    for n in range(CONFIG.leases_max):
        p.ask(replace(TRY, request=bytes([n])), prompt_tokens=1)
    assert message_of(p.ask(prompt_tokens=1)).cause == "no_room"


@pytest.mark.parametrize(
    ("field", "value"),
    [("have", -4), ("have", 12), ("prompt_tokens", 0), ("deadline_ms", 0)],
)
def test_an_impossible_request_is_refused_by_the_field(p: Prefill, field: str, value: int) -> None:
    changes: dict[str, Any] = {field: value}
    failed = message_of(p.ask(**changes))
    assert failed.cause.startswith(f"invalid: {field} {value}")


def test_a_claim_of_a_ready_lease_releases_it_once(p: Prefill) -> None:
    lease = p.ready_lease()
    effects = p.claim(lease)
    assert message_of(effects) == LeaseReleased(try_=TRY, lease=lease, valid=True, cause="done")
    assert ended(effects) == [Cause.DONE] and p.pool.counts().free == 8


def test_a_repeated_claim_is_valid_again_without_another_release(p: Prefill) -> None:
    lease = p.ready_lease()
    p.claim(lease)
    effects = p.claim(lease)
    assert message_of(effects).valid and ended(effects) == []


def test_a_claim_while_prefilling_is_a_protocol_error(p: Prefill) -> None:
    lease = p.lease()
    effects = p.claim(lease)
    assert message_of(effects) == LeaseReleased(try_=TRY, lease=lease, valid=False, cause="protocol")
    assert ended(effects) == [Cause.PROTOCOL] and StopPrefill(try_=TRY) in effects


def test_a_claim_of_an_ended_or_unknown_lease_is_invalid(p: Prefill) -> None:
    lease = p.ready_lease()
    p.offers.handle(OfferTick(), CONFIG.lease_ns)
    assert message_of(p.claim(lease)) == LeaseReleased(try_=TRY, lease=lease, valid=False, cause="expired")
    assert message_of(p.claim(replace(lease, generation=7))).valid is False
    assert message_of(p.claim(replace(lease, incarnation=b"p0"))).valid is False


def test_nobody_claims_or_cancels_for_another_reader(p: Prefill) -> None:
    lease = p.ready_lease()
    assert message_of(p.claim(lease, inc=b"d2")).valid is False
    assert isinstance(message_of(p.said(PrefillCancel(try_=TRY), inc=b"d2")), PrefillCancelled)
    assert p.offers.held() == 1
    p.claim(lease)
    assert message_of(p.claim(lease, inc=b"d2")).valid is False


def test_cancel_stops_the_prefill_and_frees_its_blocks(p: Prefill) -> None:
    p.ask()
    effects = p.said(PrefillCancel(try_=TRY))
    assert effects[0] == StopPrefill(try_=TRY) and ended(effects) == [Cause.CANCELLED]
    assert message_of(effects) == PrefillCancelled(try_=TRY)
    assert p.pool.counts().free == 8


def test_blocks_stay_with_the_step_that_writes_them(p: Prefill) -> None:
    """The lease's end drops the lease's hold; the step's own hold keeps the blocks from being given out."""
    p.ask()
    p.pool.hold((0, 1), Holder.IN_STEP)
    p.said(PrefillCancel(try_=TRY))
    assert p.pool.counts().free == 6
    assert p.offers.rows()[0]["state"] == "ending"
    p.offers.handle(WritesEnded(try_=TRY), 0)
    assert p.offers.rows() == []


def test_cancel_of_another_lease_or_of_nothing_changes_nothing(p: Prefill) -> None:
    lease = p.lease()
    effects = p.said(PrefillCancel(try_=TRY, lease=replace(lease, generation=9)))
    assert effects == [Answer(link="l2", to="d", to_inc=b"d1", message=PrefillCancelled(try_=TRY))]
    p.said(PrefillCancel(try_=replace(TRY, request=b"unknown")))
    assert p.offers.held() == 1 and p.offers.tombstones() == 0


def test_chunks_of_an_ended_prompt_are_late(p: Prefill) -> None:
    p.ask()
    p.said(PrefillCancel(try_=TRY))
    assert p.chunk(4) == []
    assert p.offers.counters["chunk.late"] == 1


def test_a_higher_attempt_supersedes_and_a_lower_one_is_refused(p: Prefill) -> None:
    second = replace(TRY, attempt=2)
    p.lease()
    effects = p.ask(second)
    assert ended(effects) == [Cause.SUPERSEDED] and p.offers.held() == 1
    third = p.ask(replace(TRY, attempt=3), prompt_tokens=1000)
    assert ended(third) == [Cause.SUPERSEDED], "superseded whether there is room or not"
    assert message_of(p.ask(replace(TRY, attempt=1))).cause == "superseded"


def test_a_lower_attempt_never_seen_is_refused(p: Prefill) -> None:
    p.ask(replace(TRY, attempt=2))
    assert message_of(p.ask(TRY)) == PrefillFailed(try_=TRY, cause="superseded")


def test_renewal_extends_and_tells_what_was_missed(p: Prefill) -> None:
    lease = p.ready_lease()
    renewed = message_of(p.said(LeaseRenew(entries=(RenewEntry(try_=TRY),)), now=29 * S))
    assert isinstance(renewed, LeaseRenewed)
    (entry,) = renewed.entries
    assert entry.held and entry.lease == lease and entry.finished and entry.first_token == b"t"
    assert list(unpack_u32(entry.blocks)) == [0, 1, 2]
    assert p.offers.handle(OfferTick(), 31 * S) == []
    assert ended(p.offers.handle(OfferTick(), 59 * S)) == [Cause.EXPIRED]


def test_renewal_never_creates_or_revives(p: Prefill) -> None:
    lease = p.lease()
    p.said(PrefillCancel(try_=TRY))
    unknown = replace(TRY, request=b"u")
    entries = (RenewEntry(try_=TRY, lease=lease), RenewEntry(try_=unknown))
    renewed = message_of(p.said(LeaseRenew(entries=entries)))
    assert [entry.held for entry in renewed.entries] == [False, False]
    assert renewed.entries[0].lease == lease and p.offers.held() == 0


def test_renewal_covers_listed_tries_only(p: Prefill) -> None:
    other = replace(TRY, request=b"o")
    p.ask()
    p.ask(other)
    p.said(LeaseRenew(entries=(RenewEntry(try_=TRY),)), now=20 * S)
    effects = p.offers.handle(OfferTick(), 30 * S)
    assert [e.try_ for e in effects if isinstance(e, LeaseEnded)] == [other]


def test_the_deadline_ends_a_lease_renewed_or_not(p: Prefill) -> None:
    p.ask(deadline_ms=25_000)
    p.said(LeaseRenew(entries=(RenewEntry(try_=TRY),)), now=24 * S)
    effects = p.offers.handle(OfferTick(), 25 * S)
    assert ended(effects) == [Cause.DEADLINE]
    assert message_of(effects).cause == "deadline"


def test_a_reader_proven_over_ends_its_leases_and_gets_no_more(p: Prefill) -> None:
    p.ask()
    p.ask(replace(TRY, incarnation=b"d2"))
    effects = p.offers.handle(ReaderGone(node="d", incarnation=b"d1"), 0)
    assert ended(effects) == [Cause.READER_DEAD] and p.offers.held() == 1
    assert message_of(p.ask(replace(TRY, request=b"late"))).cause == "stale"


def test_a_reader_that_comes_back_after_its_goodbye_is_served(p: Prefill) -> None:
    """A decode node that an operator took out says goodbye, and is the same incarnation when it is put in again."""
    p.offers.handle(ReaderGone(node="d", incarnation=b"d1"), 0)
    p.offers.handle(ReaderCame(node="d", incarnation=b"d1"), 0)
    assert isinstance(message_of(p.ask()), PrefillAccepted)


def test_words_for_an_earlier_life_are_answered_stale_peer(p: Prefill) -> None:
    lease = LeaseId(node="p", incarnation=b"p0", epoch=1, generation=1)
    stale = StalePeer(current=b"p1", try_=TRY)
    assert message_of(p.said(TransferDone(try_=TRY, lease=lease), to_inc=b"p0")) == stale
    assert message_of(p.said(LeaseRenew(entries=(RenewEntry(try_=TRY),)), to_inc=b"p0")) == stale
    assert message_of(p.ask(to_inc=b"p0")) == stale
    assert p.said(stale, to_inc=b"p0") == [], "never answered by stale_peer"
    assert p.offers.held() == 0


@pytest.mark.parametrize("pool_reset", [True, False])
def test_a_new_epoch_ends_every_lease_of_the_old_one_first(p: Prefill, pool_reset: bool) -> None:
    p.ask()
    effects = p.offers.handle(EpochBegan(epoch=2, pool_reset=pool_reset), 0)
    assert ended(effects) == [Cause.WORKER_DEAD] and StopPrefill(try_=TRY) in effects
    assert message_of(effects).cause == "worker dead"
    assert [row["state"] for row in p.offers.rows()] == ([] if pool_reset else ["ending"])
    began = p.ask(replace(TRY, attempt=2))[0]
    assert isinstance(began, LeaseBegan) and (began.lease.epoch, began.lease.generation) == (2, 2)


def test_epochs_only_rise(p: Prefill) -> None:
    with pytest.raises(LocalProtocolError):
        p.offers.handle(EpochBegan(epoch=1, pool_reset=False), 0)


def test_a_prompt_that_the_engine_failed_is_told_the_problem(p: Prefill) -> None:
    p.ask()
    effects = p.offers.handle(PrefillBroke(try_=TRY, problem="nan in logits"), 0)
    assert ended(effects) == [Cause.FAILED] and message_of(effects).cause == "failed: nan in logits"


def test_draining_admits_nothing_and_lets_leases_go_on(p: Prefill) -> None:
    lease = p.ready_lease()
    p.offers.handle(DrainBegan(), 0)
    assert message_of(p.ask(replace(TRY, request=b"new"))).cause == "draining"
    assert message_of(p.claim(lease)).valid


def test_shutdown_ends_all(p: Prefill) -> None:
    p.ask()
    p.ask(replace(TRY, request=b"o"))
    assert ended(p.offers.handle(ShutdownBegan(), 0)) == [Cause.SHUTDOWN] * 2
    assert p.pool.counts().free == 8


@pytest.mark.parametrize(("ready", "last"), [(3, False), (11, False), (10, False), (8, True)])
def test_nonsense_from_the_engine_raises_and_changes_nothing(p: Prefill, ready: int, last: bool) -> None:
    p.ask()
    p.chunk(4)
    with pytest.raises(LocalProtocolError):
        p.chunk(ready, last=last)
    assert p.offers.rows()[0]["ready"] == 4


def test_digests_come_with_all_snapshots_of_a_finished_prompt_and_no_other(p: Prefill) -> None:
    effects = p.ask(digests=True, have=4)
    start = effects[-1]
    assert isinstance(start, StartPrefill) and start.digest_from == 4
    lease = message_of(effects).lease
    computed = ChunkComputed(try_=TRY, ready=8, digests=b"one")
    assert not hasattr(message_of(p.offers.handle(computed, 0)), "block_digests")
    assert message_of(p.ask(digests=True)).block_digests == b""
    done = message_of(p.offers.handle(replace(computed, ready=PROMPT, last=True, digests=b"two"), 0))
    assert done.block_digests == b"onetwo"
    assert message_of(p.ask(digests=True)).block_digests == b"onetwo"
    (entry,) = message_of(p.said(LeaseRenew(entries=(RenewEntry(try_=TRY, lease=lease),)))).entries
    assert entry.block_digests == b"onetwo"


def test_nobody_digests_what_is_not_wanted(p: Prefill) -> None:
    start = p.ask()[-1]
    assert isinstance(start, StartPrefill) and start.digest_from == -1


@pytest.mark.parametrize("before", [True, False])
def test_leases_of_a_reader_that_the_shell_watches_do_not_expire(p: Prefill, before: bool) -> None:
    watched = ReaderWatched(node="d", incarnation=b"d1", watched=True)
    if before:
        p.offers.handle(watched, 0)
    p.lease()
    if not before:
        p.offers.handle(watched, 10 * S)
    assert p.offers.handle(OfferTick(), 200 * S) == [] and p.offers.next_deadline() == 300 * S
    p.offers.handle(replace(watched, watched=False), 200 * S)
    assert ended(p.offers.handle(OfferTick(), 230 * S)) == [Cause.EXPIRED]
