"""Two prefill nodes and a decode node under a storm of requests, cancels and deaths, recorded all along."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdbus.bus.client import Client, Generation

from .faults import (
    CHUNK,
    OPTIONS,
    TCP,
    Site,
    ask,
    ask_remotely,
    assert_right,
    expected,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until,
    until_fetch,
    until_status,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording")


@pytest.fixture(scope="module")
def trio(recording: Path) -> Iterator[Site]:
    options = {**OPTIONS, "record": str(recording), "kv_blocks": 256}
    prefill = {"coded_token_us": 200}
    with site_of(2, 1, options=options, role_options={"prefill": prefill}, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(trio: Site) -> Iterator[Site]:
    """2P + 1D over TCP, recorded."""
    yield trio
    trio.mend()


async def storm(d: Client, requests: int, cancels: int, salt: int) -> list[str]:
    """Requests of all sizes, some cancelled after none, one or a few tokens; every answer right as far as it goes."""
    gate = asyncio.Semaphore(16)
    draw = random.Random(salt)
    to_cancel = dict.fromkeys(draw.sample(range(requests), cancels))

    async def one(i: int) -> str:
        async with gate:
            asked = prompt(1 + i * 37 % 400, salt + i)
            generation = d.generate(asked, max_tokens=1 + i % 30)
            if i in to_cancel:
                await cancel_at_random(generation, draw)
            else:
                assert_right(await read_all(generation), asked)
            assert generation.tokens == expected(asked, len(generation.tokens))
            return generation.finished.reason if generation.finished else "cancelled"

    return await asyncio.gather(*(one(i) for i in range(requests)))


async def cancel_at_random(generation: Generation, draw: random.Random) -> None:
    wanted = draw.randrange(10)
    if not wanted:
        await asyncio.sleep(draw.random() / 20)
    while len(generation.tokens) < wanted and await anext(generation, None):
        pass
    await generation.cancel()


@scenario
async def test_200_requests_with_50_cancels_on_two_prefill_nodes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        outcomes = await storm(d, 200, 50, 1000)
    assert outcomes.count("cancelled") > 10
    assert set(outcomes) <= {"length", "cancelled"}


@pytest.mark.long
@scenario
async def test_a_storm_while_prefill_nodes_and_movers_die(hurt: Site) -> None:
    first, second = hurt.cluster.prefill
    async with Client(hurt.d.address) as d, Client(first.address) as p1, Client(second.address) as p2:
        mine, a, b = await pids_of(d), await pids_of(p1), await pids_of(p2)
        storming = asyncio.create_task(storm(d, 200, 50, 2000))
        await until_fetch(d, lambda f: f["reads"])
        os.kill(b["mover"], signal.SIGKILL)
        await until_status(d, lambda s: any(p["epoch"] == 2 and not p["detail"] for p in s["peers"]))
        os.kill(a["control"], signal.SIGKILL)
        await hurt.cluster.restart(first)
        os.kill(mine["mover"], signal.SIGKILL)
        outcomes = await storming
        assert set(outcomes) <= {"length", "cancelled"}
        await ask_remotely(d, 2)
        now = await pids_of(d)
        assert (now["control"], now["worker"]) == (mine["control"], mine["worker"])


@scenario
async def test_a_lost_prefill_node_costs_one_attempt_at_the_other(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        await ask_remotely(d, 3)
        task = asyncio.create_task(ask(d, prompt(5 * CHUNK, 3)))
        fetch = await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        lost, other = sorted(hurt.cluster.prefill, key=lambda node: node.name != fetch["node"])
        await hurt.cluster.kill(lost)
        timeline = (await task).finished.timeline
        assert (timeline.attempts, timeline.prefill_node, timeline.remote) == (2, other.name, True)


@scenario
async def test_the_recording_tells_of_a_request_of_the_storm(hurt: Site, recording: Path) -> None:
    async with Client(hurt.d.address) as d:
        finished = (await ask(d, prompt(100, 4))).finished
    told: list[str] = []

    async def whole() -> bool:
        told[:] = [await replayed(finished.request.hex()[:12], recording)]
        return "EndRequest" in told[0]

    await until(whole)
    for word in ("decode-1", finished.timeline.prefill_node, "StartRead", "transfer.done", "lease.released"):
        assert word in told[0]


async def replayed(request: str, recording: Path) -> str:
    """What `pd-replay show` prints; the last records may still be on their way to the disk."""
    pd_replay = Path(sys.executable).with_name("pd-replay")
    process = await asyncio.create_subprocess_exec(
        str(pd_replay), "show", request, str(recording), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return out.decode()
