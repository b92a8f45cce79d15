"""What is right verifies: whole or cut, all nodes or some, whatever the faults; and every changed byte shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdbus.bus import recorder as recorder_module
from pdbus.bus import recording_part
from pdbus.bus.recording import read
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import Raw, replace
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.findings import Kind

from .cluster_sim import Fault, Plan, plan_of
from .cluster_world import S
from .recorded import record
from tests.recordings import failures_of, header_bytes, missed, rewrite, write

FAULTY = Plan(
    requests=10,
    faults=(Fault("worker", "d1", 3 * S // 2), Fault("mover", "p1", 2 * S), Fault("crash", "p2", 5 * S // 4)),
    rude=0.4,
    slow_reads=0.2,
)


HEALED = 1603  # reads that do not end cost the node its mover, and it goes on under another epoch


@pytest.mark.parametrize("seed", [*range(24), HEALED])
def test_every_run_verifies(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes, deaths, drains, lost and doubled messages, slow and failing reads, clients that leave."""
    record(seed, tmp_path, monkeypatch, plan_of(seed))
    verified = ClusterRun([tmp_path])
    assert verified.failures == []
    assert all(run.again for run in verified.runs)
    assert sum(run.records for run in verified.runs) > 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with faults, in small chunks."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "BATCH_RECORDS_MAX", 7)
        patch.setattr(recording_part, "CHUNK_BYTES", 1)
        record(5, folder, patch, FAULTY)
    return folder


def copied(folder: Path, to: Path, but: str = "") -> list[Path]:
    """The recordings, without those of the node `but`."""
    files = [file for file in sorted(folder.iterdir()) if not (but and file.name.startswith(but))]
    for file in files:
        (to / file.name).write_bytes(file.read_bytes())
    return sorted(to.iterdir())


def test_what_is_cut_anywhere_verifies_as_far_as_it_goes(folder: Path, tmp_path: Path) -> None:
    """A crash is no violation, wherever it came, nor is what the others know of the rest."""
    files = copied(folder, tmp_path)
    chooser = random.Random(1)
    for _ in range(40):
        file = chooser.choice(files)
        whole = file.read_bytes()
        file.write_bytes(whole[: chooser.randint(header_bytes(file), len(whole))])
        assert ClusterRun([tmp_path]).failures == []
        file.write_bytes(whole)


@pytest.mark.parametrize("but", ["p1", "p2", "d1"])
def test_a_missing_node_is_told(folder: Path, tmp_path: Path, but: str) -> None:
    copied(folder, tmp_path, but)
    verified = ClusterRun([tmp_path])
    assert verified.failures == []
    missing = [note.text for note in verified.notes if "is not among the recordings" in note.text]
    assert missing and all(text.startswith(but) for text in missing)


def test_one_side_alone_says_how_much_is_unseen(folder: Path, tmp_path: Path) -> None:
    (file,) = [file for file in copied(folder, tmp_path) if file.name.startswith("d1")][:1]
    notes = [note.text for note in ClusterRun([file]).notes]
    assert any("its side of" in text and "hand-offs was not checked" in text for text in notes)


# ---------------------------------------------------------------- rotated


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in many small files."""
    folder = tmp_path_factory.mktemp("rotated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "BATCH_RECORDS_MAX", 20)
        patch.setattr(recording_part, "CHUNK_BYTES", 1)
        patch.setattr(recorder_module, "PART_BYTES_MAX", 4000)
        record(5, folder, patch, FAULTY)
    return folder


def test_a_rotated_recording_verifies_like_a_whole_one(folder: Path, rotated: Path) -> None:
    one, many = ClusterRun([folder]), ClusterRun([rotated])
    assert many.findings == []
    assert [(run.facts.life, run.records, run.again) for run in many.runs] == [
        (run.facts.life, run.records, run.again) for run in one.runs
    ]
    assert max(len(run.recording.parts) for run in many.runs) > 5


def test_without_its_first_parts_a_recording_is_checked_as_far_as_it_goes(rotated: Path, tmp_path: Path) -> None:
    """What went when the folder was full is no violation, wherever the rest begins; but it is said."""
    files = copied(rotated, tmp_path)
    chooser = random.Random(3)
    for _ in range(12):
        for name in ("d1", "p1"):
            parts = [file for file in files if file.name.startswith(name)]
            for file in parts:
                file.write_bytes((rotated / file.name).read_bytes())
            gone = chooser.randint(1, len(parts) - 1)
            for file in parts[:gone]:
                file.unlink()
        verified = ClusterRun([tmp_path])
        assert verified.failures == []
        runs = [run for run in verified.runs if run.recording.gone]
        assert {run.facts.life[0] for run in runs} == {"d1", "p1"}
        assert all(run.again is None for run in runs)
        assert sum("a core runs again only from its beginning" in note.text for note in verified.notes) == len(runs)


def test_a_violation_in_what_is_left_of_a_recording_is_found(rotated: Path, tmp_path: Path) -> None:
    """A lease that ends for no cause does, whatever came before it began."""

    def wrong(record: RawRecord) -> RawRecord:
        payload = bytes(record.payload)
        return replace(record, payload=Raw(payload.replace(b"done", b"lost"))) if b"lease.ended" in payload else record

    first, *rest = (file for file in copied(rotated, tmp_path) if file.name.startswith("p1-"))
    first.unlink()
    for part in rest:
        rewrite(part, wrong)
    found = ClusterRun([tmp_path]).failures
    assert any("ends as 'lost', but that is no cause" in finding.text for finding in found)


# ---------------------------------------------------------------- changed bytes


@pytest.fixture(scope="module")
def lives(folder: Path) -> list[Path]:
    """One file of each role."""
    return [next(folder.glob("d1-*")), next(folder.glob("p1-*"))]


def test_any_changed_byte_of_an_effect_is_found(lives: list[Path], tmp_path: Path) -> None:
    for life in lives:
        assert missed(life, tmp_path / "changed.mcap", random.Random(7), 120) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, sequence=r.sequence + 1),
        lambda r: replace(r, now_ns=r.now_ns + 1),
        lambda r: replace(r, kind=r.kind + "x"),
        lambda r: replace(r, cause=r.cause - 1),
    ],
    ids=["sequence", "time", "kind", "cause"],
)
def test_what_is_around_an_effect_counts_too(
    lives: list[Path], tmp_path: Path, change: Callable[[RawRecord], RawRecord]
) -> None:
    victims = [record.sequence for record in read(lives[0]).raw() if record.cause]
    victim = victims[len(victims) // 2]
    path = rewrite(lives[0], lambda r: change(r) if r.sequence == victim else r, tmp_path / "changed.mcap")
    assert failures_of(path)


def test_an_effect_that_is_missing_or_added_is_found(lives: list[Path], tmp_path: Path) -> None:
    """Records are numbered anew, so that only what was decided tells."""
    records = list(read(lives[0]).raw())
    place = next(i for i, record in enumerate(records) if i > len(records) // 2 and record.cause)
    for changed in (records[:place] + records[place + 1 :], records[: place + 1] + records[place:]):
        numbers = {0: 0}
        renumbered = []
        for number, old in enumerate(changed, 1):
            if not old.cause:
                numbers[old.sequence] = number
            renumbered.append(replace(old, sequence=number, cause=numbers.get(old.cause, 0)))
        path = write(tmp_path / "changed.mcap", read(lives[0]).header, [(renumbered, 0)])
        (first, *_) = failures_of(path)
        assert first.kind is Kind.DIVERGENCE
