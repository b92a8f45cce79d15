"""`pd-replay simulate` as one types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdbus.nodes import cli

ROWS = "".join(
    json.dumps({"timestamp": 500 * i, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, i + 3]}) + "\n"
    for i in range(8)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(ROWS)
    (tmp_path / "long.jsonl").write_text('{"timestamp": 0, "input_length": 200000, "output_length": 1}\n')
    (tmp_path / "empty").write_text("")
    (tmp_path / "p.json").write_text('{"name": "p"}')
    return tmp_path


def ran(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["pd-replay", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.replay_main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_json_says_what_came_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("simulate --workload good.jsonl --prefill 2 --decode 1 --json", monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"requests", "completed", "wall_s", "events", "ttft_ms", "itl_ms", "hit_rate"} <= said.keys()
    assert {"p50", "p90", "p99"} <= said["ttft_ms"].keys() and {"p50", "p90", "p99"} <= said["itl_ms"].keys()
    assert (said["requests"], said["completed"], said["prefill"], said["decode"]) == (8, 8, 2, 1)
    assert said["hit_rate"] == pytest.approx(7 * 1024 / (8 * 1200))


def test_people_get_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("simulate --workload good.jsonl --max-requests 3 --fault kill:p0@0s", monkeypatch) == 0
    out = capsys.readouterr().out
    assert "3 of 3 completed" in out and "first token" in out and "estimate-8b-80gb" in out


def test_nothing_completed_is_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("simulate --workload long.jsonl", monkeypatch) == 1
    assert "too_long" in capsys.readouterr().out


def test_a_search_says_what_it_tried_and_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{GOOD} --search --target ttft.p90=400ms --prefill 4 --decode 4 --prefill-chunk 512,2048"
    assert ran(f"{command} --json", monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["found"] and said["cost"] == said["prefill"] + said["decode"] == 2
    assert {row["prefill_chunk"] for row in said["tried"]} == {512, 2048}
    assert said["ttft_ms"]["p90"] <= 400 and said["targets"] == ["ttft.p90=400ms"]
    assert ran(command, monkeypatch) == 0
    assert "1 prefill and 1 decode nodes meet ttft.p90=400ms" in capsys.readouterr().out


def test_a_target_that_nothing_meets_is_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(f"{GOOD} --search --target itl.p50=1ms --prefill 2 --decode 2", monkeypatch) == 1
    assert "no cluster of that size meets itl.p50=1ms" in capsys.readouterr().out


GOOD = "simulate --workload good.jsonl"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("simulate", "Missing option '--workload'."),
        ("simulate --workload nowhere", "nowhere: cannot be read"),
        ("simulate --workload empty", "empty: is empty; give"),
        (f"{GOOD} --prefill 0", "--prefill: 0 nodes; give 1 to"),
        (f"{GOOD} --decode -3", "--decode: -3 nodes; give 1 to"),
        (f"{GOOD} --decode two", "Invalid value for '--decode'"),
        (
            f"{GOOD} --profile nowhere.json",
            "--profile: cannot read nowhere.json: No such file or directory; these ship",
        ),
        (f"{GOOD} --profile p.json", "--profile: p.json is no profile: Object missing required field `source`"),
        (f"{GOOD} --profile empty", "--profile: empty is no profile"),
        (f"{GOOD} --fault explode:p0@1s", "--fault: 'explode:p0@1s': 'explode' is no fault; give kill,"),
        (f"{GOOD} --fault kill:p1@1s", "--fault: 'kill:p1@1s': there is no p1"),
        (f"{GOOD} --policy best", "--policy: there is no 'best'; give round-robin, least-loaded, prefix"),
        (f"{GOOD} --lease 1", "--lease: "),
        (f"{GOOD} --lease 1s --renew 1s", "--lease: is too short"),
        (f"{GOOD} --prefill-chunk 9999", "--prefill-chunk: 9999 is more than a step holds"),
        (f"{GOOD} --block-size 400000", "--block-size: the KV memory of a node holds fewer than two blocks"),
        (f"{GOOD} --prefill-chunk many", "--prefill-chunk: 'many' will not do; give tokens"),
        (f"{GOOD} --prefill-chunk 256,512", "--prefill-chunk: is for a search: add --search"),
        (f"{GOOD} --search", "--search: says nothing to be met: give --target, as ttft.p90=2s"),
        (f"{GOOD} --target ttft.p90=2s", "--target: is for a search: add --search"),
        (f"{GOOD} --search --target fast", "--target: 'fast' is no target"),
        (f"{GOOD} --search --target ttft.p90=2s --decode-cost 0", "--decode-cost: 0 will not do"),
        (f"{GOOD} --search --target ttft.p90=2s --record x", "--record: is for one simulation"),
        (f"{GOOD} --prefill 500 --record x", "--record: one file for each of 501 nodes"),
        (f"{GOOD} --record empty", "--record: cannot write"),
        (f"{GOOD} --speed nan", "--speed: nan will not do"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(command, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith(f"pd-replay: {said}")
