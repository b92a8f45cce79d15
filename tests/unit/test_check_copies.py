"""What the checks say of copies between device and mirror that no core of ours would begin."""

from __future__ import annotations

import pytest

from pdbus.bus.messages import PrefillDone, PrefillRequest, Sampling, TransferDone
from pdbus.bus.wire import pack_u32
from pdbus.connector.staging import Way
from pdbus.nodes import events as ev

from .test_replay_checks import (
    ASKED,
    HASHES,
    LEASE,
    OPEN,
    RELEASED,
    TRY,
    D,
    P,
    Watched,
    ask,
    came,
    done,
    end,
    read,
    row,
    send,
    step,
)


def copy(number: int, way: Way, *blocks: int) -> ev.StartCopy:
    return ev.StartCopy(copy=number, way=way, blocks=blocks)


@pytest.fixture
def fetched() -> Watched:
    """A staged decode node that has read and claimed a prompt of two blocks."""
    d = Watched(D, staged=True)
    d.turn(ASKED, OPEN, send(P, ask()))
    d.turn(came(P, done()), read())
    d.turn(ev.ReadEnded(read=1), send(P, TransferDone(try_=TRY, lease=LEASE)))
    return d


def test_a_hand_off_by_the_rules_is_silent(fetched: Watched) -> None:
    fetched.turn(came(P, RELEASED), copy(1, Way.UP, 0, 1))
    fetched.turn(ev.CopyEnded(copy=1), step(1, row(1, 6, 1, (0, 1))))
    fetched.turn(ev.StepEnded(step=1, rows=(), compute_ns=1), ev.EmitToken(request=b"R" * 16, seq=1), end(1))
    assert fetched.said == []


def test_kv_is_not_computed_on_before_it_is_up(fetched: Watched) -> None:
    fetched.turn(came(P, RELEASED), copy(1, Way.UP, 0, 1), step(1, row(1, 6, 1, (0, 1))))
    assert fetched.rules == ["4", "4", "2"]
    assert "writes block 1, which copy 1 reads or writes" in fetched.said[2][1]


def test_unconfirmed_kv_does_not_go_up(fetched: Watched) -> None:
    fetched.turn(ev.Tick(), copy(1, Way.UP, 0, 1))
    assert fetched.rules == ["4", "4"]
    assert fetched.said[0][1] == "copy 1 brings block 0 up, but in its mirror is what read 1 brought, unconfirmed"


def test_no_read_goes_where_a_copy_does(fetched: Watched) -> None:
    fetched.turn(came(P, RELEASED), copy(1, Way.UP, 0, 1))
    fetched.turn(came(P, done()), read(2))
    assert "2" in fetched.rules and "which copy 1 may still read or write" in fetched.said[-1][1]


def test_with_the_worker_all_that_was_up_is_gone(fetched: Watched) -> None:
    fetched.turn(came(P, RELEASED), copy(1, Way.UP, 0, 1))
    fetched.turn(ev.CopyEnded(copy=1))
    fetched.turn(ev.WorkerLost(problem="killed"))
    fetched.turn(ev.WorkerUp(), OPEN, step(1, row(1, 6, 1, (0, 1))))
    assert fetched.rules == ["4", "4"] and "there is garbage" in fetched.said[0][1]


@pytest.fixture
def prefilling() -> Watched:
    """A staged prefill node that has granted a lease and computed the prompt's first block."""
    p = Watched(P, staged=True)
    asked = PrefillRequest(
        try_=TRY, sampling=Sampling(), have=0, deadline_ms=60_000, prompt_tokens=6, prompt_digest=b""
    )
    data = {"request": TRY.request.hex(), "attempt": 1, "decode_node": "d", "generation": 1, "epoch": 1}
    began = ev.Publish(topic="lease", event="lease.began", data={**data, "blocks": 2})
    p.turn(
        came(D, asked, block_hashes=HASHES[:1]), began, ev.OpenSequence(seq=-1, sampling=Sampling(), try_=TRY),
        ev.AdvertiseLeases(leases=1), step(1, row(-1, 0, 4, (5, 6))),
    )  # fmt: skip
    p.turn(ev.StepEnded(step=1, rows=(), compute_ns=1), copy(1, Way.DOWN, 5), step(2, row(-1, 4, 2, sample=True)))
    return p


def finished(p: Watched) -> None:
    p.turn(ev.StepEnded(step=2, rows=(), compute_ns=1), copy(2, Way.DOWN, 6))
    p.turn(ev.CopyEnded(copy=2), send(D, PrefillDone(try_=TRY, lease=LEASE, ready=6, blocks=pack_u32((5, 6)))))


def test_what_has_been_copied_down_may_be_announced(prefilling: Watched) -> None:
    prefilling.turn(ev.CopyEnded(copy=1))
    finished(prefilling)
    assert prefilling.said == []


def test_what_is_still_being_copied_may_not(prefilling: Watched) -> None:
    finished(prefilling)
    assert prefilling.rules == ["4", "4"]
    assert "announces block 5 as block 0 of its prompt, but there is garbage" in prefilling.said[0][1]
    assert "announces block 5, which is still being written" in prefilling.said[1][1]


def test_an_announced_block_is_not_copied_down_again(prefilling: Watched) -> None:
    prefilling.turn(ev.CopyEnded(copy=1))
    finished(prefilling)
    prefilling.turn(ev.Tick(), copy(3, Way.DOWN, 5))
    assert prefilling.said == [("2", "copy 3 down is of block 5, which a held lease announces")]


def test_a_block_that_is_written_is_not_copied(prefilling: Watched) -> None:
    prefilling.turn(ev.Tick(), copy(2, Way.DOWN, 6), copy(3, Way.DOWN, 5))
    assert [text.partition("which ")[2] for _, text in prefilling.said] == [
        "the step that runs writes",
        "copy 1 may still read or write",
    ]
