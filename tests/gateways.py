"""A gateway in this process over scripted nodes, its HTTP app called without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from pdbus.bus.answers import error_of
from pdbus.bus.endpoint import Received
from pdbus.bus.errors import PdError
from pdbus.bus.messages import Generate
from pdbus.bus.station import Station
from pdbus.nodes.gateway.gateway import Gateway
from pdbus.nodes.http.app import create_app

from tests.fake_node import FakeNode
from tests.loop import until

Script = Callable[[FakeNode, Received], None]


def decode_node(name: str, script: Script | None = None, **says: Any) -> FakeNode:
    """Bound and ready; `says` of its status."""
    node = FakeNode(script, name)
    node.bind()
    node.status = {
        "name": name, "role": "decode", "model": "tiny", "max_model_len": 128, "block_size": 16, "ready": True,
        "not_ready": [], "peers": [], "metrics": {}, **says,
    }  # fmt: skip
    return node


def knows(*nodes: FakeNode) -> list[dict[str, Any]]:
    """These as `peers` of a status."""
    return [{"name": n.name, "address": n.address, "role": n.status["role"], "state": "up"} for n in nodes]


def refuses(problem: PdError) -> Script:
    def script(node: FakeNode, received: Received) -> None:
        assert isinstance(received.message, Generate)
        node.tell(received, error_of(problem, kind="generate", client_id=received.message.client_id))

    return script


def asked(node: FakeNode) -> int:
    """How many requests it has got."""
    return node.count(Generate)


class Gate:
    """The gateway, and a web client of it."""

    def __init__(self, gateway: Gateway, web: httpx.AsyncClient, nodes: Sequence[FakeNode]) -> None:
        self.gateway, self.web = gateway, web
        self.nodes = list(nodes)  # all are closed at the end

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.web.post(path, json={"prompt": "hi", **body})

    async def ready(self, count: int) -> None:
        await until(lambda: len(self.gateway.fleet.ready()) == count)


@asynccontextmanager
async def gate(
    nodes: Sequence[FakeNode],
    *,
    join: Sequence[str] | None = None,
    ready: int | None = None,
    policy: str = "round-robin",
    queue: int = 8,
    record: Path | None = None,
) -> AsyncIterator[Gate]:
    """Over these nodes, which are closed at the end; `ready` of them are awaited."""
    station = Station(role="gateway", name="gate", record=record)
    closing = list(nodes)
    joins = [node.address for node in nodes] if join is None else join
    try:
        async with Gateway(station, joins, policy=policy, queue=queue) as gateway:
            transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://gate") as web:
                gated = Gate(gateway, web, nodes)
                closing = gated.nodes
                await gated.ready(len(nodes) if ready is None else ready)
                yield gated
    finally:
        station.close()
        for node in closing:
            node.close()


def events(response: httpx.Response) -> list[Any]:
    """A stream's events, [DONE] as that string."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
