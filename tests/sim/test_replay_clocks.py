"""Clocks of several machines, laid side by side by what they said to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.recording import Recording, read
from pdbus.bus.wire import replace
from pdbus.nodes.replay.clocks import aligned
from pdbus.nodes.replay.files import opened
from pdbus.nodes.replay.show import load

from .cluster_sim import Plan
from .cluster_world import MS, S
from .recorded import record
from tests.recordings import write

HOUR_NS = 3600 * S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        record(3, folder, patch, Plan(requests=6))
    return folder


def moved(folder: Path, to: Path, errors: dict[str, int]) -> list[Recording]:
    """The recordings as of one machine each, whose monotonic clocks have nothing in common and whose wall clocks are
    wrong by so much."""
    for path in folder.iterdir():
        recording = read(path)
        node = recording.header.node
        header = replace(
            recording.header, boot=f"boot of {node}", wall_ns=recording.header.wall_ns + errors.get(node, 0)
        )
        write(to / path.name, header, [(list(recording.raw()), 0)])
    return opened([to]).recordings


def test_one_boot_has_one_clock(folder: Path) -> None:
    recordings = opened([folder]).recordings
    assert len(set(aligned(recordings))) == 1


@pytest.mark.parametrize("errors", [{}, {"d1": 3 * S}, {"d1": -HOUR_NS, "p2": 7 * MS}, {"p1": -40 * MS, "p2": HOUR_NS}])
def test_clocks_of_machines_are_brought_together_by_messages(
    folder: Path, tmp_path: Path, errors: dict[str, int]
) -> None:
    """To less than a message takes there."""
    recordings = moved(folder, tmp_path, errors)
    base = {r.header.node: r.header.wall_ns - r.header.monotonic_ns - errors.get(r.header.node, 0) for r in recordings}
    off = [offset - base[r.header.node] for r, offset in zip(recordings, aligned(recordings), strict=True)]
    assert max(off) - min(off) < MS


def test_a_table_shows_no_message_before_it_was_said(folder: Path, tmp_path: Path) -> None:
    moved(folder, tmp_path, {"d1": 5 * S})
    moments, _ = load([tmp_path])
    asked = [m for m in moments if m.record.kind in ("Send prefill.request", "MessageCame prefill.request")]
    assert [m.record.kind.split()[0] for m in asked[:2]] == ["Send", "MessageCame"]


def test_who_never_talked_keeps_its_wall_clock(folder: Path, tmp_path: Path) -> None:
    recordings = [r for r in moved(folder, tmp_path, {"p2": S}) if r.header.node != "d1"]
    walls = [r.header.wall_ns - r.header.monotonic_ns for r in recordings]
    assert aligned(recordings) == walls
