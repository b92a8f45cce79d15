"""`pd bench gateway` runs, over a cluster that starts a gateway of its own, and tells what it says it tells."""

from __future__ import annotations

import pytest

from pdbus.nodes.bench import routing
from pdbus.nodes.bench.gateway import run

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]


def test_the_figures_are_those_of_three_ways() -> None:
    said = run(prompt_tokens=32, requests=2, step_ms=0)
    assert said["requests"] == 2
    assert [way["way"] for way in said["ways"]] == ["sdk", "node_http", "gateway"]
    assert all(way["ttft_ms"] > 0 and way["itl_ms"] >= 0 for way in said["ways"])


def test_prompts_that_share_beginnings_hit_more_by_prefix_than_by_turns() -> None:
    said = routing.run(turns=1, step_ms=0)
    assert [(row["policy"], row["requests"]) for row in said["policies"]] == [("round-robin", 24), ("prefix", 24)]
    assert all(row["ttft_p50_ms"] > 0 for row in said["policies"])
    assert said["hits_ratio"] > 1
