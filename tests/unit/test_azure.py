"""Azure's traces: dates with seven digits, columns by name, what is wrong said with file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.workload import Asked, Workload

from tests.traces import trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
DAY = "2023-11-16 18:15"


def read(folder: Path, *rows: str, head: str = HEAD, end: str = "\r\n") -> Workload:
    path = folder / "trace.csv"
    path.write_text("\r\n".join((head, *rows)) + end, newline="")
    return import_workload(path)


def at_us(workload: Workload) -> list[float]:
    return [asked.at_ns / 1000 for asked in workload.requests]


def test_the_public_trace() -> None:
    workload = import_workload(trace("azure_2023_conv.csv"))
    prompts = sorted(asked.input_tokens for asked in workload.requests)
    answers = sorted(asked.output_tokens for asked in workload.requests)
    assert (len(workload.requests), workload.block_tokens, workload.notes) == (19_366, 0, ())
    assert (prompts[9_683], prompts[-1], answers[9_683], answers[-1]) == (1_020, 14_050, 129, 1_000)
    assert round(workload.requests[-1].at_ns / 1e9) == 3_502
    assert workload.requests[1].at_ns == 4_314_579_000


def test_fields_of_a_row(tmp_path: Path) -> None:
    workload = read(tmp_path, f"{DAY}:46.6805900,374,44", f"{DAY}:46.6805901,396,109", f"{DAY}:47,1,2")
    assert workload.requests == [Asked(0, 374, 44), Asked(100, 396, 109), Asked(319_410_000, 1, 2)]


@pytest.mark.parametrize(
    ("first", "second", "us"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.010930+00:00", 1000),
        ("2024-05-10T00:00:00Z", "2024-05-10T02:00:01+02:00", 1_000_000),
        ("2023-12-31 23:59:59", "2024-01-01 00:00:00", 1_000_000),
        ("0.5", "1", 500_000),  # seconds
        ("-3", "2", 5_000_000),
        ("1700000000", "1700000001.5", 1_500_000),
        ("1700000000000", "1700000000250", 250_000),  # milliseconds since 1970
    ],
)
def test_times(tmp_path: Path, first: str, second: str, us: int) -> None:
    assert at_us(read(tmp_path, f"{first},1,1", f"{second},1,1")) == [0, us]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    head = "Model,generatedtokens,ContextTokens,timestamp"
    assert read(tmp_path, "gpt,7,9,3", head=head).requests == [Asked(0, 9, 7)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (",1,1", "TIMESTAMP is missing; give a date as the lines before do"),
        ("nan,1,1", "TIMESTAMP is 'nan'; give a date"),
        ("2023-13-01 00:00:00,1,1", "TIMESTAMP is '2023-13-01 00:00:00': month must be in 1..12; give a date"),
        ("2023-11-16 18:16:00,x,1", "ContextTokens is 'x'; give a whole number of tokens from 0"),
        ("2023-11-16 18:16:00,-4,1", "ContextTokens is -4; give a whole number"),
        ("2023-11-16 18:16:00,1,nan", "GeneratedTokens is nan; give a whole number"),
        ("2023-11-16 18:16:00,1", "has 2 values; give TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("2090-11-16 18:16:00,1,1", "lies 67 years after the first request"),
        ('"', "has 0 values; give TIMESTAMP"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(ConfigError) as failed:
        read(tmp_path, f"{DAY}:46.6805900,374,44", row, f"{DAY}:50,374,44")
    assert str(failed.value).startswith(f"{tmp_path}/trace.csv:3: {said}")


@pytest.mark.parametrize("time", ["nan", "inf", "noon", "", "2023-11-16"])
def test_a_first_time_that_is_none(tmp_path: Path, time: str) -> None:
    with pytest.raises(ConfigError, match=r"trace.csv:2: TIMESTAMP is .*; give a date such as 2023-11-16 18:15:46.68"):
        read(tmp_path, f"{time},1,1")


def test_a_column_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace.csv:1: names no column TIMESTAMP; give TIMESTAMP, ContextTokens"):
        read(tmp_path, "1,1", head="ContextTokens,GeneratedTokens")


def test_a_header_alone_holds_no_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace.csv: holds no request"):
        read(tmp_path)


@pytest.mark.parametrize("cut", [f"{DAY}:50,374,", f"{DAY}:50,3", f"{DAY}:5", "2023"])
def test_a_cut_last_line_is_told_and_the_rest_is_used(tmp_path: Path, cut: str) -> None:
    workload = read(tmp_path, f"{DAY}:46,374,44", cut, end="")
    assert workload.requests == [Asked(0, 374, 44)]
    assert workload.notes == (f"{tmp_path}/trace.csv:3: the last line is cut and left out",)


def test_a_whole_last_line_without_an_end_is_used(tmp_path: Path) -> None:
    assert len(read(tmp_path, f"{DAY}:46,374,44", end="").requests) == 1


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(f"{HEAD}\n{DAY}:46,374,44\n".encode()))
    assert import_workload(path).requests == [Asked(0, 374, 44)]
