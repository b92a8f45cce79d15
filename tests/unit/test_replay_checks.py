"""What the checks say of turns that no core of ours would take."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pdbus.bus.members import MembershipConfig
from pdbus.bus.messages import (
    Agent,
    Geometry,
    Hello,
    LeaseId,
    LeaseReleased,
    PrefillAccepted,
    PrefillDone,
    PrefillRequest,
    Sampling,
    Timeline,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import Header, pack_u32
from pdbus.connector.ipc import StepRow
from pdbus.connector.timers import Timers
from pdbus.nodes import events as ev
from pdbus.nodes.core import CoreConfig
from pdbus.nodes.recording import CoreBegan
from pdbus.nodes.replay.blocks import Blocks
from pdbus.nodes.replay.check_circuits import CircuitCheck
from pdbus.nodes.replay.check_clock import ClockCheck
from pdbus.nodes.replay.check_copies import CopyCheck
from pdbus.nodes.replay.check_leases import LeaseCheck
from pdbus.nodes.replay.check_offers import OfferCheck
from pdbus.nodes.replay.check_reads import ReadCheck
from pdbus.nodes.replay.check_requests import RequestCheck
from pdbus.nodes.replay.check_steps import StepCheck
from pdbus.nodes.replay.checks import Checks
from pdbus.nodes.replay.cluster_run import _denied, _otherwise
from pdbus.nodes.replay.facts import Answered, Confirmed, Ended, Facts, Granted
from pdbus.nodes.replay.turns import Turn

SIZE = 4
S = 1_000_000_000
REQUEST = b"R" * 16
P, D = ("p", b"p" * 16), ("d", b"d" * 16)
TRY = TryId(node="d", incarnation=D[1], request=REQUEST, attempt=1)
LEASE = LeaseId(node="p", incarnation=P[1], epoch=1, generation=1)
HASHES = (b"one", b"two")


class Watched:
    """All checks of one node, and what they have said: rules and texts."""

    def __init__(self, life: tuple[str, bytes], *, staged: bool = False) -> None:
        self.said: list[tuple[str, str]] = []
        self.facts = Facts(life)
        self.blocks = Blocks(SIZE, staged)
        core = CoreConfig(
            name=life[0], incarnation=life[1], decodes=True, blocks=9, block_size=SIZE, block_bytes=1, max_model_len=99
        )
        membership = MembershipConfig(name=life[0], incarnation=life[1], hello=Hello(role="decode"))
        report = self._report
        self.leases = LeaseCheck(report, CoreBegan(core=core, membership=membership, version="0"), self.facts)
        self.reads = ReadCheck(report, self.blocks, self.facts)
        self._checks = Checks(
            [
                RequestCheck(report, self.facts),
                self.leases,
                StepCheck(report, self.blocks),
                self.reads,
                OfferCheck(report, self.blocks),
                CircuitCheck(report),
                CopyCheck(report, self.blocks),
            ]
        )
        self._now = 0

    def _report(self, turn: Turn, rule: str, text: str) -> None:
        self.said.append((rule.partition(":")[0], text))

    def turn(self, event: ev.NodeEvent, *effects: ev.NodeEffect, now: int = 0) -> None:
        self._now = now or self._now + 1
        turn = Turn(1, self._now, event, list(effects))
        self._checks.turn(turn)
        self.leases.every_turn(turn)

    @property
    def rules(self) -> list[str]:
        return [rule for rule, _ in self.said]


def came(life: tuple[str, bytes], message: Any, **rest: Any) -> ev.MessageCame[Any]:
    return ev.MessageCame(link="l", header=Header(from_=life[0], from_inc=life[1]), message=message, **rest)


def send(to: tuple[str, bytes], message: Any) -> ev.Send[Any]:
    return ev.Send(link="l", to=to[0], to_inc=to[1], message=message)


def ask(attempt: TryId = TRY) -> PrefillRequest:
    return PrefillRequest(
        try_=attempt, sampling=Sampling(), have=0, deadline_ms=60_000, prompt_tokens=6, prompt_digest=b""
    )


def done(blocks: tuple[int, ...] = (5, 6)) -> PrefillDone:
    return PrefillDone(try_=TRY, lease=LEASE, ready=6, blocks=pack_u32(blocks))


def read(
    number: int = 1, source: tuple[int, ...] = (5, 6), target: tuple[int, ...] = (0, 1), begin: int = 0, end: int = 6
) -> ev.StartRead:
    peer = f"p/{P[1].hex()}/1"
    return ev.StartRead(read=number, peer=peer, begin=begin, end=end, source=source, target=target, request=REQUEST)


def row(seq: int, start: int, count: int, blocks: tuple[int, ...] = (), **rest: Any) -> StepRow:
    return StepRow(seq=seq, start=start, count=count, new_blocks=pack_u32(blocks), **rest)


def step(number: int, *rows: StepRow) -> ev.RunStep:
    return ev.RunStep(step=number, rows=rows)


def end(tokens: int = 0) -> ev.EndRequest:
    return ev.EndRequest(
        request=REQUEST, seq=1, reason="length", prompt_tokens=6, cached_tokens=0, completion_tokens=tokens,
        timeline=Timeline(),
    )  # fmt: skip


ASKED = ev.GenerateAsked(
    request=REQUEST, link="c", client="c", prompt_tokens=6, prompt_digest=b"", block_hashes=HASHES[:1],
    sampling=Sampling(), deadline_ns=60 * S, credit=9,
)  # fmt: skip
OPEN = ev.OpenSequence(seq=1, sampling=Sampling(), request=REQUEST)
RELEASED = LeaseReleased(try_=TRY, lease=LEASE, valid=True, cause="done")


@pytest.fixture
def d() -> Watched:
    """A decode node that has asked for a prompt of two blocks."""
    d = Watched(D)
    d.turn(ASKED, OPEN, send(P, ask()))
    return d


@pytest.fixture
def fetched(d: Watched) -> Watched:
    """And has read and claimed all of it."""
    d.turn(came(P, done()), read())
    d.turn(ev.ReadEnded(read=1), send(P, TransferDone(try_=TRY, lease=LEASE)))
    return d


# ---------------------------------------------------------------- a decode node


def test_a_hand_off_by_the_rules_is_silent(fetched: Watched) -> None:
    fetched.turn(came(P, RELEASED), step(1, row(1, 6, 1, (0, 1))))
    fetched.turn(ev.StepEnded(step=1, rows=(), compute_ns=1), ev.EmitToken(request=REQUEST, seq=1), end(1))
    assert fetched.said == []
    assert [confirmed.lease for confirmed in fetched.facts.confirmed] == [LEASE]


def test_unconfirmed_kv_is_not_computed_on(fetched: Watched) -> None:
    fetched.turn(ev.Tick(), step(1, row(1, 6, 1, (0, 1))))
    assert fetched.rules == ["4", "4"]
    assert "what read 1 brought, unconfirmed" in fetched.said[0][1]


def test_the_word_of_another_lease_confirms_nothing(fetched: Watched) -> None:
    other = LeaseId(node="p", incarnation=P[1], epoch=1, generation=2)
    fetched.turn(came(P, LeaseReleased(try_=TRY, lease=other, valid=True, cause="done")), step(1, row(1, 6, 1, (0, 1))))
    assert fetched.rules == ["4", "4"]


def test_a_failed_read_leaves_garbage(d: Watched) -> None:
    d.turn(came(P, done()), read())
    d.turn(ev.ReadEnded(read=1, problem="remote disconnect"), send(P, TransferDone(try_=TRY, lease=LEASE)))
    assert d.said == [("R6", f"attempt 1 of request {REQUEST.hex()} at p claims with 0 of 2 blocks read")]


def test_no_two_reads_share_a_block(d: Watched) -> None:
    d.turn(came(P, PrefillAccepted(try_=TRY, lease=LEASE, ready=4, blocks=pack_u32((5,)))), read(1, (5,), (0,), end=4))
    d.turn(came(P, done()), read(2, (6,), (0,), begin=4))
    assert d.said == [
        ("2", f"read 2 of attempt 1 of request {REQUEST.hex()} at p goes into block 0, which read 1 may still write")
    ]


def test_a_read_of_what_was_not_announced_is_seen(d: Watched) -> None:
    d.turn(came(P, done()), read(source=(5, 7)))
    d.turn(ev.Tick(), read(2))
    assert d.rules == ["R3", "R3", "2", "2"]


def test_a_sequence_whose_block_was_taken_may_only_begin_anew(d: Watched) -> None:
    """That it was preempted shows only in what it does next."""
    other = b"O" * 16
    asked = ev.GenerateAsked(
        request=other, link="c", client="o", prompt_tokens=4, prompt_digest=b"", block_hashes=(b"x",),
        sampling=Sampling(), deadline_ns=60 * S, credit=9,
    )  # fmt: skip
    d.turn(asked, ev.OpenSequence(seq=2, sampling=Sampling(), request=other), step(1, row(2, 0, 4, (0,))))
    d.turn(came(P, done()), ev.CloseSequence(seq=9))
    d.turn(ev.StepEnded(step=1, rows=(), compute_ns=1))
    d.turn(came(P, done()), read())
    assert d.said == []
    d.turn(ev.ReadEnded(read=1), step(2, row(2, 4, 1, (8,))))
    assert d.rules == ["2"] and "goes on with a block that read 1" in d.said[0][1]


def test_blocks_of_another_size_are_read_by_token_position(d: Watched) -> None:
    """The prefill node's blocks hold 8 tokens, ours 4: one of theirs goes into two of ours."""
    hello = Hello(role="prefill", geometry=Geometry(block_size=8))
    d.turn(came(P, hello))
    d.turn(came(P, done((5,))), read(1, (5,), (0, 1)))
    assert d.said == []
    d.turn(came(P, done((5,))), read(2, (5,), (2,)))
    assert set(d.rules) == {"R3"}


def test_a_late_read_keeps_others_away(d: Watched) -> None:
    d.turn(came(P, PrefillAccepted(try_=TRY, lease=LEASE, ready=4, blocks=pack_u32((5,)))), read(1, (5,), (0,), end=4))
    d.turn(ev.ReadDoubtful(read=1, problem="odd"))
    d.turn(came(P, done()), read(2, (6,), (1,), begin=4))
    assert d.rules == ["R9"]


def test_a_second_attempt_goes_elsewhere(d: Watched) -> None:
    second = TryId(node="d", incarnation=D[1], request=REQUEST, attempt=2)
    d.turn(ev.Tick(), send(P, ask(second)))
    assert d.rules == ["R3"]


def test_tokens_are_counted(d: Watched) -> None:
    d.turn(ev.Tick(), ev.TakeFirstToken(request=REQUEST, seq=1, payload=b""), end(2))
    d.turn(ev.Tick(), ev.EmitToken(request=REQUEST, seq=1))
    assert [text.partition(" ")[2][32:] for _, text in d.said] == [
        " ends with 2 tokens of 1",
        " is given a token after its end",
    ]


def test_a_request_that_a_tick_leaves_over_its_deadline(d: Watched) -> None:
    d.turn(ev.Tick(), now=61 * S)
    assert d.rules == ["6"]


# ---------------------------------------------------------------- a prefill node


def lease_event(event: str, **data: object) -> ev.Publish:
    named = {"request": REQUEST.hex(), "attempt": 1, "decode_node": "d", "generation": 1, "epoch": 1}
    return ev.Publish(topic="lease", event=event, data={**named, **data})


def ended(cause: str, held_ns: int) -> ev.Publish:
    return lease_event("lease.ended", cause=cause, held_ns=held_ns)


@pytest.fixture
def p() -> Watched:
    """A prefill node that has admitted the prompt and computes it."""
    p = Watched(P)
    asked = came(D, ask(), block_hashes=HASHES[:1])
    p.turn(
        asked,
        lease_event("lease.began", blocks=2),
        ev.OpenSequence(seq=-1, sampling=Sampling(), try_=TRY),
        ev.AdvertiseLeases(leases=1),
        step(1, row(-1, 0, 6, (5, 6))),
    )
    return p


@pytest.fixture
def ready(p: Watched) -> Watched:
    p.turn(ev.StepEnded(step=1, rows=(), compute_ns=1), send(D, done()), ev.CloseSequence(seq=-1))
    return p


def claimed(held_ns: int, *, lease: LeaseId = LEASE, valid: bool = True) -> list[Any]:
    answer = LeaseReleased(try_=TRY, lease=lease, valid=valid, cause="done")
    return [
        came(D, TransferDone(try_=TRY, lease=lease)),
        ended("done", held_ns),
        ev.AdvertiseLeases(leases=0),
        send(D, answer),
    ]


def test_a_lease_by_the_rules_is_silent(ready: Watched) -> None:
    ready.turn(*claimed(2))
    assert ready.said == []
    assert ready.facts.leases[1].cause == "done"


def test_a_lease_ends_once(ready: Watched) -> None:
    ready.turn(*claimed(2))
    ready.turn(ev.Tick(), ended("expired", 3))
    assert ready.rules == ["3"] and "a second time, after 'done'" in ready.said[0][1]


@pytest.mark.parametrize("cause", ["cancelled", "expired", "deadline", "superseded", "reader dead", "failed", "bored"])
def test_a_cause_must_be_what_happened(ready: Watched, cause: str) -> None:
    ready.turn(ev.CreditGiven(client="c", index=1), ended(cause, 2), ev.AdvertiseLeases(leases=0))
    assert ready.rules == ["3"] and f"ends as {cause!r}, but" in ready.said[0][1]


def test_a_claim_before_the_last_chunk_is_not_done(p: Watched) -> None:
    p.turn(*claimed(1))
    assert p.said[0][1].endswith("ends as 'done', but its prompt is not computed")


def test_what_a_lease_announces_is_not_written(ready: Watched) -> None:
    other = TryId(node="d", incarnation=D[1], request=b"O" * 16, attempt=1)
    ready.turn(
        came(D, ask(other)), ev.OpenSequence(seq=-2, sampling=Sampling(), try_=other), step(2, row(-2, 0, 2, (6,)))
    )
    assert ready.rules == ["2"] and "writes block 6, which a held lease announces" in ready.said[0][1]


def test_what_is_announced_must_be_there(p: Watched) -> None:
    p.turn(ev.StepEnded(step=1, rows=(), compute_ns=1), send(D, done((6, 5))))
    assert p.rules == ["4", "4"]


def test_a_lease_that_a_tick_leaves_over_its_time(ready: Watched) -> None:
    ready.turn(ev.Tick(), now=31 * S)
    assert ready.rules == ["6"]


def test_no_lease_survives_the_mover_that_it_was_of(ready: Watched) -> None:
    ready.turn(ev.MoverLost(problem="killed", asked=False))
    assert ready.rules == ["3"] and "survives the mover's loss" in ready.said[0][1]


# ---------------------------------------------------------------- time, and the others' word


def clock(*timers: Timers[str]) -> tuple[ClockCheck, list[str]]:
    said: list[str] = []
    return ClockCheck(lambda turn, rule, text: said.append(text), *timers), said


def test_a_tick_that_does_not_come_is_missed() -> None:
    timers: Timers[str] = Timers()
    timers.set("lease", 5 * S)
    check, said = clock(timers)
    for second in (1, 4, 20, 21):
        check.every_turn(Turn(1, second * S, ev.CreditGiven(client="c", index=1), []))
    assert said == [], "a node that was stopped is late, too, but only once"
    check.every_turn(Turn(1, 22 * S, ev.CreditGiven(client="c", index=1), []))
    assert said == ["the tick that was due 17.0 s ago has not come"]


def test_time_goes_forward() -> None:
    check, said = clock()
    check.every_turn(Turn(1, 7, ev.Tick(), []))
    check.every_turn(Turn(2, 5, ev.Tick(), []))
    assert said == ["time goes back by 2 ns"]


@pytest.mark.parametrize(
    ("granted", "clean", "denied"),
    [
        (Granted(("d", REQUEST.hex(), 1), "done", 1), True, ""),
        (Granted(("d", REQUEST.hex(), 1), "expired", 1), True, "it ended as 'expired' there"),
        (Granted(("d", REQUEST.hex(), 1), "", 1), True, "it was never released there"),
        (Granted(("d", REQUEST.hex(), 1), "", 1), False, ""),
        (Granted(("d", "other", 1), "done", 1), True, "p granted it to another try"),
        (None, True, "p never granted it"),
        (None, False, ""),
    ],
)
def test_a_prefill_node_has_to_agree(granted: Granted | None, clean: bool, denied: str) -> None:
    """As far as its recording goes."""
    owner = Facts(P, leases={1: granted} if granted else {}, clean=clean)
    assert _denied(Confirmed(LEASE, TRY, 1, 1), owner) == denied


def test_nothing_is_imported_that_a_base_install_lacks() -> None:
    code = "import sys, pdbus.nodes.replay.verify; print([m for m in ('torch', 'numpy', 'nixl') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- a client and its node


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (("stop", 3), ""),
        (("stop", 2), "d ended it as 'stop' after 3 tokens"),
        (("error", 3), "d ended it as 'stop' after 3 tokens"),
    ],
)
def test_a_client_is_told_what_its_node_decided(told: tuple[str, int], problem: str) -> None:
    node = Facts(D, ended={REQUEST: Ended("stop", 3)}, clean=True)
    assert _otherwise(REQUEST, Answered(D, *told, 1, 1), node) == problem


@pytest.mark.parametrize(
    ("reason", "clean", "problem"),
    [("stop", True, "d did not end it"), ("stop", False, ""), ("cancelled", True, ""), ("error", True, "")],
)
def test_an_answer_that_its_node_never_gave_is_found(reason: str, clean: bool, problem: str) -> None:
    """What was cancelled or refused before the core heard of it is in no recording, nor is what a cut one lost."""
    assert _otherwise(REQUEST, Answered(D, reason, 0, 1, 1), Facts(D, clean=clean)) == problem


# ---------------------------------------------------------------- circuits

OTHER = TryId(node="d", incarnation=D[1], request=b"O" * 16, attempt=1)
OPENED_MS = 1000
OPENED = ev.Publish(topic="node", event="circuit.opened", data={"node": "p", "for_ms": OPENED_MS, "cause": "x"})


def failed(attempt: TryId) -> ev.Publish:
    data: dict[str, object] = {"request": attempt.request.hex(), "attempt": attempt.attempt, "node": "p", "cause": "x"}
    return ev.Publish(topic="request", event="attempt.failed", data=data)


@pytest.fixture
def opened() -> Watched:
    d = Watched(D)
    d.turn(came(P, Agent(epoch=1, name="p")))
    d.turn(ev.Tick(), OPENED, now=S)
    return d


def test_an_open_circuit_is_left_alone(opened: Watched) -> None:
    opened.turn(ev.Tick(), send(P, ask()), now=S + OPENED_MS * 1_000_000 - 1)
    assert opened.rules == ["an open circuit is left alone"]


def test_one_trial_at_a_time(opened: Watched) -> None:
    opened.turn(ev.Tick(), send(P, ask()), now=2 * S)
    opened.turn(ev.Tick(), send(P, ask()))
    assert opened.said == []
    opened.turn(ev.Tick(), send(P, ask(OTHER)))
    assert "beside its trial" in opened.said[0][1]


@pytest.mark.parametrize(
    "over",
    [
        pytest.param((ev.Tick(), failed(TRY)), id="the trial says nothing"),
        pytest.param((ev.Tick(), ev.Publish(topic="node", event="circuit.closed", data={"node": "p"})), id="closed"),
        pytest.param((came(P, Agent(epoch=2, name="p")),), id="another epoch"),
    ],
)
def test_after_its_trial_it_is_asked_again(opened: Watched, over: tuple[Any, ...]) -> None:
    opened.turn(ev.Tick(), send(P, ask()), now=2 * S)
    opened.turn(*over)
    opened.turn(ev.Tick(), send(P, ask(OTHER)))
    assert opened.said == []
