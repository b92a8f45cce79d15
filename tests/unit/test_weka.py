"""Agent sessions: one after the other with think times, ids of one file apart from those of another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.workload import Asked, Workload, best_hits

from tests.traces import trace

S = 1_000_000_000


def entry(t: Any = 0.0, tokens: Any = 8, ids: Any = (1, 2), **rest: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": list(ids), "think_time": 0.5, **rest}


def written(folder: Path, *entries: Any, name: str = "a.json", **rest: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"id": "x", "block_size": 4, "hash_id_scope": "local", "requests": entries, **rest}))
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as failed:
        import_workload(path)
    return str(failed.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "count", "last_s", "rate"),
    [("weka_trace_0001.json", 41, 5418, 0.9325), ("weka_trace_0002.json", 33, 2074, 0.934)],
)
def test_the_public_sessions(name: str, count: int, last_s: int, rate: float) -> None:
    workload = import_workload(trace(name))
    assert (len(workload.requests), workload.block_tokens, workload.notes) == (count, 64, ())
    assert workload.requests[-1].at_ns == last_s * S
    assert {asked.session for asked in workload.requests} == {1}
    assert all(len(asked.hash_ids) == -(-asked.input_tokens // 64) for asked in workload.requests)
    assert round(best_hits(workload).token_rate, 4) == rate


def test_a_session(tmp_path: Path) -> None:
    path = written(tmp_path, entry(5.0), entry(7.25, 13, (1, 2, 3), think_time=1.5), entry(9, 13, (1, 2, 3)))
    assert import_workload(path) == Workload(
        "a.json",
        [
            Asked(0, 8, 3, (0, 1), 1, S // 2),
            Asked(2_250_000_000, 13, 3, (0, 1, 2, 3), 1, 3 * S // 2),
            Asked(4 * S, 13, 3, (0, 1, 2, 4), 1, S // 2),  # a partial last block is nobody else's
        ],
        4,
    )


def test_ids_of_different_sessions_are_never_equal(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        written(tmp_path / "sessions", entry(), entry(1.0), name=name)
    workload = import_workload(tmp_path / "sessions")
    assert [asked.session for asked in workload.requests] == [1, 2, 1, 2]
    assert [asked.hash_ids for asked in workload.requests] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_ids_of_global_scope_are_one_workloads(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        written(tmp_path / "sessions", entry(), name=name, hash_id_scope="global")
    assert len({asked.hash_ids for asked in import_workload(tmp_path / "sessions").requests}) == 1


def test_another_agent_is_a_session_of_its_own_with_the_files_times_and_ids(tmp_path: Path) -> None:
    agent = {"t": 1.0, "type": "subagent", "requests": [entry(1.5, 8, (1, 9)), entry(2.0, 8, (1, 9))]}
    workload = import_workload(written(tmp_path, entry(0), agent, entry(1.75)))
    assert [(asked.at_ns / S, asked.session) for asked in workload.requests] == [(0, 1), (1.5, 2), (1.75, 1), (2, 2)]
    assert workload.requests[1].hash_ids[0] == workload.requests[0].hash_ids[0]


def test_too_few_and_too_many_ids_are_told(tmp_path: Path) -> None:
    workload = import_workload(written(tmp_path, entry(0, 12, (1,)), entry(1, 8, (1, 2, 3))))
    assert [asked.hash_ids for asked in workload.requests] == [(0, 1, 2), (0, 3)]
    assert "2 prompts have fewer or more ids than blocks" in workload.notes[0]


def test_times_that_go_back_are_told(tmp_path: Path) -> None:
    workload = import_workload(written(tmp_path, entry(2), entry(1)))
    assert [asked.at_ns for asked in workload.requests] == [0, S]
    assert "requests[1].t is before that of the request before it" in workload.notes[0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (entry(None), "requests[1].t is missing; give seconds since the session began"),
        (entry(float("nan")), "requests[1].t is nan; give seconds"),
        (entry("soon"), "requests[1].t is 'soon'; give seconds"),
        (entry(think_time=float("inf")), "requests[1].think_time is inf; give seconds"),
        (entry(tokens=-1), "requests[1].in is -1; give a whole number of tokens"),
        (entry(out=None), "requests[1].out is missing; give a whole number"),
        (entry(ids=["a"]), "requests[1].hash_ids is ['a']; give a list of whole numbers"),
        (7, "requests[1] is 7; give an object with t, in, out and hash_ids"),
        ({"requests": 7}, "requests[1].requests is 7; give a list of requests"),
        ({"requests": [entry(), entry(tokens=None)]}, "requests[1].requests[1].in is missing"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_field(tmp_path: Path, bad: Any, said: str) -> None:
    assert problem(written(tmp_path, entry(), bad)).startswith(said)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"block_size": 0}, "block_size is 0; give the tokens of a block"),
        ({"block_size": None}, "block_size is missing; give"),
        ({"hash_id_scope": "cosmic"}, "hash_id_scope is 'cosmic'; give local or global"),
        ({"requests": None}, "requests is missing; give a list"),
        ({"requests": []}, "holds no request"),
    ],
)
def test_what_is_wrong_with_a_session(tmp_path: Path, rest: dict[str, Any], said: str) -> None:
    assert problem(written(tmp_path, entry(), **rest)).startswith(said)


def test_sessions_with_different_blocks(tmp_path: Path) -> None:
    written(tmp_path, entry())
    second = written(tmp_path, entry(), name="b.json", block_size=8)
    with pytest.raises(ConfigError, match=f"{second}: block_size is 8, in the files before it is 4"):
        import_workload(tmp_path)


def test_a_cut_session_is_an_error(tmp_path: Path) -> None:
    """What a session shares with itself later is in the part that is missing."""
    path = written(tmp_path, entry(), entry())
    path.write_text(path.read_text()[:-30])
    assert "column" in problem(path) and "is cut" not in problem(path).partition(":")[0]
    path.write_bytes(gzip.compress(path.read_bytes())[:-10])
    assert problem(path).startswith("is cut: its gzip stream ends early")


def test_gzip(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    packed = tmp_path / "packed/a.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert import_workload(packed.parent).requests == import_workload(path).requests


def test_a_folder_without_any(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("x")
    with pytest.raises(ConfigError, match=r"holds neither \*\.mcap, .* nor \*\.json"):
        import_workload(tmp_path)
