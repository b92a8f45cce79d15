"""A decode node vanishes in mid-read: the prefill node serves the others, and its ledger is clean once leases end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import (
    CHUNK,
    OPTIONS,
    TCP,
    Site,
    ask,
    ask_remotely,
    pids_of,
    prompt,
    scenario,
    site_of,
    until_clean,
    until_fetch,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def readers() -> Iterator[Site]:
    with site_of(1, 2, options=OPTIONS, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(readers: Site) -> Iterator[Site]:
    """1P + 2D over TCP."""
    yield readers
    readers.mend()


@pytest.mark.parametrize("round_", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 6))])
@scenario
async def test_reader_killed_in_mid_read(hurt: Site, round_: int) -> None:
    """The owner is frozen, so that its mover finds the reader gone while it sends: over TCP that may end it."""
    first, second = hurt.cluster.decode
    salt = 10 * round_
    async with Client(second.address) as d, Client(hurt.p.address) as p:
        await ask_remotely(d, salt)
        children = await pids_of(p)
        hurt.freeze(children["mover"])
        async with Client(first.address) as doomed:
            generation = doomed.generate(prompt(20 * CHUNK, salt), max_tokens=8)
            await until_fetch(doomed, lambda f: f["reads"])
            other = asyncio.create_task(ask(d, prompt(3 * CHUNK + 1, salt)))
            await until_fetch(d, lambda f: f["reads"])
            first.kill_all()
            await first.wait()
            generation.fail(RuntimeError("killed"))
        hurt.thaw(children["mover"])
        await other
        await ask_remotely(d, salt + 1)
        now = await pids_of(p)
        assert (now["control"], now["worker"]) == (children["control"], children["worker"])
        await until_clean(p)


@pytest.mark.long
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
