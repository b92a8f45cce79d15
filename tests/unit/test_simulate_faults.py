"""What faults do in a simulation: the same as to the machines everywhere, at the time that was given."""

from __future__ import annotations

import pytest

from pdbus.nodes.replay.simulate.cluster import SimCluster
from pdbus.nodes.replay.simulate.faults import KINDS
from pdbus.nodes.replay.workload import Asked, Workload

from tests.simulated import MS, S, figures_of, many, play, workload

LONG = workload(*(Asked(i * 100 * MS, 4000, 40) for i in range(30)))  # half a second of prefill each


def causes(wanted: Workload, *faults: str, **options: int) -> dict[str, int]:
    result = figures_of(wanted, prefill=2, decode=2, faults=faults, **options)
    assert result["completed"] + result["failed"] == len(wanted.requests)
    return dict(result["attempts_failed"])


def left(cluster: SimCluster) -> list[str]:
    """Names of living nodes on which anything is left of what is over."""
    cluster.driver.run(cluster.driver.now + 100 * S)
    return [
        name
        for name, node in cluster.nodes.items()
        if not node.over and (node.core.offers.held() or len(node.core.requests) or node.core.pool.counts().in_use)
    ]


FAULTS = [
    "kill:p0@500ms", "kill:p0@500ms+1s", "kill:d0@700ms+2s", "freeze:p1@500ms+8s", "freeze:d0@500ms+40s",
    "worker:p0@600ms", "worker:d1@600ms", "mover:p0@600ms", "mover:d0@600ms", "drain:p0@500ms", "cut:p0@500ms",
    "cut:*-d0@500ms", "drop:*@0s+3s=0.3", "drop:p0@0s+20s", "duplicate:*@0s=0.5", "delay:*@0s+5s=2s",
    "slow:p0@0s=0.001", "slow:*@500ms+5s=0.01",
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_every_request_ends_and_nothing_is_left(fault: str) -> None:
    cluster = play(LONG, prefill=2, decode=2, faults=(fault,))
    assert cluster.ended == len(LONG.requests) == len(cluster.asks)
    completed = sum(not ask.cause for ask in cluster.asks)
    assert completed >= 25 if "d0" in fault else completed == 30
    assert left(cluster) == []


def test_every_kind_of_fault_is_tried_above() -> None:
    assert {fault.partition(":")[0] for fault in FAULTS} == set(KINDS)


def test_a_killed_prefill_node_costs_one_more_attempt() -> None:
    """The cut connection tells: dead after a second, not by silence."""
    cluster = play(LONG, prefill=2, decode=2, faults=("kill:p0@500ms",))
    hit = [ask for ask in cluster.asks if ask.end and ask.end.timeline.attempts == 2]
    assert hit and all(ask.end and ask.end.timeline.attempts <= 2 for ask in cluster.asks)
    assert cluster.counters["fault: kill"] == 1


def test_what_a_killed_decode_node_was_asked_is_lost_and_the_others_go_on() -> None:
    result = figures_of(LONG, prefill=2, decode=2, faults=("kill:d0@700ms+2s",))
    assert {f["cause"] for f in result["failures"]} == {"unreachable"}
    assert 0 < result["failed"] < 10


def test_with_no_decode_node_left_requests_fail_at_once() -> None:
    result = figures_of(LONG, prefill=2, decode=1, faults=("kill:d0@1s",))
    assert result["completed"] + result["failed"] == 30 and result["failed"] >= 20


def test_a_frozen_prefill_node_is_found_by_its_silence() -> None:
    """Although its link was watched until shortly before."""
    assert causes(LONG, "freeze:p1@500ms+20s").keys() <= {"prefill node silent", "no answer", "read overdue"}
    assert causes(LONG, "freeze:p1@500ms+20s")["prefill node silent"] > 0


def test_a_lost_message_costs_a_timeout_and_no_attempt() -> None:
    wanted = many(20, 100)
    assert causes(wanted, "drop:*@0s=0.02", seed=3) == {}
    assert figures_of(wanted, prefill=2, decode=2, faults=("drop:*@0s=0.02",), seed=3)["latency_ms"]["max"] > 1000


def test_doubled_messages_change_nothing() -> None:
    calm, doubled = (figures_of(LONG, prefill=2, decode=2, faults=f) for f in ((), ("duplicate:*@0s=1",)))
    assert calm["ttft_ms"] == doubled["ttft_ms"] and calm["itl_ms"] == doubled["itl_ms"]
    assert doubled["events"] > calm["events"]


def test_a_slow_link_makes_reads_overdue_and_another_node_is_asked() -> None:
    """4 MB at 1 MB/s: longer than a read is waited for."""
    assert causes(LONG, "slow:p0@0s=0.001").keys() == {"read overdue", "peer has an overdue read"}


def test_after_a_fault_links_are_watched_again() -> None:
    """An hour without a request costs nothing."""
    wanted = workload(*LONG.requests, Asked(3600 * S, 100, 5))
    calm = figures_of(wanted, prefill=2, decode=2)
    hit = figures_of(wanted, prefill=2, decode=2, faults=("freeze:p1@500ms+8s", "drop:p0@1s+1s=0.1"))
    assert hit["events"] < calm["events"] + 2000
