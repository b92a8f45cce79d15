"""`pd-replay show`: which records belong to a request, and what is said when none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.recorder import Recorder
from pdbus.nodes.replay.show import belonging, find, load, show_request

REQUEST = bytes.fromhex("a1b2" + "00" * 14)
OTHER = bytes.fromhex("a1c3" + "00" * 14)
LEASE = {"node": "p", "incarnation": b"P" * 16, "epoch": 1, "generation": 3}

Rows = list[tuple[int, str, dict[str, Any]]]


def record_node(folder: Path, node: str, rows: Rows) -> Path:
    recorder = Recorder(folder, node, node.encode() * 16)
    for now_ns, kind, payload in rows:
        recorder.append(kind, payload, now_ns)
    recorder.close()
    return recorder.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two nodes, one request through both, another one between."""
    asked = {"t": "PrefillAsked", "message": {"try_": {"request": REQUEST, "attempt": 1}}}
    began = {"t": "LeaseBegan", "lease": LEASE, "try_": {"request": REQUEST, "attempt": 1}}
    generate = {"t": "Generate", "client_id": "chat-7", "request": REQUEST}
    posted = {"t": "PostRead", "read": 5, "request": REQUEST, "target": [1, 2, 3, 4]}
    record_node(
        tmp_path,
        "d",
        [
            (1_000_000, "input", generate),
            (4_000_000, "effect", posted),
            (5_000_000, "effect", {"t": "PostRead", "read": 6, "request": OTHER}),
            (6_000_000, "input", {"t": "ReadDone", "read": 5}),
            (7_000_000, "input", {"t": "ReadDone", "read": 6}),
        ],
    )
    ended = {"t": "LeaseEnded", "lease": LEASE, "cause": "done"}
    read_elsewhere = {"t": "ReadDone", "read": 5}
    record_node(
        tmp_path,
        "p",
        [
            (2_000_000, "input", asked),
            (3_000_000, "effect", began),
            (6_500_000, "input", read_elsewhere),
            (8_000_000, "effect", ended),
        ],
    )
    return tmp_path


def story(folder: Path, wanted: str) -> list[tuple[str, str]]:
    moments, _ = load([folder])
    (request,) = find(moments, wanted)
    return [(m.node, m.record.payload["t"]) for m in belonging(moments, request)]


WHOLE_STORY = [
    ("d", "Generate"),
    ("p", "PrefillAsked"),
    ("p", "LeaseBegan"),
    ("d", "PostRead"),
    ("d", "ReadDone"),
    ("p", "LeaseEnded"),
]


@pytest.mark.parametrize("wanted", ["a1b2", REQUEST.hex(), "A1B2", "chat-7"])
def test_a_request_is_followed_over_nodes_reads_and_leases(folder: Path, wanted: str) -> None:
    assert story(folder, wanted) == WHOLE_STORY


def test_a_read_that_names_no_request_follows_its_cause(tmp_path: Path) -> None:
    """StartRead names a read and a peer alone; the message that led to it tells whose it is."""
    recorder = Recorder(tmp_path, "d", b"d" * 16)
    for request, read in ((REQUEST, 5), (OTHER, 6)):
        came = recorder.append("MessageCame", {"try_": {"request": request, "attempt": 1}}, 1)
        recorder.append("StartRead", {"t": "StartRead", "read": read}, 1, came)
    recorder.append("ReadEnded", {"t": "ReadEnded", "read": 6}, 2)
    recorder.append("ReadEnded", {"t": "ReadEnded", "read": 5}, 3)
    recorder.close()
    moments, _ = load([tmp_path])
    (request,) = find(moments, "a1b2")
    assert [m.record.sequence for m in belonging(moments, request)] == [1, 2, 6]


def test_show_prints_the_story(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_request("a1b2", [folder]) == 0
    out = capsys.readouterr().out
    assert REQUEST.hex() in out
    assert "PrefillAsked" in out and "7.000" in out


def test_no_match_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_request("ffff", [folder]) == 1
    assert capsys.readouterr().err == f"pd-replay: no request 'ffff' among 2 in {folder}\n"


def test_a_beginning_of_two_ids_asks_for_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_request("a1", [folder]) == 1
    err = capsys.readouterr().err
    assert "fits 2 requests" in err and err.count("\n") == 1


def test_a_folder_without_recordings_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no recording"):
        show_request("a1", [tmp_path])


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.mcap"
    path.write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=r"x\.mcap: is no recording"):
        show_request("a1", [tmp_path])


def test_a_cut_file_is_shown_and_said_to_be_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.glob("p-*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert show_request("a1b2", [folder]) == 0
    assert "cut at byte" in capsys.readouterr().err


def test_a_payload_may_look_like_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_node(tmp_path, "d", [(1, "input", {"request": REQUEST, "text": "[/bold] [red]x"})])
    assert show_request("a1b2", [tmp_path]) == 0
    assert "[/bold] [red]x" in capsys.readouterr().out
