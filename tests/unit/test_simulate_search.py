"""The cheapest cluster: found wherever more nodes never make it worse, without trying them all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.simulate.search import Search, Target, parse_target

MOST = (24, 24)
TARGET = Target("ttft", "p90", 1_000_000_000)


class Clusters:
    """Meets the target with so many prefill nodes, decode nodes, and so many of both together."""

    def __init__(self, prefill: int, decode: int, both: int) -> None:
        self.needs = prefill, decode, both
        self.played: list[tuple[int, int]] = []

    def meets(self, p: int, d: int) -> bool:
        return p >= self.needs[0] and d >= self.needs[1] and p + 2 * d >= self.needs[2]

    def play(self, p: int, d: int) -> dict[str, Any]:
        self.played.append((p, d))
        ms = 500.0 if self.meets(p, d) else 5000.0
        busy = min(1.0, self.needs[0] / p)
        return {"requests": 100, "completed": 100, "ttft_ms": {"p90": ms}, "prefill_busy": busy}

    def cheapest(self, decode_cost: float) -> float:
        costs = (p + d * decode_cost for p in range(1, 25) for d in range(1, 25) if self.meets(p, d))
        return min(costs, default=math.inf)


@pytest.mark.parametrize("decode_cost", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("needs", [(1, 1, 0), (3, 5, 0), (24, 24, 0), (2, 2, 40), (20, 1, 60), (1, 20, 0), (5, 5, 72)])
def test_it_costs_no_more_than_any_other_that_meets_the_target(needs: tuple[int, int, int], decode_cost: float) -> None:
    clusters = Clusters(*needs)
    search = Search(clusters.play, (TARGET,), MOST, decode_cost)
    found = search.cheapest()
    assert found is not None and found.meets
    assert search.cost(found.prefill, found.decode) == clusters.cheapest(decode_cost)
    assert len(set(clusters.played)) == len(clusters.played) < 60


def test_none_is_found_when_the_largest_does_not_meet_it() -> None:
    clusters = Clusters(25, 1, 0)
    assert Search(clusters.play, (TARGET,), MOST).cheapest() is None
    assert clusters.played == [MOST]


def test_requests_that_do_not_complete_meet_nothing() -> None:
    """However quick the others are."""
    played = {"requests": 100, "completed": 98, "ttft_ms": {"p90": 1.0}, "prefill_busy": 0.0}
    assert Search(lambda p, d: played, (TARGET,), MOST).cheapest() is None


def test_targets_are_read_as_they_are_written() -> None:
    assert parse_target("ttft.p90=1s") == TARGET and str(TARGET) == "ttft.p90=1s"
    assert parse_target("itl.mean=20ms") == Target("itl", "mean", 20_000_000)


@pytest.mark.parametrize("text", ["", "ttft=2s", "ttft.p95=2s", "speed.p90=2s", "ttft.p90", "ttft.p90=fast"])
def test_a_wrong_target_is_told_what_would_be_right(text: str) -> None:
    with pytest.raises(ConfigError, match="--target"):
        parse_target(text)
