"""Mooncake traces: what is in them comes out, what is wrong with them is said with file and line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.importers.mooncake import write
from pdbus.nodes.replay.workload import Asked, Workload, best_hits

from tests.traces import trace

MS = 1_000_000


def row(timestamp: Any = 0, tokens: int = 600, **rest: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 7, "hash_ids": [1, 2], **rest}


def written(folder: Path, *rows: Any, end: str = "\n") -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in rows) + end)
    return path


def read(folder: Path, *rows: Any, end: str = "\n") -> Workload:
    return import_workload(written(folder, *rows, end=end))


def problem(folder: Path, *rows: Any) -> str:
    with pytest.raises(ConfigError) as failed:
        read(folder, *rows)
    return str(failed.value).removeprefix(f"{folder}/")


def times_ms(workload: Workload) -> list[float]:
    return [asked.at_ns / MS for asked in workload.requests]


def test_the_public_trace() -> None:
    workload = import_workload(trace("mooncake_conversation.jsonl"))
    prompts = sorted(asked.input_tokens for asked in workload.requests)
    answers = sorted(asked.output_tokens for asked in workload.requests)
    ids = {hash_id for asked in workload.requests for hash_id in asked.hash_ids}
    at = [asked.at_ns for asked in workload.requests]
    assert (len(workload.requests), workload.block_tokens, workload.notes) == (12_031, 512, ())
    assert (prompts[6015], prompts[11_910], prompts[-1]) == (6_909, 85_401, 126_195)
    assert (answers[6015], answers[11_910], answers[-1]) == (350, 1_120, 2_000)
    assert (len(ids), len(set(at)), max(Counter(at).values())) == (182_790, 1_180, 28)
    assert round(at[-1] / 1e9) == 3_537
    assert round(best_hits(workload).block_rate, 3) == 0.366


def test_fields_of_a_row(tmp_path: Path) -> None:
    workload = read(tmp_path, row(5, 600), row(5, 700, hash_ids=[1, 3]), row(9.25, 100, hash_ids=[4]))
    assert workload == Workload(
        "trace.jsonl",
        [
            Asked(0, 600, 7, (1, 2)),
            Asked(0, 700, 7, (1, 3)),
            Asked(4_250_000, 100, 7, (4,)),
        ],
        512,
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([27, 28, 30], [0, 1, 3]),
        ([-5, 0, 1], [0, 5, 6]),
        ([3, 3, 3], [0, 0, 0]),
        ([1.7e12, 1.7e12 + 5], [0, 5]),  # since 1970
    ],
)
def test_a_workload_begins_with_its_first_request(tmp_path: Path, given: list[float], meant: list[float]) -> None:
    workload = read(tmp_path, *map(row, given))
    assert (times_ms(workload), workload.notes) == (meant, ())


def test_times_out_of_order_are_sorted_and_told(tmp_path: Path) -> None:
    workload = read(tmp_path, row(30, 600), row(10, 601), row(20, 602))
    assert [asked.input_tokens for asked in workload.requests] == [601, 602, 600]
    assert "1 requests stand after a later one" in workload.notes[0]


def test_seconds_since_1970_are_told_from_milliseconds(tmp_path: Path) -> None:
    """Read as milliseconds an hour would be over in four seconds."""
    workload = read(tmp_path, row(1_700_000_000), row(1_700_000_001.5))
    assert times_ms(workload) == [0, 1500]
    assert "seconds since 1970" in workload.notes[0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row(None), "timestamp is missing; give milliseconds since the beginning"),
        (row(float("nan")), "timestamp is nan; give milliseconds"),
        (row(float("-inf")), "timestamp is -inf; give milliseconds"),
        (row("noon"), "timestamp is 'noon'; give milliseconds"),
        (row(True), "timestamp is True; give milliseconds"),
        (row(10**400), "timestamp is 1000000000"),
        (row(input_length=-1), "input_length is -1; give a whole number of tokens from 0"),
        (row(input_length=1.5), "input_length is 1.5; give a whole number"),
        (row(output_length=None), "output_length is missing; give a whole number"),
        (row(output_length=1 << 40), "output_length is 1099511627776; give a whole number"),
        (row(hash_ids=[1, -2]), "hash_ids is [1, -2]; give a list of whole numbers"),
        (row(hash_ids="1,2"), "hash_ids is '1,2'; give a list"),
        (row(hash_ids=[1, 2, 3]), "hash_ids has 3 ids; a prompt of 600 tokens has 2 blocks of 512"),
        (row(1e15), "lies 31623 years after the first request: are units mixed?"),
        ("[1, 2]", "is [1, 2]; give an object a line"),
        ('{"timestamp": ', "is no JSON ("),
        ("[" * 100_000, "is no JSON ("),
        ("timestamp,input_length", "is no JSON ("),
        ("\x00\x01", "is no JSON ("),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, bad: Any, said: str) -> None:
    assert problem(tmp_path, row(), bad, row(1)).startswith(f"trace.jsonl:2: {said}")


def test_other_fields_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    workload = read(tmp_path, row(), "", row(1, user="x", type=["chat"]), " ")
    assert (len(workload.requests), workload.notes) == (2, ())


def test_without_hash_ids_no_prefix_is_known(tmp_path: Path) -> None:
    workload = read(tmp_path, {"timestamp": 0, "input_length": 9, "output_length": 1})
    assert (workload.block_tokens, workload.requests[0].hash_ids) == (0, ())


def test_no_tokens_are_taken_as_one_and_told(tmp_path: Path) -> None:
    workload = read(tmp_path, row(output_length=0))
    assert workload.requests[0].output_tokens == 1
    assert "of no tokens; taken as one" in workload.notes[0]


@pytest.mark.parametrize("size", [16, 64, 512, 1000])
def test_the_size_of_a_block_comes_from_the_lengths(tmp_path: Path, size: int) -> None:
    lengths = (size * 3, size * 3 + 1, size * 4 - 1)
    rows = [row(0, n, hash_ids=list(range(-(-n // size)))) for n in lengths]
    assert read(tmp_path, *rows).block_tokens == size


def test_a_cut_last_line_is_told_and_the_rest_is_used(tmp_path: Path) -> None:
    whole = json.dumps(row(1))
    workload = read(tmp_path, row(), whole[:40], end="")
    assert len(workload.requests) == 1
    assert workload.notes == (f"{tmp_path}/trace.jsonl:2: the last line is cut and left out",)
    assert len(read(tmp_path, row(), whole, end="").requests) == 2


def test_windows_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row(i)).encode() for i in range(2)))
    assert len(import_workload(path).requests) == 2


def test_gzip_whatever_its_name(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row(i)) + "\n" for i in range(2000)).encode()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(lines[:500]) + gzip.compress(lines[500:]))
    assert len(import_workload(path).requests) == 2000
    path.write_bytes(gzip.compress(lines)[:-1000])
    cut = import_workload(path)
    assert 0 < len(cut.requests) < 2000
    assert "gzip stream is cut" in cut.notes[0]
    data = bytearray(gzip.compress(lines))
    data[-8] ^= 1  # of its checksum
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is no whole gzip file"):
        import_workload(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty; give JSON lines of Mooncake"),
        (b"\n\n", "is empty; give"),
        (gzip.compress(b"", mtime=0), "is empty; give"),
        (b"\x7fELF\x02\x01\x01", "is no workload that is known; give"),
        (b"a,b,c\n1,2,3\n", "is no workload that is known; give"),
        (b'{"a": 1}\n', "is no workload that is known; give"),
        (b'{"input_length": 1, "ou', "holds no request"),
        (b'{"input_length": 1, "x": "\xff"}\n', "1: is no text in UTF-8"),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as failed:
        import_workload(path)
    assert str(failed.value).removeprefix(f"{path}:").lstrip().startswith(said)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: cannot be read: No such file"):
        import_workload(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    requests = [
        Asked(0, 40, 3, (1, 2, 3)),
        Asked(1_234_567, 33, 1, (1, 2, 4)),
        Asked(3_536_999_123_457, 16, 9),
    ]
    write(Workload("w", requests, 16), tmp_path / name)
    assert import_workload(tmp_path / name) == Workload(name, requests, 16)


def test_the_best_hits_are_those_of_whole_beginnings() -> None:
    """An id in the middle of another prompt hits nothing: KV depends on all that comes before."""
    requests = [
        Asked(0, 40, 1, (1, 2, 3)),
        Asked(0, 40, 1, (1, 2, 4)),
        Asked(0, 40, 1, (2, 3, 4)),
        Asked(0, 40, 1, (1, 2, 3)),
    ]
    hits = best_hits(Workload("w", requests, 16))
    assert (hits.blocks, hits.hit_blocks) == (12, 2 + 0 + 3)
    assert (hits.tokens, hits.hit_tokens) == (160, 32 + 0 + 40)
    assert best_hits(Workload("w", [])).block_rate == 0
