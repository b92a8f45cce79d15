"""What a node needs of the machine runs out: one clear message, and what runs goes on."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.cluster import Cluster, http_ok

from .faults import (
    OPTIONS,
    TCP,
    Site,
    ask,
    ask_remotely,
    expected,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until,
    until_clean,
    until_status,
)
from .hand_made import Owner, hello_of

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

DESCRIPTORS, WOULD_BE_PEERS = 128, 100
MEMLOCK_BYTES = 64 << 10


def limited(limit: str) -> object:
    """Before the cluster starts: its decode node runs under a limit of the shell's."""

    async def before(cluster: Cluster) -> None:
        d = cluster.decode[0]
        d.command = ("bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *d.command)

    return before


@pytest.fixture
def few_descriptors() -> Iterator[Site]:
    roles = {"decode": {"coded_step_ms": 5}}
    before = limited(f"-n {DESCRIPTORS}")
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP, before=before) as site:  # type: ignore[arg-type]
        yield site


@scenario
async def test_mute_addresses_do_not_disturb_a_node(few_descriptors: Site) -> None:
    """A hundred where somebody listens and says nothing: few are called at a time, and looking for what has become of
    them does not take the time of what runs."""
    mute = [socket.create_server(("127.0.0.1", 0)) for _ in range(WOULD_BE_PEERS)]
    details = await besieged(few_descriptors, [f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in mute])
    assert len(details) == WOULD_BE_PEERS
    for s in mute:
        s.close()


@scenario
async def test_peers_beyond_its_descriptors_are_told_why_they_are_not_joined(few_descriptors: Site) -> None:
    """Each link takes about four."""
    hello = await hello_of(few_descriptors.d)
    owners = [Owner(f"owner-{number}", hello, None) for number in range(WOULD_BE_PEERS)]
    try:
        details = await besieged(few_descriptors, [owner.address for owner in owners])
    finally:
        for owner in owners:
            owner.endpoint.close()
    assert sum("raise `ulimit -n`" in detail for detail in details) > WOULD_BE_PEERS // 2
    assert any("raise `ulimit -n`" in line for line in few_descriptors.d.tail)


@scenario
async def test_peers_beyond_its_descriptors_are_not_let_in(few_descriptors: Site) -> None:
    """A hundred who call it. Who is in is served, HTTP says that the node is not ready, and all is well once they have
    gone."""
    async with Client(few_descriptors.d.address) as d:
        children = await pids_of(d)
        asked = prompt(40, 7)
        running = asyncio.create_task(read_all(d.generate(asked, max_tokens=1500)))
        crowd = [Client(few_descriptors.d.address, timeout_s=3.0) for _ in range(WOULD_BE_PEERS)]
        came = await asyncio.gather(*(c.__aenter__() for c in crowd), return_exceptions=True)
        assert 0 < sum(isinstance(c, Client) for c in came) < WOULD_BE_PEERS
        status = await d.status()
        assert not status["ready"] and any("raise `ulimit -n`" in reason for reason in status["not_ready"])
        assert not await http_ok(f"{few_descriptors.d.http}/health/ready")
        assert any("nobody else is let in" in line for line in few_descriptors.d.tail)
        assert (await running).tokens == expected(asked, 1500)
        for c in crowd:
            c.close()
        await until_status(d, lambda s: s["ready"])
        await ask_remotely(d, 8)
        assert await pids_of(d) == children
    async with Client(few_descriptors.d.address) as newcomer:
        await until_clean(newcomer)


async def besieged(site: Site, addresses: list[str]) -> list[str]:
    """Why each of them could not be joined. What runs meanwhile ends right, and nothing of the node has ended."""
    async with Client(site.d.address) as d:
        children = await pids_of(d)
        asked = prompt(40, 1)
        running = asyncio.create_task(read_all(d.generate(asked, max_tokens=600)))
        outcomes = await d.connect(addresses)
        assert not any(outcome.ok for outcome in outcomes)
        assert (await running).tokens == expected(asked, 600)
        status = await d.status()
        assert status["ready"]
        prefill = next(peer for peer in status["peers"] if peer["name"] == site.p.name)
        assert prefill["state"] == "up"
        await ask_remotely(d, 2)
        assert await pids_of(d) == children
    return [outcome.detail for outcome in outcomes]


@pytest.fixture
def little_memlock() -> Iterator[Site]:
    before = limited(f"-l {MEMLOCK_BYTES >> 10}")
    with site_of(1, 1, options=OPTIONS, environment=TCP, before=before) as site:  # type: ignore[arg-type]
        yield site


@scenario
async def test_tcp_needs_no_locked_memory(little_memlock: Site) -> None:
    async with Client(little_memlock.d.address) as d:
        await ask_remotely(d, 3)


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("recording")
    with site_of(1, 1, options={**OPTIONS, "record": str(folder)}, environment=TCP) as site:
        yield site


@scenario
async def test_a_full_disk_ends_the_recording_and_nothing_else(recorded: Site) -> None:
    async with Client(recorded.d.address) as d:
        children = await pids_of(d)
        resource.prlimit(children["control"], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await ask(d, prompt(200, 4), 50)

        async def told() -> bool:
            await ask(d, prompt(20, 5), 2)
            return any("recording to" in line and "ends here" in line for line in recorded.d.tail)

        await until(told)
        await ask_remotely(d, 6)
        assert (await d.status())["ready"]
        assert await pids_of(d) == children
    assert sum("ends here" in line for line in recorded.d.tail) == 1
