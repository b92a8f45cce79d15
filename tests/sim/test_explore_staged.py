"""Staged nodes explored: every order of steps, copies, reads and messages of nodes that compute in one memory and read
in another. A copy takes place at the last moment, so that whoever trusts it before its end sees the wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdbus.connector import staging as st
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool
from pdbus.connector.staging import Staging
from pdbus.nodes.decode import Requests
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.explore.cluster import Cluster
from pdbus.nodes.replay.explore.record import Recorded
from pdbus.nodes.replay.explore.scenario import Scenario
from pdbus.nodes.replay.explore.search import explore, told, walk
from pdbus.nodes.replay.findings import Kind

from .test_explore_nodes import EVENTS_MAX, explored

ONE_NODE = Scenario(prefill=1, staged=True)
TWO_CHUNKS = Scenario(prefill=1, blocks=2, faults=0, staged=True)
WORKERS_DIE = ONE_NODE._replace(kinds=("worker",))
CROWD = Scenario(prefill=2, decode=2, requests=3, blocks=3, faults=5, staged=True)


def test_no_fault() -> None:
    assert explored(TWO_CHUNKS).outcomes.keys() == {"length", "cancelled"}


def test_any_one_fault() -> None:
    outcomes = explored(ONE_NODE).outcomes
    assert outcomes.keys() == {"length", "cancelled", "lost", "error engine", "error deadline"}


def test_random_runs() -> None:
    cluster = Cluster(CROWD)
    for seed in range(8):
        found = walk(cluster, seed, 600)
        assert found is None, f"seed {seed}: {told(cluster, found)}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(prefill=1, blocks=2, staged=True), id="one fault, two chunks"),
        pytest.param(TWO_CHUNKS._replace(requests=2, cancel=False), id="two requests that begin alike"),
    ],
)
def test_more_at_once(scenario: Scenario) -> None:
    explored(scenario)


# ---------------------------------------------------------------- bugs

Bug = Callable[[pytest.MonkeyPatch], None]


def a_chunk_is_announced_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    right = Staging.handle

    def early(self: Staging, event: st.StagingEvent, now_ns: int) -> list[st.StagingEffect]:
        effects = right(self, event, now_ns)
        if isinstance(event, st.StageDown) and self._waiting:
            effects.append(self._waiting.pop()[1])
        return effects

    patch.setattr(Staging, "handle", early)


def a_step_computes_before_its_kv_is_copied_up(patch: pytest.MonkeyPatch) -> None:
    def early(self: Requests, request: bytes, now: int) -> Any:
        up = into_mirror(self, request, now)
        self._run(self._requests[request], self._requests[request].prompt_tokens)
        return up

    into_mirror = Requests.fetched_into_mirror
    patch.setattr(Requests, "fetched_into_mirror", early)


def a_block_in_copy_is_given_away(patch: pytest.MonkeyPatch) -> None:
    for name in ("hold", "drop"):
        right = getattr(BlockPool, name)

        def unheld(self: BlockPool, blocks: Any, holder: Any, right: Any = right) -> None:
            if holder is not Holder.IN_COPY:
                right(self, blocks, holder)

        patch.setattr(BlockPool, name, unheld)


def copies_survive_their_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_gone", lambda self: [])


FOUND_IN: dict[Bug, Scenario] = {
    a_chunk_is_announced_before_it_is_copied: TWO_CHUNKS,
    a_step_computes_before_its_kv_is_copied_up: TWO_CHUNKS,
    a_block_in_copy_is_given_away: TWO_CHUNKS,
    copies_survive_their_worker: WORKERS_DIE,
}
LONG = (copies_survive_their_worker,)
SHOWN_LATER = (a_block_in_copy_is_given_away, copies_survive_their_worker)  # by what a copier does, or does not, next


@pytest.mark.parametrize(
    "bug", [pytest.param(b, marks=[pytest.mark.long] if b in LONG else [], id=b.__name__) for b in FOUND_IN]
)
def test_a_bug_is_found_and_its_recording_gives_it_away(
    bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bug(patch)
        cluster = Cluster(FOUND_IN[bug])
        found = explore(cluster).found
        assert found is not None and len(found.moves) <= EVENTS_MAX
        Recorded(cluster, tmp_path).play(found.moves)
        with_the_bug = ClusterRun([tmp_path])
    kinds = {finding.kind for finding in with_the_bug.failures}
    assert kinds == (set() if bug in SHOWN_LATER else {Kind.VIOLATION})
    right = ClusterRun([tmp_path])
    assert bug in SHOWN_LATER or any(finding.kind is Kind.DIVERGENCE for finding in right.failures)
