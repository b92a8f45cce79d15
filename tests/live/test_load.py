"""`pd-replay load` and `export` on a real cluster: real prefix hits, real failures, and back from a recording."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.workload import best_hits

from .conftest import Live

pytestmark = pytest.mark.live

BLOCK = 64
PROMPTS = [(200, [1, 2, 3]), (260, [1, 2, 3, 4]), (330, [1, 2, 3, 4, 5]), (120, [1])]  # tokens, and ids of full blocks
ANSWER = 5


def replay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    code = "from pdbus.nodes.cli import replay_main; replay_main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=100, env={**clean, "NO_COLOR": "1"},
    )  # fmt: skip


def loaded(*arguments: str | Path) -> dict[str, Any]:
    result = replay("load", *arguments, "--json")
    assert (result.returncode, result.stdout.count("\n")) == (0, 1), result.stderr
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two agents that ask the same of their own: each request begins like the one before it."""
    folder = tmp_path_factory.mktemp("sessions")
    for name in ("a", "b"):
        requests = [{"t": 0.0, "type": "n", "in": n, "out": ANSWER, "hash_ids": ids} for n, ids in PROMPTS]
        text = json.dumps({"id": name, "block_size": BLOCK, "hash_id_scope": "local", "requests": requests})
        (folder / f"{name}.json").write_text(text)
    return folder


def test_prefix_hits_are_those_that_the_workload_makes_possible(coded: Live, sessions: Path) -> None:
    """A session sends one request after the other, so that every hit that is possible must be there."""
    result = loaded(sessions, "--to", coded.decode.address, "--seed", "7")
    assert (result["requests"], result["completed"], result["failures"]) == (8, 8, [])
    assert result["prompt_tokens"] == 2 * sum(n for n, _ in PROMPTS)
    assert result["answer_tokens"] == 8 * ANSWER
    assert result["hit_rate"] == result["best_hit_rate"] == best_hits(import_workload(sessions), 16).token_rate > 0.4
    assert result["remote"] > 0
    again = loaded(sessions, "--to", coded.decode.address, "--seed", "7")
    assert again["hit_rate"] > result["hit_rate"]  # the same seed asks for what is cached by now
    assert loaded(sessions, "--to", coded.decode.address, "--seed", "8")["hit_rate"] == result["hit_rate"]


def test_scaled_blocks_share_what_theirs_shared(coded: Live, sessions: Path) -> None:
    result = loaded(sessions, "--to", coded.decode.address, "--scale-tokens", "0.5", "--seed", "9")
    assert result["prompt_tokens"] == 2 * sum(n // 2 for n, _ in PROMPTS)
    assert result["hit_rate"] == result["best_hit_rate"] > 0.3


def test_lateness_counts_from_the_schedule(coded: Live, sessions: Path) -> None:
    """All stand at 0, and each waits for the one before it: what that costs shows only from the schedule."""
    result = loaded(sessions, "--to", coded.decode.address, "--seed", "10")
    assert result["lateness_ms"]["max"] > result["ttft_ms"]["p50"] > 0
    assert result["ttft_from_scheduled_ms"]["max"] > result["lateness_ms"]["max"]
    assert result["itl_ms"]["count"] == 8 * (ANSWER - 1)
    for name in ("lateness_ms", "ttft_ms", "ttft_from_scheduled_ms", "latency_ms", "latency_from_scheduled_ms"):
        spread = result[name]
        assert spread["count"] == 8
        assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_what_does_not_fit_fails_by_its_cause_and_the_rest_completes(coded: Live, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": n, "output_length": 2} for i, n in enumerate((40, 20_000, 50))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    result = replay("load", path, "--to", coded.decode.address, "--html", page)
    assert result.returncode == 0
    assert "3: 2 completed, 1 failed" in result.stdout and "context_length_exceeded" in result.stdout
    assert "note: 1 of 3 requests are too long for the nodes' 8192 tokens and will count as failed" in result.stderr
    assert "context_length_exceeded" in page.read_text()


def test_a_recording_is_a_workload_too_and_becomes_a_trace(coded: Live, recordings: Path, tmp_path: Path) -> None:
    """What was asked while the module's cluster recorded: prompts and prefixes as they were sent."""
    sent = loaded(_sessions_of_one(tmp_path), "--to", coded.decode.address, "--seed", "11")
    assert sent["completed"] == len(PROMPTS)
    result = replay("export", recordings, tmp_path / "out.jsonl.gz")
    assert result.returncode == 0 and "requests" in result.stderr
    recorded, exported = import_workload(recordings), import_workload(tmp_path / "out.jsonl.gz")
    last = exported.requests[-len(PROMPTS) :]
    assert exported.block_tokens == recorded.block_tokens == 16
    assert [(a.input_tokens, a.output_tokens) for a in last] == [(n, ANSWER) for n, _ in PROMPTS]
    assert [a[1:4] for a in exported.requests] == [a[1:4] for a in recorded.requests]
    shared = 3 * BLOCK // 16
    assert last[0].hash_ids[:shared] == last[1].hash_ids[:shared]
    assert last[0].hash_ids[shared] != last[1].hash_ids[shared]
    replayed = loaded(tmp_path / "out.jsonl.gz", "--to", coded.decode.address, "--speed", "1000", "--seed", "12")
    assert replayed["completed"] == len(recorded.requests)


def _sessions_of_one(folder: Path) -> Path:
    path = folder / "one.json"
    requests = [{"t": 0.0, "in": n, "out": ANSWER, "hash_ids": ids} for n, ids in PROMPTS]
    path.write_text(json.dumps({"block_size": BLOCK, "requests": requests}))
    return path


@pytest.mark.parametrize(
    ("node", "status", "said"),
    [
        ("prefill", 2, "is a prefill node; give decode nodes"),
        pytest.param("nobody", 1, "no node answered at tcp://127.0.0.1:1 within 5 s", marks=pytest.mark.long),
    ],
)
def test_a_node_that_will_not_do_is_said_before_anything_is_sent(
    coded: Live, sessions: Path, node: str, status: int, said: str
) -> None:
    address = coded.prefill.address if node == "prefill" else "tcp://127.0.0.1:1"
    result = replay("load", sessions, "--to", address)
    assert (result.returncode, result.stderr.count("\n"), result.stdout) == (status, 1, "")
    assert said in result.stderr


@pytest.mark.long
def test_a_node_that_dies_under_load_fails_what_it_had_and_the_status_is_1(tmp_path: Path) -> None:
    """Requests that come later must not wait for it one after the other."""
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 50 * i, "input_length": 64, "output_length": 2000} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asyncio.run(_killed(path))


async def _killed(path: Path) -> None:
    async with Cluster(0, 0, both=1, options={"engine": "coded", "coded_step_ms": 10.0}) as cluster:
        (node,) = cluster.both
        code = "from pdbus.nodes.cli import replay_main; replay_main()"
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", code, "load", str(path), "--to", node.address, "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with Client(node.address) as client:
            while len((await client.status())["requests"]) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await cluster.kill(node)
        out, _ = await load.communicate()
    result = json.loads(out)
    assert (load.returncode, result["completed"], result["failed"]) == (1, 0, 300)
    assert {row["cause"] for row in result["failures"]} == {"broken", "unreachable"}
