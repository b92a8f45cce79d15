"""Both halves of the hand-off under anyone's words, in any order, about several requests at once.

Half of what is said fits, half does not: claims come early, leases are made up, chunks are nonsense. What must hold
all the same: the machine raises nothing but LocalProtocolError, and then has changed nothing; every lease is released
once; and when all have left and every read has ended, all blocks are back and no timer is left.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

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
from pdbus.bus.wire import pack_u32
from pdbus.connector.fetch import Fetches
from pdbus.connector.handoff import (
    AttemptFailed,
    ChunkComputed,
    DrainBegan,
    EpochBegan,
    FetchAsked,
    Fetched,
    FetchLeft,
    FetchTick,
    FirstTokenKnown,
    HandoffConfig,
    Holder,
    LeaseBegan,
    LeaseEnded,
    MoverReaped,
    OfferTick,
    OwnerEpoch,
    OwnerGone,
    OwnerSaid,
    PostRead,
    PrefillAsked,
    PrefillBroke,
    ReadDone,
    ReaderGone,
    ReaderSaid,
    ReadFailed,
    ReadOverdue,
    ShutdownBegan,
    WritesEnded,
)
from pdbus.connector.offer import Offers
from pdbus.connector.pool import BlockPool

from tests.sim.nodes import canonical

S = 1_000_000_000
SIZE, BLOCKS, PROMPT = 2, 16, 5  # the prompt is two blocks and a partial one
CONFIG = HandoffConfig(leases_max=3, tombstones_max=4)
REQUESTS = (b"r", b"q", b"o")
ATTEMPTS_MAX = 6

requests = st.sampled_from(REQUESTS)
attempts = st.integers(1, ATTEMPTS_MAX)
incarnations = st.sampled_from((b"1", b"1", b"1", b"2"))
picks = st.integers(0, 10)
seconds = st.sampled_from((0, 0, 0, 0, 1, 3))
prompts = st.integers(0, 7)
sometimes = st.integers(0, 9).map(lambda n: n == 0)
SETTINGS = settings(max_examples=100, stateful_step_count=80)


def try_id(request: bytes, attempt: int, incarnation: bytes = b"1") -> TryId:
    return TryId(node="d", incarnation=incarnation, request=request, attempt=attempt)


class AnyReader(RuleBasedStateMachine):
    """What a prefill node may hear."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.offers = Offers("p", b"1", 1, self.pool, CONFIG)
        self.now = 0
        self.epoch = 1
        self.held: dict[LeaseId, TryId] = {}
        self.known: list[tuple[LeaseId, TryId]] = [
            (LeaseId(node="p", incarnation=b"0", epoch=1, generation=1), try_id(b"r", 1))
        ]

    def hear(self, event: Any) -> None:
        before = canonical(self.offers), canonical(self.pool)
        try:
            effects = self.offers.handle(event, self.now)
        except LocalProtocolError:
            assert (canonical(self.offers), canonical(self.pool)) == before
            return
        for effect in effects:
            if isinstance(effect, LeaseBegan):
                assert (effect.lease, effect.try_) not in self.known
                self.held[effect.lease] = effect.try_
                self.known.append((effect.lease, effect.try_))
            elif isinstance(effect, LeaseEnded):
                assert self.held.pop(effect.lease) == effect.try_
        self.pool.check()
        assert self.offers.held() == len(self.held) <= CONFIG.leases_max
        assert self.offers.tombstones() <= CONFIG.tombstones_max

    def say(self, message: Message, incarnation: bytes, to_inc: bytes) -> None:
        self.hear(ReaderSaid(link="l", node="d", incarnation=incarnation, to_inc=to_inc, message=message))

    def pick(self, n: int) -> tuple[LeaseId, TryId]:
        """Rather one of the last."""
        return self.known[-1 - n % min(4, len(self.known))]

    @rule(request=requests, attempt=attempts, inc=incarnations, to=incarnations, prompt=prompts, have=prompts)
    def ask(self, request: bytes, attempt: int, inc: bytes, to: bytes, prompt: int, have: int) -> None:
        message = PrefillRequest(
            try_=try_id(request, attempt, inc),
            sampling=Sampling(),
            have=have,
            deadline_ms=40_000,
            prompt_tokens=prompt,
            prompt_digest=str(prompt).encode(),
        )
        self.hear(PrefillAsked(link="l", message=message, block_hashes=(), to_inc=to))

    @rule(request=requests, attempt=attempts)
    def ask_well(self, request: bytes, attempt: int) -> None:
        self.ask(request, attempt, b"1", b"1", PROMPT, 0)

    @rule(request=requests, attempt=attempts)
    def serve(self, request: bytes, attempt: int) -> None:
        """As it should go."""
        self.ask_well(request, attempt)
        self.compute(0, PROMPT, True)
        self.claim(0, 0, b"1", b"1")

    @rule(n=picks, ready=st.integers(-1, 8), last=st.booleans())
    def compute(self, n: int, ready: int, last: bool) -> None:
        self.hear(ChunkComputed(try_=self.pick(n)[1], ready=ready, last=last, first_token=b"t"))

    @rule(n=picks)
    def compute_all(self, n: int) -> None:
        self.compute(n, PROMPT, True)

    @rule(n=picks, m=picks, inc=incarnations, to=incarnations)
    def claim(self, n: int, m: int, inc: bytes, to: bytes) -> None:
        self.say(TransferDone(try_=self.pick(n)[1], lease=self.pick(n if m < 8 else m)[0]), inc, to)

    @rule(n=picks, m=picks, inc=incarnations, to=incarnations, named=st.booleans())
    def cancel(self, n: int, m: int, inc: bytes, to: bytes, named: bool) -> None:
        lease = self.pick(n if m < 8 else m)[0] if named else None
        self.say(PrefillCancel(try_=self.pick(n)[1], lease=lease), inc, to)

    @rule(ns=st.lists(picks, max_size=3), inc=incarnations, to=incarnations, named=st.booleans())
    def renew(self, ns: list[int], inc: bytes, to: bytes, named: bool) -> None:
        picked = [self.pick(n) for n in ns]
        entries = tuple(RenewEntry(try_=try_, lease=lease if named else None) for lease, try_ in picked)
        self.say(LeaseRenew(entries=entries), inc, to)

    @rule(message=st.sampled_from((StalePeer(current=b"2"), PrefillCancelled(try_=try_id(b"r", 1)))), inc=incarnations)
    def say_what_is_not_for_it(self, message: Message, inc: bytes) -> None:
        self.say(message, inc, b"1")

    @rule(n=picks, broke=sometimes)
    def engine_ends(self, n: int, broke: bool) -> None:
        try_ = self.pick(n)[1]
        self.hear(PrefillBroke(try_=try_, problem="odd") if broke else WritesEnded(try_=try_))

    @rule(later=seconds, really=sometimes)
    def tick(self, later: int, really: bool) -> None:
        self.now += later * S * (10 if really else 1)
        self.hear(OfferTick())

    @rule(raised=st.integers(-1, 1), pool_reset=st.booleans(), really=sometimes)
    def epoch_begins(self, raised: int, pool_reset: bool, really: bool) -> None:
        if really:
            self.hear(EpochBegan(epoch=self.epoch + raised, pool_reset=pool_reset))
            self.epoch = self.offers.epoch

    @rule(inc=incarnations, really=sometimes, drain=sometimes)
    def reader_goes(self, inc: bytes, really: bool, drain: bool) -> None:
        if really:
            self.hear(DrainBegan() if drain else ReaderGone(node="d", incarnation=inc))

    def teardown(self) -> None:
        self.hear(ShutdownBegan())
        assert not self.held and self.pool.counts().free == BLOCKS
        self.now += CONFIG.tombstone_ns
        self.hear(OfferTick())
        assert self.offers.next_deadline() is None and self.offers.tombstones() == 0


class AnyPrefillNode(RuleBasedStateMachine):
    """What a decode node may hear. The caller keeps its part: blocks per request, let go when an attempt is over."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.fetches = Fetches("d", b"1", self.pool, CONFIG)
        self.now = 0
        self.blocks: dict[bytes, tuple[int, ...]] = {}
        self.attempts: dict[bytes, int] = dict.fromkeys(REQUESTS, 0)
        self.first_tokens: dict[bytes, int] = dict.fromkeys(REQUESTS, 0)
        self.have: dict[bytes, int] = dict.fromkeys(REQUESTS, 0)

    def hear(self, event: Any) -> None:
        before = canonical(self.fetches), canonical(self.pool)
        try:
            effects = self.fetches.handle(event, self.now)
        except LocalProtocolError:
            assert (canonical(self.fetches), canonical(self.pool)) == before
            assert isinstance(event, FetchAsked)
            self.let_go(event.request)
            return
        for effect in effects:
            self.carry_out(effect)
        self.pool.check()

    def carry_out(self, effect: Any) -> None:
        if isinstance(effect, PostRead):
            assert len(effect.source) == len(effect.target)
            assert set(effect.target) <= set(self.blocks[effect.request])
            assert all(self.pool.holders(block)[Holder.IN_FLIGHT] == 1 for block in effect.target)
        elif isinstance(effect, FirstTokenKnown):
            self.first_tokens[effect.request] += 1
            assert self.first_tokens[effect.request] == 1
        elif isinstance(effect, Fetched):
            held = self.blocks[effect.request]
            assert all(Holder.IN_FLIGHT not in self.pool.holders(b) for b in held), "valid while a read may write"
            self.over(effect.request)
        elif isinstance(effect, AttemptFailed):
            self.let_go(effect.request)

    def let_go(self, request: bytes) -> None:
        self.pool.drop(self.blocks.pop(request, ()), Holder.HELD)

    def over(self, request: bytes) -> None:
        self.let_go(request)
        self.first_tokens[request] = 0

    def say(self, message: Message, incarnation: bytes = b"1") -> None:
        self.hear(OwnerSaid(link="l", node="p", incarnation=incarnation, message=message))

    def try_and_lease(self, request: bytes, odd: bool) -> dict[str, Any]:
        """Of the present attempt, or about."""
        attempt = self.attempts[request]
        generation = 10 * attempt + REQUESTS.index(request) + odd
        lease = LeaseId(node="p", incarnation=b"1", epoch=1, generation=generation)
        return {"try_": try_id(request, attempt), "lease": lease}

    @rule(request=requests, have=st.sampled_from((0, 0, 0, 2, 2, 4, 5)), inc=incarnations, wrong=sometimes)
    def ask(self, request: bytes, have: int, inc: bytes, wrong: bool) -> None:
        blocks = None if request in self.blocks else self.pool.take(-(-PROMPT // SIZE), Holder.HELD)
        if blocks is None:
            return
        self.blocks[request], self.have[request] = blocks, have
        self.attempts[request] += not wrong
        event = FetchAsked(
            request=request,
            attempt=self.attempts[request],
            node="p",
            incarnation=inc,
            epoch=1,
            link="l",
            source_size=SIZE,
            prompt_tokens=PROMPT,
            have=have,
            prompt_digest=b"x",
            sampling=Sampling(),
            blocks=blocks,
            deadline_ns=self.now + 60 * S,
        )
        self.hear(event)

    @rule(request=requests, ready=st.integers(0, 6), have=st.sampled_from((0, 2, 4)), odd=sometimes, how=picks)
    def announce_anything(self, request: bytes, ready: int, have: int, odd: bool, how: int) -> None:
        if how < 4:
            self.announce(request, ready, have, odd, ready + how)

    def announce(self, request: bytes, ready: int, have: int, odd: bool, how: int) -> None:
        named = self.try_and_lease(request, odd)
        end = 3 if ready >= PROMPT else ready // SIZE
        told = {**named, "ready": ready, "blocks": pack_u32(range(have // SIZE, end))}
        finished = ready == PROMPT
        message: Message
        if how < 3:
            message = PrefillProgress(**told)
        elif how < 6:
            message = PrefillAccepted(**told, finished=finished, first_token=b"t" if finished else None)
        elif how < 9:
            message = PrefillDone(**told, first_token=b"u")
        else:
            message = LeaseRenewed(entries=(RenewedEntry(**told, held=how == 9, finished=finished),))
        self.say(message)

    @rule(request=requests, have=st.sampled_from((0, 2, 4)), steps=st.lists(st.sampled_from("crcrx"), max_size=9))
    def go_on(self, request: bytes, have: int, steps: list[str]) -> None:
        """An attempt as it should go, as far as these steps lead: a chunk, a read, the claim's answer."""
        self.ask(request, have, b"1", False)
        ready = 0
        for step in steps:
            if step == "c":
                ready = min(ready + SIZE, PROMPT)
                self.announce(request, ready, self.have[request], False, 8 if ready == PROMPT else 0)
            elif step == "r":
                self.read_ends(0, "done")
            else:
                self.release(request, False, True, b"1")

    @rule(n=picks, how=st.sampled_from(("done",) * 6 + ("failed", "overdue")))
    def read_ends(self, n: int, how: str) -> None:
        rows = self.fetches.transfers.rows() or [{"read": n}]
        read = rows[n % len(rows)]["read"]
        ends = {"done": ReadDone(read=read), "failed": ReadFailed(read=read, problem="odd")}
        self.hear(ends.get(how, ReadOverdue(read=read, problem="odd")))

    @rule(request=requests, odd=sometimes, valid=st.booleans(), inc=incarnations)
    def release(self, request: bytes, odd: bool, valid: bool, inc: bytes) -> None:
        self.say(LeaseReleased(**self.try_and_lease(request, odd), valid=valid), inc)

    @rule(request=requests, odd=sometimes, inc=incarnations, how=picks)
    def refuse(self, request: bytes, odd: bool, inc: bytes, how: int) -> None:
        if how < 4 and not odd:
            return
        named = self.try_and_lease(request, odd)
        if how == 0:
            self.say(StalePeer(current=inc, try_=named["try_"]), inc)
        elif how == 1:
            self.say(StalePeer(current=inc), inc)
        elif how == 2:
            self.say(PrefillFailed(**named, cause="odd"), inc)
        elif how == 3:
            self.say(PrefillFailed(try_=named["try_"], cause="odd"), inc)
        else:
            self.say(PrefillCancelled(try_=named["try_"]), inc)

    @rule(inc=incarnations, how=picks, epoch=st.integers(1, 2), really=sometimes)
    def node_goes(self, inc: bytes, how: int, epoch: int, really: bool) -> None:
        if not really:
            return
        if how < 2:
            self.hear(OwnerGone(node="p", incarnation=inc, proven=how == 0))
        elif how == 2:
            self.hear(OwnerEpoch(node="p", incarnation=inc, epoch=epoch))
        elif how == 3:
            self.hear(MoverReaped())

    @rule(request=requests, really=sometimes)
    def leave(self, request: bytes, really: bool) -> None:
        if really:
            self.hear(FetchLeft(request=request))
            self.over(request)

    @rule(later=seconds)
    def tick(self, later: int) -> None:
        self.now += later * S
        self.hear(FetchTick())

    def teardown(self) -> None:
        for request in REQUESTS:
            self.hear(FetchLeft(request=request))
            self.over(request)
        assert self.fetches.rows() == []
        for row in self.fetches.transfers.rows():
            assert row["state"] == "quarantined"
            self.hear(ReadDone(read=row["read"]))
        assert self.pool.counts().free == BLOCKS
        self.now += CONFIG.answer_ns
        self.hear(FetchTick())
        assert self.fetches.next_deadline() is None and not self.fetches.peer_blocked("p", b"1")


AnyReader.TestCase.settings = SETTINGS
AnyPrefillNode.TestCase.settings = SETTINGS
test_offers_survive_any_reader = AnyReader.TestCase
test_fetches_survive_any_prefill_node = AnyPrefillNode.TestCase
