"""What clients asked of a recorded cluster, as a workload."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pdbus.bus.client_recorder import ClientBegan, ClientRecorder
from pdbus.bus.errors import ConfigError
from pdbus.bus.recorder import Recorder
from pdbus.nodes import events as ev
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.importers.mooncake import write
from pdbus.nodes.replay.workload import Asked

from .recorded_node import MS, SIZE, RecordedNode

FIRST, SECOND, THIRD = (bytes([i]) * 16 for i in (1, 2, 3))
AGAIN = FIRST[:8] + b"again..."  # the same prompt as FIRST


def node(folder: Path, name: str = "d") -> RecordedNode:
    made = RecordedNode(folder, name)
    made.come_up()
    return made


def test_times_lengths_and_prefixes(tmp_path: Path) -> None:
    d = node(tmp_path)
    start = d.now
    d.answer(FIRST, tokens=6, max_tokens=3)
    second = d.now - start
    d.answer(SECOND, tokens=9, max_tokens=2)
    d.answer(AGAIN, tokens=6, max_tokens=1)
    d.close()
    workload = import_workload(tmp_path)
    assert (workload.name, workload.block_tokens, workload.notes) == (tmp_path.name, SIZE, ())
    assert [asked[1:3] for asked in workload.requests] == [(6, 3), (9, 2), (6, 1)]
    assert [asked.at_ns for asked in workload.requests[:2]] == [0, second]
    first, other, again = (asked.hash_ids for asked in workload.requests)
    assert first == again and not set(first) & set(other)
    assert [len(ids) for ids in (first, other)] == [2, 3]


def test_what_failed_counts_as_asked_and_what_was_cancelled_as_given(tmp_path: Path) -> None:
    d = node(tmp_path)
    for request in (FIRST, SECOND, THIRD):
        d.ask(request, max_tokens=5)
    d.step()
    d.hear(ev.CancelAsked(client=FIRST.hex()))
    d.hear(ev.LeaveAsked())
    d.close()
    assert [asked.output_tokens for asked in import_workload(tmp_path).requests] == [1, 5, 5]


def test_all_nodes_and_lives_of_a_folder(tmp_path: Path) -> None:
    for name in ("d", "e"):
        d = node(tmp_path, name)
        d.answer(FIRST)
        d.close()
    RecordedNode(tmp_path, "p", "prefill").close()
    a, b = import_workload(tmp_path).requests
    assert a.hash_ids == b.hash_ids


def test_a_cut_recording_is_told_and_packed_ones_are_read(tmp_path: Path) -> None:
    d = node(tmp_path)
    d.answer(FIRST)
    path = d.close()
    whole = path.read_bytes()
    (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(whole[:-20]))
    path.unlink()
    workload = import_workload(tmp_path)
    assert len(workload.requests) == 1
    assert "cut at byte" in workload.notes[0]
    assert import_workload(tmp_path / f"{path.name}.gz").requests == workload.requests


def test_another_programs_recording_holds_no_request(tmp_path: Path) -> None:
    other = Recorder(tmp_path, "x", b"x" * 16)
    other.append("Something", {"a": 1}, 5)
    other.close()
    with pytest.raises(ConfigError, match="holds no request"):
        import_workload(tmp_path)


def test_a_clients_side_alone_is_no_workload(tmp_path: Path) -> None:
    """It does not tell which prompts begin alike."""
    began = ClientBegan(address="tcp://d:1", version="0")
    ClientRecorder(tmp_path, "client-1", b"c" * 16, began).close()
    with pytest.raises(ConfigError, match="holds recordings of clients alone; give those of the decode nodes"):
        import_workload(tmp_path)
    d = node(tmp_path)
    d.answer(FIRST)
    d.close()
    workload = import_workload(tmp_path)
    assert (len(workload.requests), workload.notes) == (1, ())


def test_no_recording_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "a.mcap").write_bytes(b"nothing of ours")
    with pytest.raises(ConfigError, match=r"a\.mcap: is no recording"):
        import_workload(tmp_path)


def test_a_recording_becomes_a_mooncake_trace(tmp_path: Path) -> None:
    d = node(tmp_path)
    for tokens, request in ((6, FIRST), (9, SECOND), (6, AGAIN)):
        d.answer(request, tokens=tokens)
    d.close()
    workload = import_workload(tmp_path)
    write(workload, tmp_path / "out.jsonl")
    again = import_workload(tmp_path / "out.jsonl")
    assert again._replace(name=workload.name) == workload
    assert isinstance(again.requests[0], Asked) and again.requests[0].at_ns % MS == 0
