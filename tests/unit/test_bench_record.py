"""`pd bench record`: what it says of its turns."""

from __future__ import annotations

import pytest

from pdbus.nodes.bench.record import Turn, _summary


def turn(tokens_per_s: float, cpu_us: float, *ms: float) -> Turn:
    return Turn(tokens_per_s, cpu_us, list(ms), [value / 10 for value in ms])


def test_costs_are_medians_over_pairs() -> None:
    """A turn in which the machine did something else must not decide."""
    turns = [
        (turn(100, 10, 50, 60), turn(98, 10.1, 50, 70)),
        (turn(100, 10, 50, 60), turn(97, 10.2, 50, 70)),
        (turn(100, 10, 50, 60), turn(20, 30, 50, 900)),
    ]
    found = _summary(turns)
    assert found["throughput_cost"] == pytest.approx(0.03)
    assert (found["throughput_cost_least"], found["throughput_cost_most"]) == pytest.approx((0.02, 0.8))
    assert found["cpu_cost"] == pytest.approx(0.02)
    assert (found["pairs"], found["requests"]) == (3, 6)
    assert found["recorded_ms_p99"] > found["ms_p99"]
    assert found["recorded_ttft_ms_p50"] == pytest.approx(6)
