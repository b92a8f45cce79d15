"""`pd-replay explore`: what it prints, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.connector.ledger import LeaseLedger
from pdbus.nodes.replay.explore.command import Extent, in_words, run_explore
from pdbus.nodes.replay.explore.scenario import Scenario, kinds_of
from pdbus.nodes.replay.show import show_request
from pdbus.nodes.replay.verify import verify

EVERY, RANDOM = Extent(states_max=100_000), Extent(states_max=0, runs=60, seed=7)
SMALL = Scenario(prefill=1, faults=1, kinds=("expiry",), cancel=False)


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any tombstone answers valid."""
    monkeypatch.setattr(LeaseLedger, "claim", lambda self, lease, try_: lease in self._ended)


def test_states_and_seconds_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explore(SMALL, EVERY, tmp_path / "explored") == 0
    scenario, counts, verdict, _, *outcomes = capsys.readouterr().out.splitlines()
    assert scenario == ("1 request; each prompt 1 block; 1 prefill node, 1 decode node; at most 1 fault (expiry)")
    assert " states, " in counts and counts.endswith(" s")
    assert verdict.startswith("no violation; from every state all can end")
    assert [line.split()[0] for line in outcomes] == ["error", "length"]
    assert not (tmp_path / "explored").exists()


def test_staged_nodes_are_said_to_be() -> None:
    scenario = Scenario(prefill=1, staged=True)
    assert in_words(scenario, EVERY).endswith("; staged")


def test_what_was_not_seen_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explore(SMALL, Extent(states_max=50), tmp_path / "explored") == 0
    assert "not all states were seen" in capsys.readouterr().out


@pytest.mark.usefixtures("bug")
@pytest.mark.parametrize("extent", [EVERY, RANDOM])
def test_a_violation_is_told_and_kept_as_a_recording(
    extent: Extent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "explored"
    assert run_explore(SMALL, extent, folder) == 1
    out = capsys.readouterr().out
    assert "violation: KV was taken as valid under a lease that was not held" in out
    assert "  1. deliver prefill.request d0 -> p0" in out and "(fault)" in out
    assert f"pd-replay verify {folder}" in out
    assert verify([folder]) == 1
    assert "R1: valid only by claim" in capsys.readouterr().out
    assert show_request(b"request 0".hex(), [folder]) == 0
    assert "lease.released" in capsys.readouterr().out


def test_a_folder_that_holds_something_is_not_added_to(tmp_path: Path) -> None:
    """Two incidents in one folder would be no incident."""
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"--record: .* is there already, and not empty"):
        run_explore(SMALL, EVERY, tmp_path)


def test_random_runs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explore(SMALL, RANDOM._replace(runs=3), tmp_path / "explored") == 0
    out = capsys.readouterr().out
    assert "3 random runs from seed 7" in out and "no violation in 3 runs" in out


def test_kinds_are_a_list() -> None:
    assert kinds_of("crash, drop") == ("drop", "crash")
    assert len(kinds_of("")) == 9
    assert "cancelled" in in_words(Scenario(), EVERY)
