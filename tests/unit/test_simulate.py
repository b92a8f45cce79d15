"""A simulated cluster: what it says is what the same machines, step by step, would have come to."""

from __future__ import annotations

import pytest

from pdbus.nodes.replay.simulate.cluster import SimCluster
from pdbus.nodes.replay.simulate.engine import Engine
from pdbus.nodes.replay.workload import Asked

from tests.simulated import MS, S, figures_of, many, play, workload

TIMES = ("ttft_ms", "itl_ms", "latency_ms")


def test_one_request_takes_what_its_steps_reads_and_messages_take() -> None:
    """By hand: chunks of 400, 400 and 200 tokens on the prefill node, then nine tokens on the decode node."""
    (ask,) = play(workload(Asked(0, 1000, 10))).asks
    assert ask.end is not None and ask.end.reason == "length" and ask.end.timeline.remote
    chunks_ms = 44.9 + (44.9 + 3.99 * 0.4) + (24.9 + 1.99 * 0.8)
    messages_ms = 0.5 + 0.5 + 0.5  # to the decode node, prefill.request, prefill.done
    assert (ask.first_ns - ask.sent_ns) / MS == pytest.approx(chunks_ms + messages_ms, abs=0.01)
    steps_ms = 9 * (10 + 0.1004)
    handover_ms = 1 + 0.2 + 2 * 0.5  # the last read of 200 kB, claim and answer
    assert (ask.last_ns - ask.first_ns) / MS == pytest.approx(handover_ms + steps_ms, abs=0.01)
    assert ask.tokens == 10 and sum(ask.gaps.values()) == 9


def test_unchanged_batches_advance_in_one_event_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = many(40, 150, answer=150)
    fast = figures_of(wanted, prefill=2, decode=2)
    monkeypatch.setattr(Engine, "_room", lambda self, rows: 1)
    slow = figures_of(wanted, prefill=2, decode=2)
    assert fast["completed"] == slow["completed"] == 40
    assert fast["events"] < slow["events"] / 2
    for name in TIMES:
        assert fast[name] == pytest.approx(slow[name], rel=0.002)


def test_watched_links_carry_no_heartbeats_and_renewals_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most requests here wait for longer than renewals and leases last."""
    wanted = workload(*(Asked(i * S, 10_000, 20) for i in range(40)))
    watched = figures_of(wanted, prefill=1, decode=2)
    monkeypatch.setattr(SimCluster, "published", lambda self, node, e: None)
    beating = figures_of(wanted, prefill=1, decode=2)
    for name in (*TIMES, "completed", "hit_rate", "remote", "retries"):
        assert watched[name] == beating[name]
    assert watched["ttft_ms"]["max"] > 10_000
    assert watched["events"] < beating["events"] - 300


def test_the_same_seed_gives_the_same_figures() -> None:
    wanted = many(30, 60)
    faults = ("drop:*@0s=0.2", "kill:p1@1s+1s")
    runs = [figures_of(wanted, prefill=2, decode=2, faults=faults, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_shared_prefixes_hit_on_both_sides() -> None:
    """The second prompt begins like the first; the third is the second. 100 tokens a block, the last one partial."""
    wanted = workload(
        Asked(0, 950, 5, tuple(range(10))),
        Asked(10 * S, 950, 5, (0, 1, 2, 3, 4, 95, 96, 97, 98, 99)),
        Asked(20 * S, 950, 5, (0, 1, 2, 3, 4, 95, 96, 97, 98, 99)),
        block_tokens=100,
    )
    cluster = play(wanted, block_size=100)
    assert [ask.end.cached_tokens for ask in cluster.asks if ask.end] == [0, 500, 900]
    assert cluster.computed_tokens["p0"] == 950 + 450  # what is left of the third is computed where it is decoded


@pytest.mark.parametrize("block_size", [50, 100, 200, 512])
def test_a_node_s_blocks_need_not_be_those_of_the_workload(block_size: int) -> None:
    """A block of the node's hits where all ids under it are the same: 500 tokens in all."""
    same = tuple(range(5))
    wanted = workload(
        Asked(0, 950, 5, (*same, 5, 6, 7, 8, 9)), Asked(9 * S, 950, 5, (*same, *range(10, 15))), block_tokens=100
    )
    second = play(wanted, block_size=block_size).asks[1]
    assert second.end is not None and second.end.cached_tokens == 500 // block_size * block_size


def test_a_request_of_a_session_waits_for_the_one_before_it() -> None:
    wanted = workload(
        Asked(0, 4000, 50, session=1),
        Asked(1, 100, 5, session=1, think_ns=S),
        Asked(2, 100, 5, session=1),
        Asked(3, 100, 5),
    )
    first, second, third, other = play(wanted).asks
    assert second.sent_ns == first.ended_ns + S and third.sent_ns == second.ended_ns
    assert other.ended_ns < second.sent_ns


def test_what_does_not_fit_fails_and_the_rest_goes_on() -> None:
    wanted = workload(Asked(0, 19_999, 2), Asked(0, 15_000, 10), Asked(0, 100, 5))
    result = figures_of(wanted, kv_tokens=10_000)
    assert result["completed"] == 1 and result["failed"] == 2
    assert [f["cause"] for f in result["failures"]] == ["too_long"]


def test_more_work_than_the_cluster_can_do_ends_by_deadlines() -> None:
    """Nothing waits for ever: a request that is not begun within its deadline has failed."""
    wanted = workload(*(Asked(0, 10_000, 5) for _ in range(600)))
    result = figures_of(wanted)
    assert 0 < result["completed"] < 600
    assert result["completed"] + result["failed"] == 600
    assert {f["cause"] for f in result["failures"]} == {"deadline"}
