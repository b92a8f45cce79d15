"""A decode node vanishes in mid-read: the prefill node serves the others, and its ledger is clean once leases end."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import (
    CHUNK,
    OPTIONS,
    SLOW_PREFILL,
    TCP,
    Site,
    all_end,
    ask,
    ask_remotely,
    pids_of,
    prompt,
    scenario,
    site_of,
    until_clean,
    until_fetch,
    until_status,
    watch,
)

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]  # tests/chaos has a spread of them

SHORT, ALL = 3, 30  # readers killed


@pytest.fixture(scope="module")
def readers() -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL}
    with site_of(1, 2, options=OPTIONS, role_options=roles, environment=TCP, bound_s=500) as site:
        yield site


@pytest.fixture
def hurt(readers: Site) -> Iterator[Site]:
    """1P + 2D over TCP, with slow prefill."""
    yield readers
    readers.mend()


@pytest.mark.parametrize("rounds", [SHORT, ALL])
@pytest.mark.timeout(600)
@scenario
async def test_a_reader_that_dies_in_mid_read(hurt: Site, rounds: int) -> None:
    """That may end the owner's mover, which sends the bytes. Its worker, weights and control stay, another mover takes
    its place, and a second decode node that reads at the same time gets right tokens.

    Every second time the owner's mover is frozen for that moment, so that reads are certainly under way; then it
    finds the reader gone while it sends.
    """
    back_s: list[float] = []
    async with Client(hurt.p.address) as p, Client(hurt.cluster.decode[1].address) as d:
        watching = asyncio.create_task(watch_movers(p, back_s))
        first = await pids_of(p)
        for round_ in range(rounds):
            await reader_dies(hurt, p, d, round_, salt=100 * rounds + round_)  # prompts that nobody has cached
            now = await pids_of(p)
            assert (now["control"], now["worker"]) == (first["control"], first["worker"])
            await hurt.cluster.restart(hurt.cluster.decode[0])  # its hello proves that the old life is over
            await until_clean(p)
        assert not watching.done(), watching.exception()
        watching.cancel()
    slowest = f", each back within {max(back_s):.2f} s" if back_s else ""
    print(f"\n{rounds} readers killed, {len(back_s)} of the owner's movers lost{slowest}")


async def watch_movers(p: Client, back_s: list[float]) -> None:
    """How long each lost mover is missing: from its end until the node is ready again, with another one."""
    while True:
        mover = (await pids_of(p))["mover"]
        await all_end(watch([mover]), within_s=math.inf)
        ended_s = time.monotonic()
        await until_status(p, lambda s, lost=mover: s["ready"] and s["pids"]["mover"] not in (0, lost))  # type: ignore[misc]
        back_s.append(time.monotonic() - ended_s)


async def reader_dies(site: Site, p: Client, d: Client, round_: int, salt: int) -> None:
    """One round; the second decode node reads at the same time."""
    doomed = site.cluster.decode[0]
    async with Client(doomed.address) as client:
        pids = await pids_of(client)
        for reader, offset in ((d, 3000), (client, 4000)):
            await ask_remotely(reader, offset + salt)  # it knows the owner's mover, the one before may have died
        mover = (await pids_of(p))["mover"]
        if round_ % 2:
            site.freeze(mover)
        generation = client.generate(prompt(8 * CHUNK + 1, salt), max_tokens=8)
        other = asyncio.create_task(ask(d, prompt(4 * CHUNK + 1, 1000 + salt)))
        await until_fetch(d, lambda fetch: fetch["blocks_posted"] > 0)
        await until_fetch(client, lambda fetch: fetch["blocks_posted"] > 0)
        ends = watch([pids["mover"], pids["control"]])
        for which in ("mover", "control"):
            os.kill(pids[which], signal.SIGKILL)
        await all_end(ends)
        generation.fail(RuntimeError("killed"))
    await doomed.wait()
    site.thaw(mover)
    await other
    await ask_remotely(d, 2000 + salt)


@scenario
async def test_reader_control_killed_in_mid_read(hurt: Site) -> None:
    """Its mover lives on until the read has ended, so that the owner's survives."""
    first, second = hurt.cluster.decode
    async with Client(second.address) as d, Client(hurt.p.address) as p:
        await ask_remotely(d, 50)
        children = await pids_of(p)
        hurt.freeze(children["mover"])
        async with Client(first.address) as doomed:
            generation = doomed.generate(prompt(20 * CHUNK, 50), max_tokens=8)
            await until_fetch(doomed, lambda f: f["reads"])
            await hurt.cluster.kill(first)
            generation.fail(RuntimeError("killed"))
        hurt.thaw(children["mover"])
        await ask_remotely(d, 51)
        await until_clean(p)
        now = await pids_of(p)
        assert (now["control"], now["worker"]) == (children["control"], children["worker"])


@scenario
async def test_reader_that_returns_proves_its_end(hurt: Site) -> None:
    """Restarted on its ports, it says hello under a new incarnation: leases of the old one end without expiring."""
    first = hurt.cluster.decode[0]
    async with Client(hurt.p.address) as p:
        children = await pids_of(p)
        hurt.freeze(children["mover"])
        async with Client(first.address) as doomed:
            generation = doomed.generate(prompt(10 * CHUNK, 60), max_tokens=8)
            await until_fetch(doomed, lambda f: f["reads"])
            first.kill_all()
            generation.fail(RuntimeError("killed"))
            await first.wait()
        assert (await p.ledger()).ledger["leases"] == 1
        hurt.thaw(children["mover"])
        await hurt.cluster.restart(first)
        await until_clean(p)
        async with Client(first.address) as d:
            await ask_remotely(d, 60)
