"""The recorder's file: whole, cut, damaged, foreign."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdbus.bus import recorder as recorder_module
from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import LeaseId
from pdbus.bus.recorder import Recorder, frame, read
from pdbus.bus.wire import Declared, encode

INCARNATION = bytes(range(16))


def frame_end(data: bytes, start: int = 0) -> int:
    return start + 12 + int.from_bytes(data[start : start + 4], "little")


class Heard(Declared, tag_field="t", tag=True):
    lease: LeaseId


def record_to(folder: Path, count: int) -> Path:
    recorder = Recorder(folder, "prefill-1", INCARNATION)
    for i in range(count):
        recorder.append("input", {"i": i}, now_ns=1000 + i, cause=i)
    recorder.close()
    return recorder.path


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "decode-1", INCARNATION)
    lease = LeaseId(node="prefill-1", incarnation=INCARNATION, epoch=1, generation=7)
    first = recorder.append("input", Heard(lease=lease), now_ns=5)
    recorder.append("effect", {"bytes": b"\x00\xff", "n": None}, now_ns=6, cause=first)
    recorder.close()
    recording = read(recorder.path)
    heard, decided = list(recording)
    assert (recording.header.node, recording.header.incarnation) == ("decode-1", INCARNATION)
    assert (heard.sequence, heard.now_ns, heard.kind, heard.payload["t"]) == (1, 5, "input", "Heard")
    assert heard.payload["lease"]["generation"] == 7
    assert (decided.cause, decided.payload) == (1, {"bytes": b"\x00\xff", "n": None})
    assert recording.truncated == "" and recording.lost == 0


def test_a_file_cut_at_any_byte_reads_to_its_last_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash may cut anywhere, in a length or in a record; what was whole before must not be lost with it."""
    monkeypatch.setattr(recorder_module, "BATCH_RECORDS_MAX", 2)
    whole = record_to(tmp_path, 5).read_bytes()
    header_end = frame_end(whole)
    cut_file = tmp_path / "cut.pdrec"
    most = 0
    for end in range(header_end, len(whole)):
        cut_file.write_bytes(whole[:end])
        recording = read(cut_file)
        found = [record.payload["i"] for record in recording]
        assert found == list(range(len(found)))
        assert len(found) >= most, "more bytes never give fewer records"
        most = len(found)
        at_a_seam = end == header_end or not recording.truncated
        assert at_a_seam or recording.truncated.startswith("cut at byte ")
    assert most == 4


def test_a_header_cut_short_is_no_recording(tmp_path: Path) -> None:
    whole = record_to(tmp_path, 1).read_bytes()
    header_end = frame_end(whole)
    cut_file = tmp_path / "cut.pdrec"
    for end in range(header_end):
        cut_file.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match="is no recording"):
            read(cut_file)


@pytest.mark.parametrize("content", [b"", b"hello, world", os.urandom(4096), b"\xff" * 64, b"\x01\x00\x00\x00\xc0"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes\.txt: is no recording"):
        read(path)


def test_another_version_is_refused_saying_both(tmp_path: Path) -> None:
    header = recorder_module.RecordingHeader(
        format=recorder_module.FORMAT, version=99, node="n", incarnation=b"", monotonic_ns=0, wall_ns=0
    )
    data = encode(header)
    path = tmp_path / "later.pdrec"
    path.write_bytes(frame(data))
    with pytest.raises(ConfigError, match="version 99; this pdbus reads version 2"):
        read(path)


def test_any_changed_byte_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, nothing of its frame is believed, and it is told from a crash."""
    monkeypatch.setattr(recorder_module, "BATCH_RECORDS_MAX", 2)
    whole = record_to(tmp_path, 5).read_bytes()
    header_end = frame_end(whole)
    changed = tmp_path / "changed.pdrec"
    for at in range(header_end, len(whole)):
        for bit in (0x01, 0x80):
            changed.write_bytes(whole[:at] + bytes((whole[at] ^ bit,)) + whole[at + 1 :])
            recording = read(changed)
            found = [record.payload["i"] for record in recording]
            assert found == list(range(len(found)))
            assert len(found) < 5, f"byte {at} changed unnoticed"
            assert recording.truncated


def test_what_is_no_record_ends_the_reading_and_says_where(tmp_path: Path) -> None:
    path = record_to(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + frame(b"\x91\xc0"))
    recording = read(path)
    assert len(list(recording)) == 3
    assert recording.damaged and recording.truncated.startswith("damaged before byte")


def test_records_that_do_not_fit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled disk must not eat the node's memory, and the file must say that it has a hole."""
    monkeypatch.setattr(recorder_module, "PENDING_MAX", 3)
    monkeypatch.setattr(recorder_module, "FLUSH_S", 3600.0)  # close ends the wait
    recording = read(record_to(tmp_path, 5))
    assert [record.payload["i"] for record in recording] == [0, 1, 2]
    assert recording.lost == 2


def test_a_payload_that_cannot_be_written_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, "prefill-1", INCARNATION)
    recorder.append("input", {"file": object()}, now_ns=1)
    recorder.close()
    recorder.append("input", {}, now_ns=2)
    assert "ends here" in caplog.text
    assert list(read(recorder.path)) == []


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "prefill-1", INCARNATION)
    recorder.close()
    recorder.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record: cannot write"):
        Recorder(tmp_path / "file" / "below", "n", INCARNATION)
