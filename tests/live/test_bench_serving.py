"""`pd bench http` and `pd bench interference` run, and tell what they say they tell."""

from __future__ import annotations

import pytest

from pdbus.nodes.bench import http, interference

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]


def test_clients_stream_and_the_bus_is_measured_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TURN_S", 0.5)
    said = http.run(clients=4, step_ms=2, turns=1)
    assert said["failed"] == 0
    for way in ("node", "gateway"):
        assert said[f"{way}_tokens_per_core_s"] > 0 and said[f"{way}_p99_ms"] > 0
        assert said[f"{way}_moved_p99_ms"] == said[f"{way}_p99_ms"] - said["quiet_p99_ms"]


def test_gaps_are_told_of_both_ways_with_and_without_long_prompts() -> None:
    said = interference.run(prompt_tokens=512, step_ms=2, token_us=50, turns=1)
    for side in ("pd", "both"):
        assert said[f"{side}_long_prompts"] > 0
        assert said[f"{side}_ratio"] == said[f"{side}_during_p99_ms"] / said[f"{side}_idle_p99_ms"]
