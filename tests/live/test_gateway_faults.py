"""The gateway in front of real nodes: they are killed and come back, clients leave: what is seen, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pdbus.bus.client import Client
from pdbus.nodes.cluster import http_ok
from pdbus.nodes.node_process import NodeProcess

from .faults import CHUNK, OPTIONS, SLOW_PREFILL, Site, prompt, scenario, site_of, until, until_clean, until_status
from .gateway_process import completion, events_of, gateway_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

DISCONNECTS, AT_ONCE = 200, 8


@pytest.fixture(scope="module")
def trio() -> Iterator[Site]:
    roles = {"prefill": SLOW_PREFILL, "decode": {"coded_step_ms": 4}}
    with site_of(1, 2, options={**OPTIONS, "lease": "2s"}, role_options=roles) as site:
        yield site


@pytest.fixture
def hurt(trio: Site) -> Iterator[Site]:
    """1P + 2D, slow enough to see a request in every state."""
    yield trio
    trio.mend()


def joined(site: Site) -> tuple[str, str]:
    """The prefill node leads to the others."""
    return "--join", site.p.address


async def where(site: Site, true: Any) -> NodeProcess:
    """The decode node that has a request for which this is true."""
    found: list[NodeProcess] = []

    async def look() -> bool:
        for node in site.cluster.decode:
            async with Client(node.address) as client:
                if any(true(request) for request in (await client.status())["requests"]):
                    found.append(node)
        return bool(found)

    await until(look)
    return found[0]


@pytest.mark.long
@scenario
async def test_gateways_side_by_side_answer_like_a_node(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as one, gateway_of("--join", hurt.d.address) as two:
        for gate in (one, two):
            await gate.sees("decode-1", "decode-2")
        answers = [gate.right(prompt(40 + i, i), 6) for i in range(4) for gate in (one, two)]
        for whole in await asyncio.gather(*answers):
            assert whole["pd_timeline"]["remote"] is True
        models = (await one.web.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["coded"]
        wrong = await one.complete([1], 8, max_tokens=10**6)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")


@scenario
async def test_killed_before_the_first_token_another_node_answers(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        answer = asyncio.create_task(gate.right(prompt(12 * CHUNK, 1), 5, stream=False))
        victim = await where(hurt, lambda r: r["prefill_node"] and not r["generated"])
        await hurt.cluster.kill(victim)
        await answer
        assert not (await gate.nodes())[victim.name]["ready"]


@pytest.mark.long
@scenario
async def test_killed_after_the_first_token_a_stream_ends_with_an_error(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        asked = completion(prompt(20, 2), 4000, stream=True)
        async with gate.web.stream("POST", "/v1/completions", json=asked) as answer:
            said = events_of(answer)
            await anext(said)
            victim = await where(hurt, lambda r: r["generated"])
            await hurt.cluster.kill(victim)
            last = [event async for event in said][-1]
        assert last["error"]["code"] == "unavailable", last


@pytest.mark.long
@scenario
async def test_killed_in_the_middle_a_whole_answer_begins_again(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        answer = asyncio.create_task(gate.right(prompt(20, 3), 300))
        victim = await where(hurt, lambda r: r["generated"] > 20)
        await hurt.cluster.kill(victim)
        await answer


@pytest.mark.long
@scenario
async def test_all_decode_nodes_may_go_and_come_back(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        for node in hurt.cluster.decode:
            await hurt.cluster.kill(node)
        refused = await gate.complete(prompt(10, 4))
        assert refused.status_code == 503
        assert "no decode node is ready" in refused.json()["error"]["message"]
        for node in hurt.cluster.decode:
            await hurt.cluster.restart(node)
        await gate.sees("decode-1", "decode-2")
        await gate.right(prompt(10, 5))


@pytest.mark.long
@scenario
async def test_a_drained_node_gets_nothing_more_and_no_request_is_lost(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        answers = [asyncio.create_task(gate.right(prompt(30 + i, 6), 40)) for i in range(12)]
        async with Client(hurt.d.address) as client:
            await until_status(client, lambda s: s["requests"])
            await client.drain()
        answers += [asyncio.create_task(gate.right(prompt(60 + i, 6), 10)) for i in range(12)]
        await asyncio.gather(*answers)
        assert await hurt.d.wait() == 0


@pytest.mark.long
@scenario
async def test_clients_that_leave_at_random_moments_leave_nothing_behind(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        chance, gated = random.Random(5), asyncio.Semaphore(AT_ONCE)

        async def leave(i: int) -> None:
            length, wait_s, stream = chance.randrange(1, 4 * CHUNK), chance.uniform(0, 0.3), chance.random() < 0.7
            async with gated:
                await disconnect(gate.process.http, completion(prompt(length, i), 400, stream=stream), wait_s)

        await asyncio.gather(*(leave(i) for i in range(DISCONNECTS)))
        for node in hurt.cluster.nodes:
            async with Client(node.address) as client:
                await until_clean(client)
        await gate.right(prompt(30, 7))


async def disconnect(url: str, body: dict[str, Any], wait_s: float) -> None:
    """Ask, and hang up so many seconds later whatever has come by then."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    try:
        async with asyncio.timeout(wait_s):
            await reader.read()
    except TimeoutError:
        pass
    writer.transport.abort()


@pytest.mark.long
@scenario
async def test_a_gateway_that_is_told_to_stop_lets_answers_end(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        asked = completion(prompt(20, 8), 300, stream=True)
        async with gate.web.stream("POST", "/v1/completions", json=asked) as answer:
            said = events_of(answer)
            await anext(said)
            gate.process.signal(signal.SIGTERM)
            last = [event async for event in said][-1]
        assert last == "[DONE]"
        assert await gate.process.wait() == 0


async def _is_deaf(url: str) -> bool:
    return not await http_ok(f"{url}/health/live")


@pytest.mark.long
@scenario
async def test_told_twice_it_stops_at_once_and_leaves_nothing_behind(hurt: Site) -> None:
    async with gateway_of(*joined(hurt)) as gate:
        await gate.sees("decode-1", "decode-2")
        asked = completion(prompt(20, 9), 7000, stream=True)
        async with gate.web.stream("POST", "/v1/completions", json=asked) as answer:
            said = events_of(answer)
            await anext(said)
            gate.process.signal(signal.SIGTERM)
            await until(lambda: _is_deaf(gate.process.http))
            gate.process.signal(signal.SIGINT)
            assert await gate.process.wait() == 0
            with contextlib.suppress(httpx.HTTPError):
                assert [event async for event in said][-1] != "[DONE]"
