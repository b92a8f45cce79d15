"""`pd gateway` as a process over a live cluster, and its answers over real HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import GATEWAY_COMMAND, PORTS_FROM, PORTS_TO, http_ok
from pdbus.nodes.node_process import NodeProcess

from .faults import expected, until

TOLD = ("name", "requests", "reads", "leases", "ledger", "not_ready")


class Gate:
    """A gateway's process and a web client of it."""

    def __init__(self, process: NodeProcess, web: httpx.AsyncClient) -> None:
        self.process, self.web = process, web

    async def complete(self, prompt: Sequence[int], tokens: int = 8, **body: Any) -> httpx.Response:
        return await self.web.post("/v1/completions", json=completion(prompt, tokens, **body))

    async def right(self, prompt: Sequence[int], tokens: int = 8, **body: Any) -> dict[str, Any]:
        """A whole answer whose tokens are what one node would say."""
        answer = await self.complete(prompt, tokens, **body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        assert whole["choices"][0]["token_ids"] == expected(prompt, tokens)
        return whole

    async def told(self) -> str:
        """Everything that it and its nodes say of themselves, for a test that has failed."""
        try:
            status = (await self.web.get("/pd/nodes", timeout=5)).text
        except httpx.HTTPError as e:
            return f"the gateway does not answer: {e!r}"
        said = [status]
        for node in json.loads(status)["nodes"]:
            try:
                async with asyncio.timeout(5), Client(node["address"]) as client:
                    said.append(json.dumps({k: v for k, v in (await client.status()).items() if k in TOLD}))
            except (PdError, TimeoutError) as e:
                said.append(f"{node['name']}: {e!r}")
        return "\n".join(said)

    async def nodes(self) -> dict[str, dict[str, Any]]:
        """By name, what it knows of its nodes."""
        answer = await self.web.get("/pd/nodes")
        return {node["name"]: node for node in answer.json()["nodes"]}

    async def sees(self, *names: str) -> None:
        """Until exactly these can be asked."""

        async def so() -> bool:
            return {name for name, node in (await self.nodes()).items() if node["ready"]} == set(names)

        await until(so)


def completion(prompt: Sequence[int], tokens: int, **body: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **body}  # fmt: skip


@asynccontextmanager
async def gateway_of(*options: str) -> AsyncIterator[Gate]:
    """Serving; ended by SIGTERM, with status 0."""
    url = f"127.0.0.1:{free_port('127.0.0.1', random.randrange(PORTS_FROM, PORTS_TO))}"
    command = (*GATEWAY_COMMAND, "--http", url, *options)
    process = NodeProcess("gateway-1", "gateway", command, address="", http=f"http://{url}")
    await process.start()
    try:

        async def serves() -> bool:
            assert process.running, list(process.tail)
            return await http_ok(f"{process.http}/health/live")

        await until(serves)
        async with httpx.AsyncClient(
            base_url=process.http, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None)
        ) as web:
            gate = Gate(process, web)
            try:
                yield gate
            except BaseException as e:
                for line in (await gate.told(), *process.tail):
                    e.add_note(line)
                raise
        process.signal(signal.SIGTERM)
        assert await process.wait() == 0, list(process.tail)
    finally:
        process.kill_all()
        await process.wait()
        await process.close()


async def events_of(answer: httpx.Response) -> AsyncIterator[Any]:
    """A stream's events as they come, [DONE] as that string."""
    async for line in answer.aiter_lines():
        if line:
            said = line.removeprefix("data: ")
            yield said if said == "[DONE]" else json.loads(said)
