"""Whole clusters of real cores under a seed: whatever happens, every request ends once, rightly, and nothing is left.

Checked in every run: an answer has the tokens that one node without failures gives, or ends with an error that the
faults explain; no step or read writes a block that was given away; the worker's block tables are the scheduler's; the
pool's books agree after every event; a lease begins once for a try and ends once; no timer spins; everything has
ended long before its deadline; at rest no block, lease, read, sequence or peer is left over; a prompt that comes then
is fetched at its first attempt.

A failure names its seed: `python -m tests.sim.cluster_sim SEED` shows all that happened. To shrink it, play
`run(seed, plan_of(seed)._replace(...))` with fewer faults and requests.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdbus.nodes.replay.explore.search import Violation

from tests.sim.cluster_bugs import BUGS
from tests.sim.cluster_sim import FAULTS, MOMENTS, Cluster, Fault, Plan, plan_of, run
from tests.sim.cluster_world import S, Weather

SEEDS_A_TEST = 20
BUG_SEEDS_MAX = 150  # where a bug shows moves with every change of what is decided
ANSWERS = ("prefill.accepted", "prefill.progress", "prefill.done", "lease.released")
ASKED = ("prefill.request", "transfer.done", "prefill.cancel")


def failed_attempts(cluster: Cluster) -> list[str]:
    """Why attempts failed, but for want of room, which is nobody's fault."""
    causes = [name.partition(": ")[2] for name in cluster.world.counters if name.startswith("attempt.failed")]
    return [cause for cause in causes if cause != "no_room"]


@pytest.mark.parametrize("first", range(0, 160, SEEDS_A_TEST))
def test_anything(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        run(seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_anything_at_length(first: int) -> None:
    for seed in range(first, first + 1000):
        run(seed)


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_every_attempt_succeeds(seed: int) -> None:
    """Nothing that is merely busy, late or full counts as a failure."""
    calm = plan_of(seed)._replace(faults=(), weather=Weather(), warm_ns=S, horizon_ns=2 * S, failing_rows=0.0, rude=0.0)
    cluster = run(seed, calm._replace(slow_reads=0.0, stuck_reads=0.0, failing_reads=0.0))
    assert failed_attempts(cluster) == []
    assert cluster.world.counters["after 1 attempts remote"] > 0


@pytest.mark.parametrize("kind", ANSWERS + ASKED)
def test_one_lost_message_costs_no_attempt(kind: str) -> None:
    for nth in range(1, 4):
        cluster = run(nth, Plan(weather=Weather(lose=((kind, nth),))))
        assert failed_attempts(cluster) == [] and cluster.world.counters["weather"] == (kind != "prefill.cancel")


def test_doubled_and_late_messages_cost_no_attempt() -> None:
    for seed in range(8):
        weather = Weather(doubled=0.3, delayed=0.3, delay_ms=400)
        assert failed_attempts(run(seed, Plan(weather=weather))) == []


def one_fault(kind: str, fault: Fault) -> None:
    """At most one more attempt for anyone; and `run` has checked all the rest."""
    warm_ns = 0 if fault.after in ("hello", "agent", "PeerAddEnded", "WorkerUp", "MoverUp") else S
    cluster = run(1, Plan(requests=5, warm_ns=warm_ns, horizon_ns=warm_ns + S // 4, step_ms=20, faults=(fault,)))
    attempts = [client.end.timeline.attempts for client in cluster.clients if client.end]
    assert max(attempts) <= 2, f"{attempts} attempts after {fault}"
    if kind == "drain":
        assert cluster.world.counters["lease shutdown"] == 0, "what is under way is not waited for"
        crossed = {"draining", "prefill node restarted"}  # a request on its way, answered so or by the goodbye alone
        assert set(failed_attempts(cluster)) <= crossed


@pytest.mark.parametrize("kind", FAULTS)
def test_one_fault_at_any_moment(kind: str) -> None:
    for after in MOMENTS:
        one_fault(kind, Fault(kind, after=after, nth=2))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAULTS)
def test_one_fault_at_any_moment_anywhere(kind: str) -> None:
    for after in MOMENTS:
        for nth in (1, 3, 4, 5, 8):
            for node in ("", "p1", "p2", "d1"):
                one_fault(kind, Fault(kind, node, after=after, nth=nth))


def test_the_same_seed_gives_the_same_run_whatever_the_hash_seed() -> None:
    """No decision depends on the order in which a set or a hash is walked through: replay rests on that."""
    command = [sys.executable, "-m", "tests.sim.cluster_sim", "5"]
    path = os.pathsep.join(("src", "."))
    runs = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed, "PYTHONPATH": path}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert len(runs[0].stdout) > 100_000 and runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("seed", range(5))
def test_what_a_node_heard_gives_the_same_decisions_again(seed: int) -> None:
    """A core knows nothing but what it was told: no clock, no chance, nothing of the shell's."""
    for node in run(seed).lives:
        core = node.new_core()
        for event, now, effects in node.record:
            assert core.handle(event, now) == effects


def is_found_by(seed: int) -> bool:
    try:
        run(seed)
    except Violation:
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_core_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation is only worth its seeds if it sees what it is for."""
    bug, seed = BUGS[name]
    bug(monkeypatch)
    assert any(is_found_by(other) for other in (seed, *range(BUG_SEEDS_MAX)))
