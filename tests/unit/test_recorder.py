"""The recorder's files: whole, cut, damaged, foreign, rotated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mcap.reader import make_reader
from mcap.writer import CompressionType, Writer

from pdbus.bus import recorder as recorder_module
from pdbus.bus import recording_part
from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import LeaseId
from pdbus.bus.recorder import Recorder
from pdbus.bus.recording import Recording, read
from pdbus.bus.recording_part import Part, RawRecord
from pdbus.bus.wire import Declared, Raw, decode, encode, replace, unpack_foreign

from tests import recordings

INCARNATION = bytes(range(16))
MIB = 1 << 20


class Heard(Declared, tag_field="t", tag=True):
    lease: LeaseId


def record_to(folder: Path, count: int) -> Path:
    recorder = Recorder(folder, "prefill-1", INCARNATION)
    for i in range(count):
        recorder.append("input", {"i": i}, now_ns=1000 + i, cause=i)
    recorder.close()
    return recorder.path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "BATCH_RECORDS_MAX", 2)
    monkeypatch.setattr(recording_part, "CHUNK_BYTES", 1)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    lease = LeaseId(node="prefill-1", incarnation=INCARNATION, epoch=1, generation=7)
    recorder = Recorder(tmp_path, "decode-1", INCARNATION, about=lease)
    first = recorder.append("input", Heard(lease=lease), now_ns=5)
    recorder.append("effect", {"bytes": b"\x00\xff", "n": None}, now_ns=6, cause=first)
    recorder.close()
    recording = read(recorder.path)
    heard, decided = list(recording)
    assert (recording.header.node, recording.header.incarnation) == ("decode-1", INCARNATION)
    assert decode(recording.header.about, LeaseId) == lease
    assert (heard.sequence, heard.now_ns, heard.kind, heard.payload["t"]) == (1, 5, "input", "Heard")
    assert heard.payload["lease"]["generation"] == 7
    assert (decided.cause, decided.payload) == (1, {"bytes": b"\x00\xff", "n": None})
    assert recording.truncated == "" and recording.lost == 0


def test_nobody_else_on_the_machine_reads_a_recording(tmp_path: Path) -> None:
    """With --record-tokens prompts and answers stand in it."""
    before = os.umask(0)
    try:
        path = record_to(tmp_path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_recording_is_an_mcap_file_of_msgpack(tmp_path: Path) -> None:
    """Any reader of MCAP opens it; messages have a price each, so many records share one."""
    with record_to(tmp_path, 600).open("rb") as file:
        reader = make_reader(file)
        assert reader.get_header().profile == "pdbus"
        messages = [(channel.topic, unpack_foreign(message.data)) for _, channel, message in reader.iter_messages()]
    assert [topic for topic, _ in messages] == ["recording", "records", "records", "records"]
    assert messages[0][1]["node"] == "prefill-1"
    assert sum(len(records) for _, (_, records) in messages[1:]) == 600


# ---------------------------------------------------------------- cut and damaged


@pytest.mark.usefixtures("small_chunks")
def test_a_file_cut_at_any_byte_reads_to_its_last_whole_chunk(tmp_path: Path) -> None:
    """A crash may cut anywhere, in a length or in a record; what was whole before must not be lost with it."""
    path = record_to(tmp_path, 5)
    whole, begins = path.read_bytes(), recordings.header_bytes(path)
    cut_file = tmp_path / "cut.mcap"
    most = 0
    for end in range(begins, len(whole)):
        cut_file.write_bytes(whole[:end])
        recording = read(cut_file)
        found = [record.payload["i"] for record in recording]
        assert found == list(range(len(found)))
        assert len(found) >= most, "more bytes never give fewer records"
        most = len(found)
        assert recording.truncated.startswith("cut at byte ") and not recording.damaged
    assert most == 5


def test_a_file_that_is_being_written_reads_as_far_as_it_was_flushed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "prefill-1", INCARNATION)
    assert list(recording := read(recorder.path)) == []
    assert recording.truncated.startswith("cut at byte")
    recorder.close()


def test_a_header_cut_short_is_no_recording(tmp_path: Path) -> None:
    path = record_to(tmp_path, 1)
    whole, begins = path.read_bytes(), recordings.header_bytes(path)
    cut_file = tmp_path / "cut.mcap"
    for end in range(begins):
        cut_file.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match="is no recording"):
            read(cut_file)


@pytest.mark.usefixtures("small_chunks")
def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Wherever it is, and it is told from a crash."""
    path = record_to(tmp_path, 5)
    whole = path.read_bytes()
    changed = tmp_path / "changed.mcap"
    for at in range(len(whole)):
        for bit in (0x01, 0x80):
            changed.write_bytes(whole[:at] + bytes((whole[at] ^ bit,)) + whole[at + 1 :])
            try:
                recording = read(changed)
            except ConfigError:
                continue
            found = [(record.sequence, record.payload["i"]) for record in recording]
            assert set(found) <= {(i + 1, i) for i in range(5)}, "nothing of a changed chunk is believed"
            assert recording.damaged, f"byte {at} changed unnoticed"


def test_what_is_no_record_ends_the_reading_and_says_where(tmp_path: Path) -> None:
    path = record_to(tmp_path, 3)
    recording = read(path)
    records = list(recording.raw())
    recordings.write(path, recording.header, [(records, 0), ([replace(records[0], payload=Raw(b"\x91"))], 0)])
    assert len(list(recording)) == 3
    assert recording.damaged and recording.truncated.startswith("damaged: not msgpack")


def test_bytes_after_the_end_are_damage(tmp_path: Path) -> None:
    path = record_to(tmp_path, 3)
    path.write_bytes(path.read_bytes() + b"more")
    recording = read(path)
    assert len(list(recording)) == 3
    assert recording.damaged


# ---------------------------------------------------------------- foreign


@pytest.mark.parametrize("content", [b"", b"hello, world", os.urandom(4096), b"\xff" * 64, b"\x01\x00\x00\x00\xc0"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes\.txt: is no recording"):
        read(path)


@pytest.mark.parametrize("profile", ["", "ros2"])
def test_another_programs_mcap_file_is_said_to_be_one(tmp_path: Path, profile: str) -> None:
    path = tmp_path / "camera.mcap"
    with path.open("wb") as file:
        writer = Writer(file, compression=CompressionType.NONE)
        writer.start(profile=profile)
        channel = writer.register_channel("camera", "json", 0)
        writer.add_message(channel, 1, b"{}", 1)
        writer.finish()
    with pytest.raises(ConfigError, match=rf"camera\.mcap: is an MCAP file of another program \(profile '{profile}'\)"):
        read(path)


def test_another_version_is_refused_saying_both(tmp_path: Path) -> None:
    path = record_to(tmp_path, 1)
    recordings.write(path, replace(read(path).header, version=99), [])
    with pytest.raises(ConfigError, match="version 99; this pdbus reads version 3"):
        read(path)


# ---------------------------------------------------------------- losses and failures


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


def test_a_disk_that_fails_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, "prefill-1", INCARNATION)
    file = recorder._part._file
    os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
    recorder.append("input", {"i": 1}, now_ns=1)
    recorder.close()
    assert caplog.text.count("ends here") == 1 and "No space left" in caplog.text


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "prefill-1", INCARNATION)
    recorder.close()
    recorder.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--record: cannot write"):
        Recorder(tmp_path / "file" / "below", "n", INCARNATION)


# ---------------------------------------------------------------- rotation


def record_much(folder: Path, count: int, incarnation: bytes = INCARNATION, total: int = 8 * MIB) -> None:
    recorder = Recorder(folder, "prefill-1", incarnation, total_bytes_max=total)
    for i in range(count):
        recorder.append("input", {"i": i, "noise": os.urandom(1000)}, now_ns=i)
    recorder.close()


@pytest.fixture
def rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two and a half parts of a MiB."""
    monkeypatch.setattr(recording_part, "CHUNK_BYTES", 1 << 16)
    record_much(tmp_path, 2500)
    return tmp_path


def whole(folder: Path) -> Recording:
    return Recording([Part(path) for path in folder.iterdir()])


def test_a_full_file_is_followed_by_the_next(rotated: Path) -> None:
    recording = whole(rotated)
    assert [part.header.part for part in recording.parts] == [1, 2, 3]
    assert [record.sequence for record in recording] == list(range(1, 2501))
    assert (recording.truncated, recording.gone) == ("", 0)


def test_the_oldest_files_go_when_all_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier lives first; other nodes' and other programs' files stay."""
    monkeypatch.setattr(recording_part, "CHUNK_BYTES", 1 << 16)
    others = [tmp_path / name for name in ("prefill-10-000102030405-0001.mcap", "notes.txt")]
    for other in others:
        other.write_bytes(bytes(4 * MIB))
    record_much(tmp_path, 3000, b"earlier life....")
    record_much(tmp_path, 12_000)
    assert all(other.exists() for other in others)
    parts = [Part(path) for path in sorted(tmp_path.glob("prefill-1-*"))]
    assert sum(part.path.stat().st_size for part in parts) <= 8 * MIB
    assert {part.header.incarnation for part in parts} == {INCARNATION}
    recording = Recording(parts)
    sequences = [record.sequence for record in recording]
    assert recording.gone > 0
    assert sequences == list(range(sequences[0], 12_001)), "the newest are kept without a hole"


def test_a_missing_part_ends_the_reading(rotated: Path) -> None:
    whole(rotated).parts[1].path.unlink()
    recording = whole(rotated)
    assert 0 < len(list(recording)) < 1500
    assert recording.truncated == "part 2 is missing" and not recording.damaged


def test_a_part_that_is_cut_though_another_follows_is_damage(rotated: Path) -> None:
    """No crash: its node went on."""
    path = whole(rotated).parts[0].path
    path.write_bytes(path.read_bytes()[:-100])
    recording = whole(rotated)
    list(recording)
    assert recording.damaged and recording.truncated.startswith("part 1 is cut at byte")


def test_what_stands_at_the_head_stands_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has but the newest part knows what was recorded."""
    monkeypatch.setattr(recording_part, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(recorder_module, "BATCH_RECORDS_MAX", 10)
    about = LeaseId(node="x", incarnation=b"", epoch=1, generation=1)
    recorder = Recorder(tmp_path, "n", INCARNATION, about, total_bytes_max=8 << 10)
    for i in range(100):
        recorder.append("input", {"noise": os.urandom(100)}, now_ns=i)
    recorder.close()
    parts = [Part(path) for path in tmp_path.iterdir()]
    assert len(parts) > 1
    assert {bytes(part.header.about) for part in parts} == {encode(about)}


def test_a_recording_can_be_read_again(rotated: Path) -> None:
    recording = whole(rotated)
    first: list[RawRecord] = list(recording.raw())
    assert list(recording.raw()) == first
