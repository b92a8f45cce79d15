"""The link between two nodes is cut or goes silent at every step of a hand-off; memory can still be read.

A cut costs nothing but time: ZeroMQ makes the connection anew, and what was lost on the way is found by the next
renewal or asked again. Silence costs the attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.cluster import Cluster

from .conftest import Answered
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
    until_clean,
    until_fetch,
)
from tests.relay import Relay

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]  # tests/chaos has a spread of them


@pytest.fixture(scope="module")
def relay() -> Relay:
    return Relay()


@pytest.fixture(scope="module")
def linked(relay: Relay) -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL, "decode": {"join": relay.address}}

    async def before(cluster: Cluster) -> None:
        await relay.start(cluster.prefill[0].address)

    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP, before=before) as site:
        yield site


@pytest.fixture
def hurt(linked: Site, relay: Relay) -> Iterator[Site]:
    """1P + 1D over TCP, a relay between their buses."""
    yield linked
    relay.mend()
    linked.mend()


STATES = ("prefilling", "reading", "claiming")


async def fetching(site: Site, relay: Relay, state: str, asked: list[int]) -> asyncio.Task[Answered]:
    """A request whose prompt is half computed, or whose last reads are open, or whose claim is lost."""
    async with Client(site.p.address) as p:
        mover = (await pids_of(p))["mover"]
    async with Client(site.d.address) as d:
        if state != "prefilling":
            site.freeze(mover)
        task = asyncio.create_task(ask_at(site.d.address, asked))
        if state == "prefilling":
            await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
            return task
        await until_fetch(d, lambda f: f["reads"] and f["first_token"])
        if state == "claiming":
            relay.swallow()
            site.thaw(mover)
            await until_fetch(d, lambda f: f["state"] == "claiming")
    return task


async def ask_at(address: str, asked: list[int]) -> Answered:
    async with Client(address) as client:
        return await ask(client, asked)


@pytest.mark.parametrize("state", STATES)
@scenario
async def test_a_cut_costs_no_attempt(hurt: Site, relay: Relay, state: str) -> None:
    task = await fetching(hurt, relay, state, prompt(5 * CHUNK, STATES.index(state)))
    relay.mend()
    relay.cut()
    hurt.thaw_all()
    timeline = (await task).finished.timeline
    assert (timeline.remote, timeline.attempts) == (True, 1)


@pytest.mark.parametrize("state", STATES)
@scenario
async def test_silence_costs_the_attempt(hurt: Site, relay: Relay, state: str) -> None:
    """The prefill node works for nobody, until its lease expires."""
    task = await fetching(hurt, relay, state, prompt(5 * CHUNK, 10 + STATES.index(state)))
    relay.swallow()
    hurt.thaw_all()
    timeline = (await task).finished.timeline
    assert (timeline.remote, timeline.attempts) == (False, 1)
    async with Client(hurt.p.address) as p, Client(hurt.d.address) as d:
        await until_clean(p)
        relay.mend()
        await ask_remotely(d, STATES.index(state))
