"""What is simulated against what is measured, on one prefill and one decode node of this machine.

The coded engine's steps take a settable time, so that a busy machine changes little: what is compared is the
simulation, not the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdbus.nodes.cluster import Cluster
from pdbus.nodes.replay.simulate.profile import Profile, StepTimes, load_profile

pytestmark = pytest.mark.live

MS = 1_000_000
STEP_MS, TOKEN_US = 20, 400
ENGINE = {
    "engine": "coded", "coded_step_ms": STEP_MS, "coded_token_us": TOKEN_US, "coded_layers": 1, "coded_kv_heads": 1,
    "coded_head_dim": 4,
}  # fmt: skip
BLOCK = 64  # tokens of a workload's block


def pd(command: str, *arguments: str | Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    code = "from pdbus.nodes.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *command.split(), *map(str, arguments)],
        capture_output=True, text=True, env=clean,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def measured(file: Path, *arguments: str) -> Profile:
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    pd("bench profile", "--out", file, *settings, *arguments)
    return load_profile(str(file))


@pytest.mark.long
def test_a_measured_profile_has_the_times_that_the_engine_was_told_to_take(tmp_path: Path) -> None:
    profile = measured(tmp_path / "p.json", "--longest", "128", "--rows", "2", "--repeat", "2")
    times = StepTimes(profile)
    assert times.ns(128, 0, 0, 0) / MS == pytest.approx(STEP_MS + 0.127 * TOKEN_US, rel=0.25)
    assert times.ns(0, 0, 1, 64) / MS == pytest.approx(STEP_MS, rel=0.25)
    assert profile.kv_bytes_per_token == 2 * 4 * 4 and profile.name == "p" and "coded" in profile.source
    assert 0 < profile.message_ms < 20 and 0 < profile.request_ms < 50


def trace(path: Path, requests: int) -> None:
    """Prompts of 100 to 1,200 tokens; half of them begin as an earlier one did."""
    chance, fresh, known, at = random.Random(1), 0, [], 0.0
    with path.open("w") as file:
        for _ in range(requests):
            at += chance.expovariate(1 / 400)
            length = chance.randint(100, 1200)
            ids = list(chance.choice(known)[: length // BLOCK]) if known and chance.random() < 0.5 else []
            ids = ids[: chance.randint(0, len(ids))]
            ids += range(fresh, fresh := fresh + -(-length // BLOCK) - len(ids))
            known.append(ids[: length // BLOCK])
            row = {"timestamp": at, "input_length": length, "output_length": chance.randint(10, 60), "hash_ids": ids}
            file.write(json.dumps(row) + "\n")


async def loaded(path: Path, record: Path) -> dict[str, Any]:
    async with Cluster(1, 1, options={**ENGINE, "threads": 1, "record": str(record)}) as cluster:
        said = await asyncio.to_thread(pd, "replay load", path, "--to", cluster.decode[0].address, "--json")
    return dict(json.loads(said))


def compared(simulated: dict[str, Any], real: dict[str, Any]) -> None:
    assert simulated["completed"] == real["completed"] == real["requests"]
    for name in ("ttft_ms", "itl_ms"):
        assert simulated[name]["p50"] == pytest.approx(real[name]["p50"], rel=0.15)
    assert simulated["hit_rate"] == pytest.approx(real["hit_rate"], abs=0.01)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_medians_are_within_15_percent_and_hits_within_a_point(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    trace(file, 80)
    measured(tmp_path / "p.json", "--longest", "1024", "--rows", "8")
    real = asyncio.run(loaded(file, tmp_path / "recorded"))
    simulate = "replay simulate --json --workload"
    by_profile = json.loads(pd(simulate, file, "--profile", tmp_path / "p.json", "--block-size", "16"))
    compared(by_profile, real)
    again = json.loads(pd(simulate, tmp_path / "recorded"))
    compared(again, again["recorded"])
    assert real["hit_rate"] > 0.05
