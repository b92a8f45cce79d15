"""Nodes that are told to end: what runs finishes, what is new is refused with a reason, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, Closed
from pdbus.bus.ports import is_free
from pdbus.nodes.node_process import NodeProcess, descendants

from .faults import (
    CHUNK,
    OPTIONS,
    POLL_S,
    SLOW_PREFILL,
    TCP,
    Site,
    all_end,
    ask,
    ask_remotely,
    child_of,
    expected,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until,
    until_fetch,
    until_status,
    watch,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL, "decode": {"coded_step_ms": 2}}
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP) as site:
        yield site


@pytest.fixture
def site(pair: Site) -> Iterator[Site]:
    """1P + 1D over TCP."""
    yield pair
    pair.mend()


async def ended(node: NodeProcess, below: list[int]) -> int:
    """Its exit status, once no process of it is left and its ports are free."""
    status = await node.wait()
    await all_end(below)
    for port in ports_of(node):
        assert is_free("127.0.0.1", port), port
    return status


def ports_of(node: NodeProcess) -> list[int]:
    bus = int(node.address.rpartition(":")[2])
    return [bus, bus + 1, bus + 2, *([int(node.http.rpartition(":")[2])] if node.http else [])]


async def post(node: NodeProcess, body: dict[str, object]) -> tuple[int, bytes]:
    """Status and body of one greedy completion over HTTP; 0 when the connection broke before it was answered."""
    host, _, port = node.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"temperature": 0, **body}).encode()
    asked = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(asked.encode() + data)
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if head else 0, content


@scenario
async def test_a_decode_node_finishes_what_runs_and_refuses_what_is_new(site: Site) -> None:
    node = site.d
    below = watch(descendants(node.pid))
    async with Client(node.address) as d:
        running = asyncio.create_task(ask(d, prompt(20, 1), 400))
        fetching = asyncio.create_task(ask(d, prompt(4 * CHUNK, 1), 8))
        await until_status(d, lambda s: sorted(r["state"] for r in s["requests"]) == ["fetching", "running"])
        node.signal(signal.SIGTERM)
        await until_status(d, lambda s: "the node is draining" in s["not_ready"])
        with pytest.raises(Closed, match="decode-1 is draining"):
            await read_all(d.generate([1], max_tokens=1))
        status, body = await post(node, {"prompt": "hello"})
        assert status == 503 and "decode-1 is draining" in json.loads(body)["error"]["message"]
        await asyncio.gather(running, fetching)
        assert await ended(node, below) == 0


@scenario
async def test_a_second_signal_ends_a_decode_node_at_once(site: Site) -> None:
    node = site.d
    below = watch(descendants(node.pid))
    async with Client(node.address) as d:
        generation = d.generate(prompt(20, 2), max_tokens=7000)
        streaming = asyncio.create_task(post(node, {"prompt": "hello", "max_tokens": 7000, "stream": True}))
        await until_status(d, lambda s: len(s["requests"]) == 2 and all(r["generated"] for r in s["requests"]))
        node.signal(signal.SIGTERM)
        await until_status(d, lambda s: "the node is draining" in s["not_ready"])
        node.signal(signal.SIGTERM)
        with pytest.raises(Closed, match="decode-1 is shutting down"):
            await read_all(generation)
        assert generation.tokens == expected(prompt(20, 2), len(generation.tokens))
        status, events = await streaming
        assert status == 200 and b"decode-1 is shutting down" in events and b"[DONE]" not in events
        assert await ended(node, below) == 0


@scenario
async def test_a_prefill_node_waits_for_its_leases(site: Site) -> None:
    """It is chosen no more; who reads from it goes on reading."""
    below = watch(descendants(site.p.pid))
    async with Client(site.d.address) as d, Client(site.p.address) as p:
        mover = (await pids_of(p))["mover"]
        site.freeze(mover)
        task = asyncio.create_task(ask(d, prompt(3 * CHUNK, 3)))
        await until_fetch(d, lambda f: f["reads"])
        await p.drain()
        await until_status(d, lambda s: s["peers"][0]["draining"])
        assert (await ask(d, prompt(20, 3))).finished.timeline.attempts == 0
        site.thaw(mover)
        timeline = (await task).finished.timeline
        assert (timeline.remote, timeline.attempts) == (True, 1)
        assert await ended(site.p, below) == 0
        await until_status(d, lambda s: s["peers"][0]["state"] != "up")
        await site.cluster.restart(site.p)
        await ask_remotely(d, 3)


@scenario
async def test_a_second_signal_ends_a_prefill_node_with_its_leases(site: Site) -> None:
    below = watch(descendants(site.p.pid))
    async with Client(site.d.address) as d, Client(site.p.address) as p:
        await pids_of(p)
        task = asyncio.create_task(ask(d, prompt(6 * CHUNK, 4)))
        await until_fetch(d, lambda f: 0 < f["ready"] < f["prompt_tokens"])
        site.p.signal(signal.SIGTERM)
        await until_status(d, lambda s: s["peers"][0]["draining"])
        site.p.signal(signal.SIGINT)
        timeline = (await task).finished.timeline
        assert (timeline.remote, timeline.attempts) == (False, 1)
        assert await ended(site.p, below) == 0


@scenario
async def test_all_nodes_drain_together_under_load(site: Site) -> None:
    """What was admitted ends right, although the prefill node takes nothing new and may leave first."""
    below = {node.name: watch(descendants(node.pid)) for node in site.cluster.nodes}
    async with Client(site.d.address) as d:
        tasks = [asyncio.create_task(ask(d, prompt(1 + 29 * i, 5), 20)) for i in range(16)]
        await until_status(d, lambda s: len(s["requests"]) == 16)
        for node in site.cluster.nodes:
            node.signal(signal.SIGTERM)
        await asyncio.gather(*tasks)
        for node in site.cluster.nodes:
            assert await ended(node, below[node.name]) == 0


@scenario
async def test_a_node_whose_worker_cannot_be_started_ends_loudly(site: Site) -> None:
    below = watch(descendants(site.d.pid))
    async with Client(site.d.address) as d:
        generation = d.generate(prompt(20, 6), max_tokens=7000)
        await anext(generation)
        killed = 0
        while site.d.running:
            with contextlib.suppress(AssertionError, OSError):
                if (worker := child_of(site.d, "nodes.worker")) != killed:
                    os.kill(worker, signal.SIGKILL)
                    killed = worker
            await asyncio.sleep(POLL_S)
        with pytest.raises(Broken, match="decode-1 has failed"):
            await read_all(generation)
    assert await ended(site.d, below) == 1
    assert site.d.tail[-1].startswith("pd-node: the worker ended 3 times in a row")


@pytest.mark.long
@scenario
async def test_a_signal_during_the_start_leaves_nothing(site: Site) -> None:
    node = site.p
    node.signal(signal.SIGTERM)
    await node.wait()
    await node.close()
    await node.start()
    await until(lambda: _has_children(node))
    below = watch(descendants(node.pid))
    node.signal(signal.SIGTERM)
    assert await ended(node, below) == 0


async def _has_children(node: NodeProcess) -> bool:
    return bool(descendants(node.pid))


@scenario
async def test_the_http_process_comes_back_on_its_port(site: Site) -> None:
    before = (await post(site.d, {"prompt": "hello", "max_tokens": 3}))[1]
    streaming = asyncio.create_task(post(site.d, {"prompt": "hello", "max_tokens": 7000, "stream": True}))
    async with Client(site.d.address) as d:
        mine = await pids_of(d)
        await until_status(d, lambda s: s["requests"])
        os.kill(child_of(site.d, "nodes.http.server"), signal.SIGKILL)
        assert b"[DONE]" not in (await streaming)[1]
        after = (await post(site.d, {"prompt": "hello", "max_tokens": 3}))[1]
        assert json.loads(after)["choices"] == json.loads(before)["choices"]
        await until_status(d, lambda s: not s["requests"])
        assert await pids_of(d) == mine


@scenario
async def test_a_killed_decode_node_starts_again_at_once_on_its_ports(site: Site) -> None:
    """Its children, HTTP above all, have let go of what they inherited in time, in the middle of an answer too."""
    below = watch(descendants(site.d.pid))
    streaming = asyncio.create_task(post(site.d, {"prompt": "hello", "max_tokens": 7000, "stream": True}))
    async with Client(site.d.address) as d:
        await until_status(d, lambda s: s["requests"])
        await site.cluster.kill(site.d)
        await site.cluster.restart(site.d)
        assert b"[DONE]" not in (await streaming)[1]
        await all_end(below)
        await ask_remotely(d, 7)
