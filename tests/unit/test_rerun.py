"""A recorded core, run again: the same, another, or impossible; and what is said of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Goodbye
from pdbus.bus.recorder import Recorder
from pdbus.bus.recording import read
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import replace
from pdbus.nodes import events as ev
from pdbus.nodes.decode import Requests
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.findings import Kind
from pdbus.nodes.replay.history import Lease
from pdbus.nodes.replay.tell import named_block, named_lease
from pdbus.nodes.replay.verify import verify

from .recorded_node import RecordedNode
from tests.recordings import rewrite, rewrite_about, with_payload, write

FIRST, SECOND = b"1" * 16, b"2" * 16


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two requests computed here, then a drain."""
    node = RecordedNode(tmp_path)
    node.come_up()
    node.answer(FIRST, tokens=9)
    node.ask(SECOND, tokens=9)
    node.hear(ev.CancelAsked(client=SECOND.hex()))
    node.hear(ev.DrainAsked())
    return node.close()


def failures(path: Path) -> list[tuple[Kind, str]]:
    return [(finding.kind, finding.text) for finding in ClusterRun([path]).failures]


def test_the_same_is_the_same(recorded: Path) -> None:
    verified = ClusterRun([recorded])
    (run,) = verified.runs
    assert (run.again, run.ended, verified.findings) == (True, "shut down", [])
    assert run.requests == {"length": 1, "cancelled": 1}


def test_the_first_difference_is_named_by_its_field(recorded: Path) -> None:
    def change(record: RawRecord) -> RawRecord:
        return with_payload(record, completion_tokens=7) if record.kind == "EndRequest" else record

    rewrite(recorded, change)
    kind, text = failures(recorded)[0]
    assert kind is Kind.DIVERGENCE
    assert text == "EndRequest: completion_tokens was 7, run again it is 3"


def test_after_a_divergence_what_was_recorded_is_still_checked(recorded: Path) -> None:
    """A request that another core ended twice has ended twice, whatever ours would do."""

    def change(record: RawRecord) -> RawRecord:
        return with_payload(record, request=FIRST) if record.kind == "EndRequest" else record

    rewrite(recorded, change)
    assert (Kind.VIOLATION, f"request {FIRST.hex()} ends after its end") in failures(recorded)


def test_an_input_of_another_version_is_said_to_be_unknown(recorded: Path) -> None:
    rewrite(recorded, lambda r: replace(r, kind="Hibernate") if r.kind == "DrainAsked" else r)
    kind, text = failures(recorded)[0]
    assert (kind, text) == (Kind.DIVERGENCE, "this input cannot be read: 'Hibernate' is unknown to this version")


def test_settings_of_another_version_are_not_run_but_checked(recorded: Path) -> None:
    rewrite_about(recorded, version="9.9.9", gears=5)
    verified = ClusterRun([recorded])
    assert verified.failures == []
    assert verified.runs[0].again is None and verified.runs[0].requests == {"length": 1, "cancelled": 1}
    assert "pdbus 9.9.9 wrote settings that" in verified.notes[0].text


def test_a_core_that_breaks_is_told_wherever_it_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = RecordedNode(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "arrive", lambda *arguments: [][1])
        with pytest.raises(IndexError):
            node.ask(FIRST)
        node.close()
        assert failures(node.path) == [
            (Kind.VIOLATION, "the core raised IndexError: list index out of range, which ended the node")
        ]
    kind, text = failures(node.path)[0]
    assert kind is Kind.DIVERGENCE and text.startswith("recorded as CoreRaised"), "a right core does not break there"


def test_a_core_that_breaks_only_now_is_a_divergence(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "arrive", lambda *arguments: [][1])
    assert failures(recorded)[0] == (
        Kind.DIVERGENCE,
        "run again, the core raises IndexError: list index out of range",
    )


def test_records_that_the_disk_lost_end_what_can_be_known(recorded: Path) -> None:
    """No violation, for nobody knows; but said."""
    recording = read(recorded)
    records = list(recording.raw())
    half = len(records) // 2
    write(recorded, recording.header, [(records[:half], 0), (records[half + 3 :], 3)])
    verified = ClusterRun([recorded])
    assert verified.failures == []
    assert "3 records are missing: the node's disk did not keep up" in verified.notes[0].text


def test_a_missing_record_that_nobody_lost_is_damage(recorded: Path) -> None:
    rewrite(recorded, lambda r: None if r.sequence == 9 else r)
    assert failures(recorded)[0] == (
        Kind.DAMAGE,
        "record 9 should follow, but it is numbered 10; what comes after is not checked",
    )


def test_damage_is_no_crash(recorded: Path) -> None:
    whole = bytearray(recorded.read_bytes())
    whole[-3] ^= 1
    recorded.write_bytes(whole)
    ((kind, _),) = failures(recorded)
    assert kind is Kind.DAMAGE


# ---------------------------------------------------------------- what is given


def test_another_programs_recording_is_said_to_be_one(recorded: Path, tmp_path: Path) -> None:
    other = Recorder(tmp_path, "client", b"c" * 16, Goodbye())
    other.append("Generate", {"text": "hello"}, 1)
    other.close()
    verified = ClusterRun([tmp_path])
    assert verified.failures == []
    assert [note.text for note in verified.notes if "another program" in note.text] == [
        "begins with '', not with a node's settings: another program wrote it; not checked"
    ]


def test_the_same_life_twice_counts_once(recorded: Path) -> None:
    (recorded.parent / "copy.mcap").write_bytes(recorded.read_bytes())
    verified = ClusterRun([recorded.parent])
    assert len(verified.runs) == 1
    assert "records the same part of the same life as" in verified.notes[0].text


def test_nodes_that_never_met_are_no_cluster(tmp_path: Path) -> None:
    for name in ("a", "b"):
        RecordedNode(tmp_path, name).close()
    (note,) = ClusterRun([tmp_path]).notes
    assert note.text == "these are recordings of 2 clusters that know nothing of each other: a; b"


def test_exit_statuses(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not a recording")
    assert verify([recorded]) == 0
    assert verify([recorded, notes]) == 2, "what can be checked is checked, what cannot is told"
    assert "notes.txt: is no recording" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"notes\.txt: is no recording"):
        verify([notes])
    rewrite(recorded, lambda r: replace(r, now_ns=r.now_ns + 1) if r.kind == "EndRequest" else r)
    assert verify([recorded, notes]) == 1


def test_what_is_wrong_is_shown_with_the_records_around(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(recorded, lambda r: with_payload(r, seq=9) if r.kind == "EndRequest" else r)
    verify([recorded])
    out = capsys.readouterr().out
    assert "> EndRequest" in out and "StepEnded" in out
    assert "EndRequest: seq was 9, run again it is 1" in out


def test_histories_are_told(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify([recorded], request=FIRST.hex()[:6], block=("d", 0))
    out = capsys.readouterr().out
    assert f"request {FIRST.hex()}" in out and "EmitToken x 3" in out and "EndRequest" in out
    assert "block 0 of d" in out and "tokens 0 to 3" in out and "cached" in out and "given back" in out


def test_what_is_not_there_is_one_line(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify([recorded], request="ffff", lease=Lease("", 0, 3), block=("p", 1)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "pd-replay: no lease 3 in these recordings",
        "pd-replay: --request ffff: no request begins so",
        "pd-replay: block 1 of p was never used in these recordings",
    ]


@pytest.mark.parametrize("asked", [{"request": "ffff"}, {"lease": Lease("", 0, 3)}, {"block": ("p", 1)}])
def test_each_that_is_not_there_is_a_failure(recorded: Path, asked: dict[str, Any]) -> None:
    """A script must not take it for verified."""
    assert verify([recorded], **asked) == 1


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("7", ("", 0, 7)),
        ("prefill-1/7", ("prefill-1", 0, 7)),
        ("prefill-1/2/7", ("prefill-1", 2, 7)),  # as `show` prints it
        ("", None),
    ],
)
def test_a_lease_is_named_as_tables_print_it(text: str, meant: tuple[str, int, int] | None) -> None:
    assert named_lease(text) == meant


@pytest.mark.parametrize("text", ["seven", "p/", "/7", "p//7", "p/one/7", "p/1/2/7", "p/-1"])
def test_what_names_no_lease_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--lease: '{text}': give its generation, NODE/GENERATION or NODE/EPOCH/GENE"
    ):
        named_lease(text)


@pytest.mark.parametrize(("text", "meant"), [("7", ("", 7)), ("prefill-1/7", ("prefill-1", 7)), ("", None)])
def test_a_block_is_named_by_node_and_number(text: str, meant: tuple[str, int] | None) -> None:
    assert named_block(text) == meant


def test_what_names_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="--block: 'p/1/2': give its number, or NODE/NUMBER"):
        named_block("p/1/2")


def test_an_epoch_tells_leases_apart() -> None:
    lease = Lease("p", 2, 7)
    assert lease.is_meant("p", 2, 7)
    assert not any(lease.is_meant(*other) for other in (("p", 1, 7), ("q", 2, 7), ("p", 2, 8)))
    assert str(lease) == "7 of p in epoch 2"
