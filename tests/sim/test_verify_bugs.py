"""A recording gives seeded bugs away: to a core that has them too, by the invariants; to a right one, by what it does.

The nodes are real cores in a simulated cluster; the recordings are all that the verification sees.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.findings import Kind

from .bugs_in_nodes import SEEDED
from .recorded import record

SEEDS = 40  # runs in which the bug must show at least once; most show in the first
IN_ITS_TIMES_ALONE = ("a_wake_up_is_lost",)  # a right core, told the same at the same late times, does the same


@pytest.mark.parametrize("name", SEEDED)
def test_a_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, plan = SEEDED[name]
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        with monkeypatch.context() as patch:
            bug(patch)
            record(seed, folder, patch, plan)
            with_the_bug = ClusterRun([folder])
        if with_the_bug.failures:
            break
    else:
        pytest.fail(f"{name} is not found in {SEEDS} recordings")
    assert {finding.kind for finding in with_the_bug.failures} == {Kind.VIOLATION}
    assert all(run.again for run in with_the_bug.runs), "the same core decides the same"
    right = ClusterRun([folder])
    assert name in IN_ITS_TIMES_ALONE or any(finding.kind is Kind.DIVERGENCE for finding in right.failures)
