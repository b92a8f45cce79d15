"""Clients cancel in every state, vanish, and do not read: nothing of their requests is left on any node."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client, Generation
from pdbus.bus.errors import DeadlineExceeded, PdError

from .faults import (
    CHUNK,
    OPTIONS,
    SLOW_PREFILL,
    TCP,
    Site,
    ask,
    expected,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until_clean,
    until_fetch,
    until_status,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

LONG = 7_000  # tokens that nobody will wait for, and that fit


@pytest.fixture(scope="module")
def single() -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL, "decode": {"max_running": 1}}
    with site_of(1, 1, options=OPTIONS | {"lease": "2s"}, role_options=roles, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(single: Site) -> Iterator[Site]:
    """1P + 1D with one running request at a time."""
    yield single
    single.mend()


async def assert_cancelled(generation: Generation) -> None:
    assert (await generation.cancel()).reason == "cancelled"


@scenario
async def test_cancel_while_waiting(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        running = d.generate(prompt(20, 1), max_tokens=LONG)
        await until_status(d, lambda s: [r["state"] for r in s["requests"]] == ["running"])
        waiting = d.generate(prompt(20, 2), max_tokens=LONG)
        await until_status(d, lambda s: [r["state"] for r in s["requests"]] == ["running", "waiting"])
        await assert_cancelled(waiting)
        await assert_cancelled(running)


@scenario
async def test_cancel_while_it_is_prefilled(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        generation = d.generate(prompt(10 * CHUNK, 3), max_tokens=LONG)
        await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        await assert_cancelled(generation)


@scenario
async def test_cancel_while_it_is_read(hurt: Site) -> None:
    """Its blocks are quarantined until the read ends; the prefill node has its lease back at once."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        mover = (await pids_of(p))["mover"]
        hurt.freeze(mover)
        generation = d.generate(prompt(2 * CHUNK, 4), max_tokens=LONG)
        await until_fetch(d, lambda f: f["reads"] and f["first_token"])
        await assert_cancelled(generation)
        ledger = (await d.ledger()).ledger
        assert ledger["requests"] == 0 and ledger["blocks"]["quarantined"] > 0
        hurt.thaw(mover)


@scenario
async def test_cancel_while_it_claims(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        hurt.freeze(children["mover"])
        generation = d.generate(prompt(2 * CHUNK, 5), max_tokens=LONG)
        await until_fetch(d, lambda f: f["reads"] and f["first_token"])
        hurt.freeze(children["control"])
        hurt.thaw(children["mover"])
        await until_fetch(d, lambda f: f["state"] == "claiming")
        await assert_cancelled(generation)
        hurt.thaw(children["control"])


@scenario
async def test_cancel_while_it_runs(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        generation = d.generate(prompt(20, 6), max_tokens=LONG)
        async for _ in generation:
            if len(generation.tokens) > 5:
                break
        await assert_cancelled(generation)
        assert generation.tokens == expected(prompt(20, 6), len(generation.tokens))


@scenario
async def test_a_deadline_ends_a_request_that_waits_or_runs(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        running = d.generate(prompt(20, 10), max_tokens=LONG, deadline_ms=600)
        waiting = d.generate(prompt(20, 11), max_tokens=LONG, deadline_ms=300)
        for generation, state in ((waiting, "waiting"), (running, "running")):
            with pytest.raises(DeadlineExceeded, match=state):
                await read_all(generation)
        assert running.tokens == expected(prompt(20, 10), len(running.tokens))


@scenario
async def test_a_deadline_ends_a_request_that_is_read(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        mover = (await pids_of(p))["mover"]
        hurt.freeze(mover)
        with pytest.raises(DeadlineExceeded):
            await read_all(d.generate(prompt(2 * CHUNK, 12), max_tokens=LONG, deadline_ms=500))
        assert (await p.ledger()).ledger["leases"] == 0
        hurt.thaw(mover)


@scenario
async def test_a_decode_node_frozen_longer_than_its_lease_computes_again(hurt: Site) -> None:
    """It reads on where nothing is promised any more, and its claim is not granted."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        mine, theirs = await pids_of(d), await pids_of(p)
        hurt.freeze(theirs["mover"])
        task = asyncio.create_task(ask(d, prompt(2 * CHUNK, 13)))
        await until_fetch(d, lambda f: f["reads"] and f["first_token"])
        hurt.freeze(mine["control"])
        await until_clean(p)
        hurt.thaw(theirs["mover"])
        hurt.thaw(mine["control"])
        timeline = (await task).finished.timeline
        assert (timeline.attempts, timeline.remote) == (1, False)


@scenario
async def test_a_client_that_never_reads_is_cut_off(hurt: Site) -> None:
    async with Client(hurt.d.address, credit=16) as d:
        generation = d.generate(prompt(20, 7), max_tokens=LONG)
        await until_status(d, lambda s: s["requests"])
        await until_status(d, lambda s: not s["requests"])
        with pytest.raises(PdError, match="its credit is 16"):
            await read_all(generation)
        assert generation.tokens == expected(prompt(20, 7), 17)


ENDLESS = """
import asyncio, sys
from pdbus.bus.client import Client
async def main():
    async with Client(sys.argv[1]) as client:
        async for token in client.generate([9, 9, 9], max_tokens=7_000):
            print(token.index, flush=True)
asyncio.run(main())
"""


@scenario
async def test_a_killed_client_process_is_cleaned_up_after(hurt: Site) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", ENDLESS, hurt.d.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.kill()
    await process.wait()
    async with Client(hurt.d.address) as d:
        await until_status(d, lambda s: not s["requests"])
        await ask(d, prompt(20, 8))


@scenario
async def test_an_http_client_that_hangs_up_is_cleaned_up_after(hurt: Site) -> None:
    host, _, port = hurt.d.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hello", "max_tokens": 7000, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    async with Client(hurt.d.address) as d:
        await until_status(d, lambda s: not s["requests"])


@scenario
async def test_twenty_at_once_with_short_leases_and_one_running(hurt: Site) -> None:
    """Most wait much longer than a lease lasts: none asks for a prefill that it could not use in time."""
    async with Client(hurt.d.address) as d:
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask(d, prompt(200 + i, 9), 40) for i in range(20)))
        assert asyncio.get_running_loop().time() - began > 4  # two leases
    assert all(a.finished.timeline.remote and a.finished.timeline.attempts == 1 for a in answers)
