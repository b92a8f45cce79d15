"""Whole nodes explored: every order of events between a few real cores, as `pd-replay explore` goes through them.

Checked in every state: KV taken as valid was confirmed and has the right bytes; no read or step writes a block that was
given away; a step computes on the right KV; a lease begins and ends once; a request ends once, with every token; a
fault costs no more attempts than it may. And from every state all can still end with every block and lease back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.explore.cluster import Cluster, Move
from pdbus.nodes.replay.explore.record import Recorded
from pdbus.nodes.replay.explore.scenario import FAULTS, Scenario
from pdbus.nodes.replay.explore.search import Explored, Found, Violation, explore, shortened, told, walk
from pdbus.nodes.replay.findings import Kind

from .bugs import BUGS
from .bugs_in_nodes import SEEDED
from .cluster_bugs import BUGS as BUGS_IN_CORE

EVENTS_MAX = 30  # of the shortest list that shows a bug
ONE_NODE, TWO_CHUNKS, TWO_NODES = Scenario(prefill=1), Scenario(prefill=1, blocks=2, faults=0), Scenario()


def explored(scenario: Scenario) -> Explored[Move]:
    cluster = Cluster(scenario)
    result = explore(cluster)
    assert result.found is None, f"\n{told(cluster, result.found)}"
    assert result.whole
    return result


def test_no_fault() -> None:
    assert explored(Scenario(faults=0)).outcomes.keys() == {"length", "cancelled"}


def test_no_fault_with_two_requests_for_one_prompt() -> None:
    outcomes = explored(Scenario(prefill=1, faults=0, requests=2, cancel=False)).outcomes
    assert outcomes.keys() == {"length, length"}


def test_any_one_fault() -> None:
    """At any moment one of: a message lost or doubled, any clock ahead, a read or the engine failing, a node, worker or
    mover dying. And the client may cancel."""
    result = explored(ONE_NODE)
    assert result.outcomes.keys() == {"length", "cancelled", "lost", "error engine", "error deadline"}
    assert result.states > 10_000, "an exploration that small has left something out"


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_there(kind: str) -> None:
    """Each kind alone leads to states that no fault leads to."""
    assert explored(ONE_NODE._replace(kinds=(kind,))).states > explored(ONE_NODE._replace(faults=0)).states


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(), id="one fault, two prefill nodes"),
        pytest.param(Scenario(prefill=1, blocks=2), id="one fault, two chunks"),
        pytest.param(Scenario(prefill=1, faults=2), id="two faults"),
    ],
)
def test_more_at_once(scenario: Scenario) -> None:
    explored(scenario)


def test_random_runs() -> None:
    """More of everything than can be explored."""
    cluster = Cluster(Scenario(prefill=3, decode=2, requests=3, blocks=3, faults=6))
    for seed in range(20):
        found = walk(cluster, seed, 600)
        assert found is None, f"seed {seed}: {told(cluster, found)}"


# ---------------------------------------------------------------- bugs

ALL_BUGS = {name: bug for bugs in (BUGS, SEEDED, BUGS_IN_CORE) for name, (bug, _) in bugs.items()}

FOUND_IN = {
    "decode_without_waiting_for_released": TWO_CHUNKS,
    "claim_when_reads_are_posted": TWO_CHUNKS,
    "claim_before_the_last_chunk": TWO_CHUNKS,
    "a_claim_while_prefilling_is_valid": TWO_CHUNKS,
    "any_tombstone_answers_valid": ONE_NODE,
    "a_wrong_generation_is_accepted": TWO_CHUNKS,
    "destination_is_free_when_the_request_leaves": TWO_CHUNKS,
    "blocks_are_free_while_a_step_writes_them": TWO_CHUNKS,
    "a_retry_reads_into_the_same_blocks": TWO_NODES,
    "a_try_gets_a_second_lease": ONE_NODE,
    "a_lease_is_released_twice": TWO_CHUNKS,
    "renewal_revives_a_lease": ONE_NODE,
    "leases_survive_a_worker_restart": ONE_NODE,
    "the_first_token_of_a_retry_is_sent_too": TWO_NODES,
    "nothing_bounds_the_wait_for_accepted": ONE_NODE,
    "nothing_bounds_the_wait_for_released": ONE_NODE,
    "a_block_is_shared_before_it_is_computed": TWO_CHUNKS,
    "a_cancelled_request_ends_twice": TWO_CHUNKS,
    "blocks_of_a_failed_attempt_stay_held": ONE_NODE,
    "reads_without_a_mover_are_waited_for": ONE_NODE,
    "a_new_worker_is_not_told_of_the_sequences": ONE_NODE,
    "the_halves_of_the_handoff_do_not_hear_of_an_end": TWO_CHUNKS,
}


# Shown by what an engine, a mover or time does next, which is in no recording.
SHOWN_LATER = (
    "destination_is_free_when_the_request_leaves",
    "blocks_are_free_while_a_step_writes_them",
    "renewal_revives_a_lease",
)
LONG = (
    "nothing_bounds_the_wait_for_accepted",
    "blocks_of_a_failed_attempt_stay_held",
    "reads_without_a_mover_are_waited_for",
    "renewal_revives_a_lease",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in FOUND_IN])
def test_a_bug_is_found_and_its_recording_gives_it_away(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shortest list of events, which `verify` opens like any incident."""
    with monkeypatch.context() as patch:
        ALL_BUGS[name](patch)
        cluster = Cluster(FOUND_IN[name])
        found = explore(cluster).found
        assert found is not None and len(found.moves) <= EVENTS_MAX
        Recorded(cluster, tmp_path).play(found.moves)
        with_the_bug = ClusterRun([tmp_path])
    assert {finding.kind for finding in with_the_bug.failures} <= {Kind.VIOLATION}
    assert all(run.again for run in with_the_bug.runs), "the same core decides the same"
    right = ClusterRun([tmp_path])
    assert name in SHOWN_LATER or any(finding.kind is Kind.DIVERGENCE for finding in right.failures)


def test_what_a_random_run_finds_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    ALL_BUGS["any_tombstone_answers_valid"](monkeypatch)
    cluster = Cluster(Scenario(prefill=2, requests=2, blocks=2, faults=4))
    found: Found[Move] | None = None
    seed = 0
    while found is None:
        found, seed = walk(cluster, seed, 600), seed + 1
    short = shortened(cluster, found)
    assert len(short.moves) <= EVENTS_MAX
    state = cluster.initial()
    for move in short.moves[:-1]:
        state = cluster.apply(state, move)
    with pytest.raises(Violation):
        cluster.apply(state, short.moves[-1])
