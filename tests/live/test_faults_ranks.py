"""One rank of several is killed or frozen: the others follow or wait, the request hears once and ends right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import (
    CHUNK,
    OPTIONS,
    SLOW_PREFILL,
    TCP,
    Site,
    ask,
    ask_remotely,
    pids_of,
    prompt,
    scenario,
    site_of,
    until_fetch,
    until_status,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    options = {**OPTIONS, "tp": 2}
    with site_of(1, 1, options=options, role_options={"prefill": SLOW_PREFILL}, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(pair: Site) -> Iterator[Site]:
    """1P + 1D of two ranks each, over TCP, with slow prefill and short leases."""
    yield pair
    pair.mend()


async def ranks_of(client: Client) -> list[dict[str, int]]:
    await pids_of(client)
    ranks: list[dict[str, int]] = (await client.status())["ranks"]
    return ranks


@pytest.mark.parametrize(
    ("node", "child", "salt"),
    [
        ("p", "worker", 1),
        pytest.param("p", "mover", 2, marks=pytest.mark.long),
        pytest.param("d", "mover", 3, marks=pytest.mark.long),
    ],
)
def test_one_rank_killed_while_its_kv_is_read(hurt: Site, node: str, child: str, salt: int) -> None:
    """All ranks of it are replaced under a new epoch; the request is computed elsewhere."""

    @scenario
    async def kill(hurt: Site) -> None:
        async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
            victim = p if node == "p" else d
            ranks, epoch = await ranks_of(victim), (await victim.status())["epoch"]
            owners = await ranks_of(p)
            hurt.freeze(owners[0]["mover"])
            task = asyncio.create_task(ask(d, prompt(6 * CHUNK, salt)))
            await until_fetch(d, lambda f: f["reads"])
            os.kill(ranks[1][child], signal.SIGKILL)
            hurt.thaw(owners[0]["mover"])
            assert (await task).finished.timeline.attempts == 1
            await until_status(victim, lambda s: s["epoch"] == epoch + 1 and s["ready"])
            after = await ranks_of(victim)
            assert not {r[child] for r in after} & {r[child] for r in ranks}
            if child == "mover":
                assert [r["worker"] for r in after] == [r["worker"] for r in ranks]
            await ask_remotely(d, salt)

    kill(hurt=hurt)


@pytest.mark.long
@scenario
async def test_one_rank_of_the_decode_nodes_worker_killed_while_it_decodes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        ranks = await ranks_of(d)
        generation = d.generate(prompt(2 * CHUNK, 5), max_tokens=400)
        await anext(generation)
        os.kill(ranks[1]["worker"], signal.SIGKILL)
        tokens = [token async for token in generation]
        assert generation.finished is not None and generation.finished.error is None and len(tokens) > 0
        assert not {r["worker"] for r in await ranks_of(d)} & {r["worker"] for r in ranks}
        await ask_remotely(d, 6)


@scenario
async def test_one_rank_frozen_keeps_the_blocks_of_all_until_it_goes_on(hurt: Site) -> None:
    """The other rank's part is done; the request goes on without either, and no block is given away."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        frozen = (await ranks_of(p))[1]["mover"]
        task = asyncio.create_task(ask(d, prompt(3 * CHUNK, 7)))
        await until_fetch(d, lambda f: f["ready"] > 0)
        hurt.freeze(frozen)
        await task
        status = await d.status()
        assert status["ledger"]["blocks"]["quarantined"] > 0 and status["ledger"]["reads"] > 0
        hurt.thaw(frozen)
        await until_status(d, lambda s: s["ledger"]["reads"] == 0)
        await ask_remotely(d, 7)
