"""A gateway's recording beside its nodes': an incident with a killed node verifies, and the gateway is listed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdbus.nodes.cluster import Cluster

from .faults import OPTIONS, prompt
from .gateway_process import gateway_of
from .test_verify import verified

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

REQUESTS, AT_ONCE, KILL_AFTER = 60, 8, 20


async def incident(folder: Path) -> None:
    """2P + 2D and a gateway; one decode node is killed among its requests."""
    options = {**OPTIONS, "record": str(folder), "kv_blocks": 256}
    async with Cluster(2, 2, options=options, role_options={"decode": {"coded_step_ms": 2}}) as cluster:
        victim = cluster.decode[0]
        async with gateway_of("--join", cluster.prefill[0].address, "--record", str(folder), "--name", "front") as gate:
            await gate.sees("decode-1", "decode-2")
            ended, enough, gated = 0, asyncio.Event(), asyncio.Semaphore(AT_ONCE)

            async def one(i: int) -> None:
                nonlocal ended
                async with gated:
                    await gate.right([*prompt(64, i % 5), *prompt(i % 50, 100 + i)], 1 + i % 24)
                ended += 1
                if ended == KILL_AFTER:
                    enough.set()

            async def accident() -> None:
                await enough.wait()
                await cluster.kill(victim)

            await asyncio.gather(accident(), *(one(i) for i in range(REQUESTS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    asyncio.run(asyncio.wait_for(incident(folder), 120))
    return folder


def test_an_incident_behind_a_gateway_verifies(folder: Path) -> None:
    result = verified(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("the same") == 4 and "a gateway" in result.stdout
    assert "no divergence, no violation" in result.stdout


def test_the_gateway_has_its_row(folder: Path) -> None:
    (row,) = [line for line in verified(folder).stdout.splitlines() if line.startswith("front ")]
    assert row.split()[-1] == "closed"
