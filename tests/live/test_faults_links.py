"""The link between two nodes is cut or goes silent at every step of a hand-off; memory can still be read.

A cut costs nothing but time: ZeroMQ makes the connection anew, and what was lost on the way is found by the next
renewal or asked again. Silence costs the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
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

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


class Proxy:
    """Stands before the bus of a prefill node. `silent`: takes everything and passes nothing on."""

    def __init__(self) -> None:
        self.silent = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, cluster: Cluster) -> None:
        host, _, port = cluster.prefill[0].address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = await asyncio.start_server(self._accept, sock=self._listening)

    def cut(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._open |= both
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        self._open -= both

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                if not self.silent:
                    writer.write(data)


@pytest.fixture(scope="module")
def proxy() -> Proxy:
    return Proxy()


@pytest.fixture(scope="module")
def linked(proxy: Proxy) -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL, "decode": {"join": proxy.address}}
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP, before=proxy.start) as site:
        yield site


@pytest.fixture
def hurt(linked: Site, proxy: Proxy) -> Iterator[Site]:
    """1P + 1D over TCP, a proxy between their buses."""
    yield linked
    proxy.silent = False
    linked.mend()


STATES = ("prefilling", "reading", "claiming")


async def fetching(site: Site, proxy: Proxy, state: str, asked: list[int]) -> asyncio.Task[Answered]:
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
            proxy.silent = True
            site.thaw(mover)
            await until_fetch(d, lambda f: f["state"] == "claiming")
    return task


async def ask_at(address: str, asked: list[int]) -> Answered:
    async with Client(address) as client:
        return await ask(client, asked)


@pytest.mark.parametrize("state", STATES)
@scenario
async def test_a_cut_costs_no_attempt(hurt: Site, proxy: Proxy, state: str) -> None:
    task = await fetching(hurt, proxy, state, prompt(5 * CHUNK, STATES.index(state)))
    proxy.silent = False
    proxy.cut()
    hurt.thaw_all()
    timeline = (await task).finished.timeline
    assert (timeline.remote, timeline.attempts) == (True, 1)


@pytest.mark.parametrize("state", [*(pytest.param(s, marks=pytest.mark.long) for s in STATES[:-1]), STATES[-1]])
@scenario
async def test_silence_costs_the_attempt(hurt: Site, proxy: Proxy, state: str) -> None:
    """The prefill node works for nobody, until its lease expires."""
    task = await fetching(hurt, proxy, state, prompt(5 * CHUNK, 10 + STATES.index(state)))
    proxy.silent = True
    hurt.thaw_all()
    timeline = (await task).finished.timeline
    assert (timeline.remote, timeline.attempts) == (False, 1)
    async with Client(hurt.p.address) as p, Client(hurt.d.address) as d:
        await until_clean(p)
        proxy.silent = False
        proxy.cut()
        await ask_remotely(d, STATES.index(state))
