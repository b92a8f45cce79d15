"""Bad input at the gateway gets what it gets at a node; who only holds connections harms nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from pdbus.bus.client import Client

from .faults import OPTIONS, Site, prompt, scenario, site_of, until_clean
from .gateway_process import Gate, completion, gateway_of
from .test_bad_input import BAD_BODIES, BAD_FIELDS, COMPLETION, LIMIT

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

IDLE, DEAF = 2000, 8


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    with site_of(1, 1, options={**OPTIONS, "max_model_len": LIMIT}) as site:
        yield site


@scenario
async def test_bad_input_gets_what_it_gets_at_a_node(pair: Site) -> None:
    bodies = [(path, json.dumps(body).encode()) for path, body, *_ in BAD_FIELDS]
    bodies += [(COMPLETION, body) for body, *_ in BAD_BODIES]
    bodies += [(COMPLETION, b'{"prompt": "x", "model": "gpt-4"}'), ("/v1/nothing", b"{}"), ("/v1/models", b"{}")]
    async with gateway_of("--join", pair.d.address) as gate:
        await gate.sees("decode-1")
        for path, body in bodies:
            here, there = [await said(gate.web, url + path, body) for url in (gate.process.http, pair.d.http)]
            assert here == there, body[:80]
            assert here[0] >= 400
        await gate.right(prompt(20, 1))


async def said(web: httpx.AsyncClient, url: str, body: bytes) -> tuple[int, object]:
    answer = await web.post(url, content=body)
    return answer.status_code, answer.json()


@scenario
async def test_idle_connections_and_readers_that_do_not_read_harm_nobody(pair: Site) -> None:
    async with gateway_of("--join", pair.d.address) as gate:
        await gate.sees("decode-1")
        idle = [await connected(gate) for _ in range(IDLE)]
        deaf = [await connected(gate) for _ in range(DEAF)]
        for i, (_, writer) in enumerate(deaf):
            body = json.dumps(completion(prompt(10, i), 200, stream=True)).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for _, writer in idle[: IDLE // 2]:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Evil: a\r\n b\x00c\r\nContent-Length: 100\r\n\r\n{"
            )
        for i in range(4):
            await gate.right(prompt(30 + i, 2))
        for _, writer in (*idle, *deaf):
            writer.transport.abort()
        await gate.right(prompt(40, 3))
        async with Client(pair.d.address) as client:
            await until_clean(client)


async def connected(gate: Gate) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gate.process.http.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))
