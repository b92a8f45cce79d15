"""Processes are killed and frozen at every step of a hand-off: requests end right, everybody else goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, DeadlineExceeded
from pdbus.nodes.circuits import FAILURES_MAX

from .conftest import Answered
from .faults import (
    CHUNK,
    OPTIONS,
    SLOW_PREFILL,
    TCP,
    Site,
    Status,
    all_end,
    ask,
    ask_remotely,
    expected,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until_clean,
    until_fetch,
    until_status,
    watch,
)

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]  # tests/chaos has a spread of them


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    with site_of(1, 1, options=OPTIONS, role_options={"prefill": SLOW_PREFILL}, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(pair: Site) -> Iterator[Site]:
    """1P + 1D over TCP, with slow prefill and short leases."""
    yield pair
    pair.mend()


@scenario
async def test_prefill_control_killed_while_it_computes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        before, children = await pids_of(d), await pids_of(p)
        asked = prompt(6 * CHUNK, 1)
        task = asyncio.create_task(ask(d, asked))
        await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        ends = watch([children["worker"], children["mover"]])
        os.kill(children["control"], signal.SIGKILL)
        await all_end(ends)
        answered = await task
        assert answered.finished.timeline.attempts == 1
        await hurt.cluster.restart(hurt.p)
        await ask_remotely(d, 1)
        assert await pids_of(d) == before


@scenario
async def test_prefill_control_killed_while_it_is_read(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        before, children = await pids_of(d), await pids_of(p)
        asked = prompt(3 * CHUNK + 5, 2)
        hurt.freeze(children["mover"])
        task = asyncio.create_task(ask(d, asked))
        await until_fetch(d, lambda f: f["reads"] and f["first_token"])
        ends = watch([children["worker"], children["mover"]])
        os.kill(children["control"], signal.SIGKILL)
        hurt.thaw(children["mover"])
        await all_end(ends)
        await task
        await hurt.cluster.restart(hurt.p)
        await ask_remotely(d, 2)
        assert await pids_of(d) == before


@scenario
async def test_prefill_worker_killed_while_it_computes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        before, children = await pids_of(d), await pids_of(p)
        task = asyncio.create_task(ask(d, prompt(6 * CHUNK, 3)))
        await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        os.kill(children["worker"], signal.SIGKILL)
        assert (await task).finished.timeline.attempts == 1
        await until_status(p, lambda s: s["epoch"] == 2 and s["ready"])
        await ask_remotely(d, 3)
        assert await pids_of(d) == before
        assert (await pids_of(p))["control"] == children["control"]


@scenario
async def test_prefill_mover_killed_while_it_is_read(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        before, children = await pids_of(d), await pids_of(p)
        epoch = (await p.status())["epoch"]
        hurt.freeze(children["mover"])
        task = asyncio.create_task(ask(d, prompt(3 * CHUNK, 4)))
        await until_fetch(d, lambda f: f["reads"])
        os.kill(children["mover"], signal.SIGKILL)
        assert (await task).finished.timeline.attempts == 1
        await until_status(p, lambda s: s["epoch"] == epoch + 1 and s["ready"])
        await ask_remotely(d, 4)
        assert await pids_of(d) == before
        now = await pids_of(p)
        assert (now["control"], now["worker"]) == (children["control"], children["worker"])


@scenario
async def test_decode_mover_killed_while_it_reads(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        mine, theirs = await pids_of(d), await pids_of(p)
        hurt.freeze(theirs["mover"])
        task = asyncio.create_task(ask(d, prompt(3 * CHUNK, 5)))
        await until_fetch(d, lambda f: f["reads"])
        os.kill(mine["mover"], signal.SIGKILL)
        await task
        hurt.thaw(theirs["mover"])
        await ask_remotely(d, 5)
        now = await pids_of(d)
        assert (now["control"], now["worker"]) == (mine["control"], mine["worker"])
        now = await pids_of(p)
        assert (now["control"], now["worker"]) == (theirs["control"], theirs["worker"])


@scenario
async def test_decode_worker_killed_while_it_decodes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        mine, theirs = await pids_of(d), await pids_of(p)
        tasks = [asyncio.create_task(ask(d, prompt(50 + i, 6), 300)) for i in range(4)]
        await until_status(d, lambda s: any(r["generated"] > 20 for r in s["requests"]))
        os.kill(mine["worker"], signal.SIGKILL)
        await asyncio.gather(*tasks)
        await ask_remotely(d, 6)
        assert (await pids_of(d))["control"] == mine["control"]
        assert await pids_of(p) == theirs


@scenario
async def test_a_request_that_loses_two_workers_is_ended(hurt: Site) -> None:
    """It may be what kills them."""
    async with Client(hurt.d.address) as d:
        generation = d.generate(prompt(50, 20), max_tokens=7000)
        reading = asyncio.create_task(read_all(generation))
        await kill_worker_in_step(d, await kill_worker_in_step(d))
        with pytest.raises(Broken, match="lost 2 times"):
            await reading
        assert generation.tokens == expected(prompt(50, 20), len(generation.tokens))
        await ask(d, prompt(50, 21))


async def kill_worker_in_step(d: Client, last: int = 0) -> int:
    """Once another worker than the last has computed for the one request. Its pid."""

    def computes(status: Status) -> bool:
        running = any(r["state"] == "running" for r in status["requests"])
        return bool(running and status["ready"] and status["pids"]["worker"] != last)

    status = await until_status(d, computes)
    so_far = status["requests"][0]["generated"]
    await until_status(d, lambda s: s["requests"][0]["generated"] > so_far)
    worker: int = status["pids"]["worker"]
    os.kill(worker, signal.SIGKILL)
    return worker


@scenario
async def test_decode_mover_frozen_while_it_reads(hurt: Site) -> None:
    async with Client(hurt.d.address) as d:
        mover = (await pids_of(d))["mover"]
        hurt.freeze(mover)
        assert (await ask(d, prompt(2 * CHUNK, 22))).finished.timeline.attempts == 1
        hurt.thaw(mover)
        await until_clean(d)
        await ask_remotely(d, 22)


@scenario
async def test_decode_worker_frozen_while_it_decodes(hurt: Site) -> None:
    """A step that does not end keeps its blocks; the client hears in time."""
    async with Client(hurt.d.address) as d:
        worker = (await pids_of(d))["worker"]
        generation = d.generate(prompt(50, 23), max_tokens=7000, deadline_ms=700)
        await anext(generation)
        hurt.freeze(worker)
        with pytest.raises(DeadlineExceeded):
            await read_all(generation)
        assert (await d.ledger()).ledger["blocks"]["in_use"] > 0
        hurt.thaw(worker)
        await ask(d, prompt(50, 24))


@scenario
async def test_prefill_control_killed_before_it_answers_the_claim(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        task = await claiming(hurt, d, children, prompt(2 * CHUNK, 7))
        os.kill(children["control"], signal.SIGKILL)
        assert (await task).finished.timeline.attempts == 1
        await hurt.cluster.restart(hurt.p)
        await ask_remotely(d, 7)


@scenario
async def test_prefill_control_frozen_before_it_answers_the_claim(hurt: Site) -> None:
    """Its answer, valid, comes when the request has long been computed elsewhere, and is of no effect."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        task = await claiming(hurt, d, children, prompt(2 * CHUNK, 8))
        assert (await task).finished.timeline.attempts == 1
        hurt.thaw(children["control"])
        await ask_remotely(d, 8)


async def claiming(site: Site, d: Client, children: dict[str, int], asked: list[int]) -> asyncio.Task[Answered]:
    """A request whose claim has been sent to a prefill node that is frozen."""
    site.freeze(children["mover"])
    task = asyncio.create_task(ask(d, asked))
    await until_fetch(d, lambda f: f["reads"] and f["first_token"])
    site.freeze(children["control"])
    site.thaw(children["mover"])
    await until_fetch(d, lambda f: f["state"] == "claiming")
    return task


@scenario
async def test_prefill_control_frozen_while_it_computes(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        task = asyncio.create_task(ask(d, prompt(6 * CHUNK, 9)))
        await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        hurt.freeze(children["control"])
        assert (await task).finished.timeline.attempts == 1
        hurt.thaw(children["control"])
        await ask_remotely(d, 9)


@scenario
async def test_prefill_node_silent_for_long_is_dead_and_comes_back(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        await ask_remotely(d, 10)
        hurt.freeze(children["control"])
        await until_status(d, lambda s: s["peers"][0]["state"] == "dead")
        answered = await ask(d, prompt(2 * CHUNK, 10))
        assert answered.finished.timeline.attempts == 0
        hurt.thaw(children["control"])
        await ask_remotely(d, 11)
        assert await pids_of(p) == children


@scenario
async def test_a_prefill_node_where_attempts_fail_is_left_alone_until_a_trial_succeeds(hurt: Site) -> None:
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        await ask_remotely(d, 25)
        children = await pids_of(p)
        hurt.freeze(children["control"])
        lost = await asyncio.gather(*(ask(d, prompt(2 * CHUNK, 30 + i)) for i in range(FAILURES_MAX)))
        assert [answered.finished.timeline.attempts for answered in lost] == [1] * FAILURES_MAX
        assert (await d.status())["peers"][0]["circuit"] == "open"
        assert (await ask(d, prompt(2 * CHUNK, 40))).finished.timeline.attempts == 0
        hurt.thaw(children["control"])
        await ask_remotely(d, 26)
        assert (await d.status())["peers"][0]["circuit"] == ""
        assert any("is asked for prompts again" in line for line in hurt.d.tail)
        assert await pids_of(p) == children


@scenario
async def test_prefill_mover_frozen_while_it_is_read(hurt: Site) -> None:
    """The read is overdue, its blocks are quarantined until it ends after all."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        children = await pids_of(p)
        hurt.freeze(children["mover"])
        answered = await ask(d, prompt(2 * CHUNK, 12))
        assert answered.finished.timeline.attempts == 1
        assert (await d.ledger()).ledger["blocks"]["quarantined"] > 0
        assert (await ask(d, prompt(2 * CHUNK, 13))).finished.timeline.attempts == 0
        hurt.thaw(children["mover"])
        await until_clean(d)
        await ask_remotely(d, 12)
        assert await pids_of(p) == children
