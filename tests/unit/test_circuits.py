"""Circuits: who is not worth asking for a while. The last word over all of them is a property of random histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.nodes.circuits import FAILURES_MAX, LAST_NS, OPEN_MAX_NS, OPEN_NS, Circuits, CircuitState

P = "p/01/1"
OPEN, HALF_OPEN, CLOSED = CircuitState.OPEN, CircuitState.HALF_OPEN, CircuitState.CLOSED


class Asked:
    """Circuits, and requests that are asked one after the other."""

    def __init__(self) -> None:
        self.circuits = Circuits()
        self.requests = 0
        self.now = 0

    def ask(self, peer: str = P) -> bytes:
        self.requests += 1
        request = b"%d" % self.requests
        assert self.circuits.admits(peer, self.now)
        self.circuits.asked(request, peer)
        return request

    def fail(self, times: int = 1) -> int:
        """So many attempts fail, one after the other; for how long the last one opened the circuit."""
        opened = 0
        for _ in range(times):
            opened = self.circuits.failed(self.ask(), self.now)
        return opened

    @property
    def state(self) -> CircuitState:
        return self.circuits.state(P)

    @property
    def admits(self) -> bool:
        return self.circuits.admits(P, self.now)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def opened(asked: Asked) -> Asked:
    assert asked.fail(FAILURES_MAX) == OPEN_NS
    return asked


def test_one_failure_makes_it_come_last_for_a_while(asked: Asked) -> None:
    assert asked.fail() == 0
    assert asked.admits and asked.circuits.comes_last(P, asked.now)
    asked.now += LAST_NS
    assert not asked.circuits.comes_last(P, asked.now)


def test_several_in_a_row_open_it(opened: Asked) -> None:
    assert opened.state is OPEN and not opened.admits
    opened.now += OPEN_NS - 1
    assert not opened.admits
    opened.now += 1
    assert opened.admits


def test_a_success_between_begins_the_row_anew(asked: Asked) -> None:
    asked.fail(FAILURES_MAX - 1)
    asked.circuits.fetched(asked.ask())
    assert asked.fail(FAILURES_MAX - 1) == 0
    assert asked.state is CLOSED


def test_many_that_fail_of_one_cause_open_it_once(asked: Asked) -> None:
    """Twenty requests lose one prefill node at once: that is one lesson, not eighteen doublings."""
    requests = [asked.ask() for _ in range(20)]
    openings = [asked.circuits.failed(request, asked.now) for request in requests]
    assert [ns for ns in openings if ns] == [OPEN_NS]


def test_the_trial_is_the_only_one_asked(opened: Asked) -> None:
    opened.now += OPEN_NS
    opened.ask()
    assert opened.state is HALF_OPEN and not opened.admits
    opened.now += 100 * OPEN_MAX_NS
    assert not opened.admits


def test_a_trial_that_succeeds_closes_it(opened: Asked) -> None:
    opened.now += OPEN_NS
    assert opened.circuits.fetched(opened.ask())
    assert opened.state is CLOSED and opened.admits and not opened.circuits.comes_last(P, opened.now)
    assert opened.fail(FAILURES_MAX - 1) == 0


def test_a_trial_that_fails_opens_it_for_twice_as_long_up_to_a_bound(opened: Asked) -> None:
    waits = [OPEN_NS]
    for _ in range(8):
        opened.now += waits[-1]
        waits.append(opened.fail())
    assert waits == [min(OPEN_NS << i, OPEN_MAX_NS) for i in range(9)]


def test_a_trial_that_says_nothing_leaves_the_next_one_to_decide(opened: Asked) -> None:
    """The client cancelled it, or the node refused it for want of room."""
    opened.now += OPEN_NS
    opened.circuits.undecided(opened.ask())
    assert opened.state is OPEN and opened.admits
    assert opened.fail() == 2 * OPEN_NS


def test_what_began_before_it_opened_decides_nothing_but_by_success(asked: Asked) -> None:
    early = [asked.ask(), asked.ask(), asked.ask()]
    asked.fail(FAILURES_MAX)
    asked.now += OPEN_NS
    asked.ask()
    assert asked.circuits.failed(early[0], asked.now) == 0
    asked.circuits.undecided(early[1])
    assert asked.state is HALF_OPEN
    assert asked.circuits.fetched(early[2])
    assert asked.state is CLOSED


def test_another_life_or_epoch_is_another_circuit(opened: Asked) -> None:
    for other in ("p/01/2", "p/02/1"):
        assert opened.circuits.admits(other, opened.now)


@pytest.mark.parametrize(("life", "but"), [("p/01/", ""), ("p/01/", "p/01/2")])
def test_nothing_is_kept_of_one_that_is_over(opened: Asked, life: str, but: str) -> None:
    opened.now += OPEN_NS
    trial = opened.ask()
    opened.circuits.forget(life, but)
    assert opened.circuits.failed(trial, opened.now) == 0
    assert vars(opened.circuits) == vars(Circuits())


def test_a_request_that_was_asked_of_nobody_says_nothing(asked: Asked) -> None:
    assert asked.circuits.failed(b"x", 0) == 0
    assert not asked.circuits.fetched(b"x")
    asked.circuits.undecided(b"x")


ENDS = st.sampled_from(["failed", "fetched", "undecided"])
TIMES = st.integers(0, 4 * OPEN_NS)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), TIMES, ENDS, st.integers(0, 9)), max_size=60))
def test_it_never_locks_up(history: list[tuple[bool, int, str, int]]) -> None:
    """Whatever happened: once nothing is under way, the node is asked again after the longest wait."""
    asked = Asked()
    under_way: list[bytes] = []
    for ask, wait_ns, how, which in history:
        asked.now += wait_ns
        if ask and asked.admits:
            under_way.append(asked.ask())
        elif under_way:
            end(asked, under_way.pop(which % len(under_way)), how)
        assert (asked.state is HALF_OPEN) <= bool(under_way)
    for request in under_way:
        end(asked, request, "undecided")
    asked.now += OPEN_MAX_NS
    asked.circuits.fetched(asked.ask())
    assert vars(asked.circuits) == vars(Circuits())


def end(asked: Asked, request: bytes, how: str) -> None:
    match how:
        case "failed":
            asked.circuits.failed(request, asked.now)
        case "fetched":
            asked.circuits.fetched(request)
        case "undecided":
            asked.circuits.undecided(request)
