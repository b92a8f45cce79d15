"""What a soak would say of a process that leaks: without this, its zeros would mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdbus.nodes.cluster import Cluster

from tests.chaos.arena import Arena
from tests.chaos.heard import Heard
from tests.chaos.outcome import Outcome
from tests.chaos.plan import Fault
from tests.soak.shift import Shift
from tests.soak.sizes import Sample, Size, leaks, trend
from tests.soak.summary import Summary

P = "prefill-2 control"


def samples(of_turn: Callable[[int], Size], turns: int = 20) -> list[Sample]:
    return [Sample(at_s=10.0 * i, requests=50 * i, latency_ms=20, sizes={P: of_turn(i)}) for i in range(turns)]


def size(descriptors: int = 30, threads: int = 4, pid: int = 7) -> Size:
    return Size(pid, 35_000, descriptors, threads)


def test_what_goes_up_and_down_is_no_leak() -> None:
    assert leaks(samples(lambda i: size(30 + 3 * (i % 4), 4 + i % 2))) == []


def test_what_grows_with_every_turn_is_one() -> None:
    assert leaks(samples(lambda i: size(descriptors=30 + i))) == [f"{P}: descriptors grew from 34.5 to 46.5"]
    assert leaks(samples(lambda i: size(threads=4 + i // 3))) == [f"{P}: threads grew from 5 to 9"]


def test_what_fills_in_the_first_turns_is_no_leak() -> None:
    assert leaks(samples(lambda i: size(descriptors=30 + 10 * min(i, 2)))) == []


def test_a_new_life_begins_anew() -> None:
    """A mover may end with the one that it sends to."""
    assert leaks(samples(lambda i: size(descriptors=30 if i < 10 else 60, pid=i // 10))) == []


def test_a_single_odd_sample_says_nothing() -> None:
    assert trend([1, 1, 1, 1, 1, 1, 1, 90, 1]).growth == 0


def test_too_few_turns_say_nothing() -> None:
    assert leaks([]) == [] and leaks(samples(lambda i: size(), turns=1)) == []


@pytest.mark.parametrize("what", ["unfair", "hung", "wrong", "leaked", "lost"])
def test_what_must_not_be_makes_the_soak_bad(what: str) -> None:
    outcome = Outcome(Fault(1, 0, "kill all", "prefill", "any"), right=10, failed=1)
    assert Summary(1, [outcome], samples(lambda i: size())).good
    setattr(outcome, what, 1)
    assert not Summary(1, [outcome], samples(lambda i: size())).good


def test_what_leaks_is_told_as_json_too() -> None:
    said: dict[str, Any] = Summary(1, [], samples(lambda i: size(descriptors=30 + i))).as_dict()
    assert not said["good"] and said["problems"] == [f"{P}: descriptors grew from 34.5 to 46.5"]


def test_a_shift_works_on_any_arena() -> None:
    """It is one, with what the other was given."""
    arena = Arena(Cluster(2, 2, options={"engine": "coded"}), {}, Heard(), 2.0)
    assert vars(arena).keys() < vars(Shift(arena, 12.0)).keys()
