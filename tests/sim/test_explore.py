"""Every order of events between one decode node and two prefill nodes, with the real Offers, Fetches and BlockPool.

Checked in every state: KV taken as valid has the right bytes of one lease of the right attempt; no read or step
writes into a block that was given away; a lease is released once; a request ends once, with one first token; a fault
costs no more attempts than it may. And from every state all can still end with every block and lease back.
"""

from __future__ import annotations

import pytest

from pdbus.nodes.replay.explore.search import Explored, explore, told, walk

from tests.sim.bugs import BUGS
from tests.sim.network import Move, Network, Plan


def explored(plan: Plan) -> Explored[Move]:
    network = Network(plan)
    result = explore(network)
    assert result.found is None, f"\n{told(network, result.found)}"
    return result


def test_no_fault() -> None:
    """Messages in any order, reads and steps at any time, a cancel and renewals at any moment."""
    assert explored(Plan(faults_max=0, renew=True)).outcomes.keys() == {"ok", "cancelled"}


def test_no_fault_without_cancel_is_always_fetched() -> None:
    assert explored(Plan(faults_max=0, cancel=False)).outcomes.keys() == {"ok"}


@pytest.mark.timeout(900)
def test_any_one_fault() -> None:
    """At any moment one of: a message lost or doubled, any timer, a read failed, crashes with queues kept or lost, a
    worker, mover or engine failing, silence; a cancel at any moment as well. Two chunks, up to three attempts."""
    result = explored(Plan())
    assert result.outcomes.keys() == {"ok", "cancelled", "deadline", "error"}
    assert result.states > 100_000, "an exploration that small has left something out"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(have=1), id="a block is there already"),
        pytest.param(Plan(prompt_blocks=1, have=1), id="nothing to read"),
        pytest.param(Plan(prompt_blocks=1, reborn=True), id="a decode node that crashed asks again"),
    ],
)
def test_any_one_fault_where(plan: Plan) -> None:
    explored(plan)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(prompt_blocks=1, cancel=False, faults_max=2), id="one chunk"),
        pytest.param(Plan(prompt_blocks=1, renew=True), id="one fault, renewals at any moment"),
    ],
)
def test_more_at_once(plan: Plan) -> None:
    explored(plan)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_random_runs(nodes: int) -> None:
    """Longer prompts and more faults than can be explored."""
    network = Network(Plan(prefill_nodes=nodes, prompt_blocks=3, decode_pool=9, faults_max=6, renew=True))
    for seed in range(2000):
        found = walk(network, seed)
        assert found is None, f"seed {seed}: {told(network, found)}"


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exploration that finds nothing says little before it has found these."""
    bug, plan = BUGS[name]
    bug(monkeypatch)
    assert explore(Network(plan)).found is not None
