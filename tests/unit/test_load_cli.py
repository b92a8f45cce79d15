"""`pd-replay load` and `export` with bad input: one line that says what would be right, exit status 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdbus.nodes import cli

ROW = '{"timestamp": 0, "input_length": 9, "output_length": 1}\n'
TO = "--to tcp://127.0.0.1:1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(ROW)
    (tmp_path / "bad.jsonl").write_text(ROW + '{"timestamp": NaN, "input_length": 9, "output_length": 1}\n')
    (tmp_path / "empty").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"load nowhere {TO}", "nowhere: cannot be read: No such file or directory"),
        (f"load empty {TO}", "empty: is empty; give JSON lines of Mooncake, CSV of Azure"),
        (f"load bad.jsonl {TO}", "bad.jsonl:2: timestamp is nan; give milliseconds since the beginning"),
        (f"load good.jsonl {TO} --format azure", "good.jsonl:1: names no column TIMESTAMP; give TIMESTAMP, Context"),
        (f"load good.jsonl {TO} --format csv", "--format: 'csv' is not known; give auto, mooncake, azure, weka, recor"),
        ("load good.jsonl", "Missing option '--to'."),
        ("load good.jsonl --to localhost", "--to: must be like tcp://host:port"),
        ("load good.jsonl --to ,", "--to: is empty: give a value, or leave it out"),
        (f"load good.jsonl {TO} --speed 0", "--speed: 0 will not do; give a number above 0"),
        (f"load good.jsonl {TO} --speed nan", "--speed: nan will not do; give a number above 0"),
        (f"load good.jsonl {TO} --scale-tokens -1", "--scale-tokens: -1 will not do; give a number above 0"),
        (f"load good.jsonl {TO} --max-requests -1", "Invalid value for '--max-requests'"),
        (f"load good.jsonl {TO} --html /nowhere/x.html", "--html: /nowhere/x.html cannot be written: No such file"),
        ("load . --to tcp://127.0.0.1:1", ".: holds neither *.mcap"),
        ("export good.jsonl /nowhere/x.jsonl", "/nowhere/x.jsonl: cannot be written: No such file"),
        ("export empty x.jsonl", "empty: is empty; give"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pd-replay", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.replay_main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"pd-replay: {said}")


def test_a_trace_is_exported(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pd-replay", "export", "good.jsonl", "out.jsonl"])
    with pytest.raises(SystemExit) as ended:
        cli.replay_main()
    assert (ended.value.code, capsys.readouterr().err) == (0, "out.jsonl: 1 requests\n")
    assert (folder / "out.jsonl").read_text().endswith('"hash_ids": []}\n')
