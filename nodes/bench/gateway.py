"""`pd bench gateway`: what HTTP and the gateway add to the SDK on the node, in turns in one run, coded engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from statistics import median
from typing import Any

from rich.progress import Progress

from pdbus.bus import wire
from pdbus.bus.client import Client
from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import PORTS_FROM, PORTS_TO, Cluster

from .serve import random_prompts

ANSWER_TOKENS = 32
WARM_UPS = 3  # of each kind, not counted
SEED = 0

Ask = Callable[[Sequence[int]], Awaitable[list[float]]]  # when each token came, in seconds since it was asked


def run(prompt_tokens: int = 256, requests: int = 40, step_ms: float = 5.0) -> dict[str, Any]:
    """Medians over `requests`, one after the other; times in ms. `node_http` is the decode node's own HTTP."""
    return asyncio.run(_run(prompt_tokens, requests, step_ms))


async def _run(prompt_tokens: int, requests: int, step_ms: float) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {"engine": "coded", "coded_step_ms": step_ms, "coded_vocab": 4096}
    gateway_port = free_port("127.0.0.1", random.randrange(PORTS_FROM, PORTS_TO))
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(1, 1, options=options, gateway_port=gateway_port))
        client = await stack.enter_async_context(Client(cluster.decode[0].address))
        asks: dict[str, Ask] = {
            "sdk": lambda prompt: _sdk(client, prompt),
            "node_http": lambda prompt: _http(cluster.decode[0].http, prompt),
            "gateway": lambda prompt: _http(cluster.gateway[0].http, prompt),
        }
        came: dict[str, list[list[float]]] = {name: [] for name in asks}
        prompts = random_prompts((WARM_UPS + requests) * len(asks), prompt_tokens, SEED)
        with Progress(transient=True) as bar:
            for i, prompt in enumerate(bar.track(prompts, description="requests")):
                name = list(asks)[(i + i // len(asks)) % len(asks)]
                came[name].append(await asks[name](prompt))
    return _summary({name: times[WARM_UPS:] for name, times in came.items()})


def _summary(came: dict[str, list[list[float]]]) -> dict[str, Any]:
    ttft = {name: median(times[0] for times in all_times) * 1e3 for name, all_times in came.items()}
    itl = {name: median(_gap(times) for times in all_times) * 1e3 for name, all_times in came.items()}
    return {
        "requests": min(map(len, came.values())),
        "gateway_adds_ttft_ms": ttft["gateway"] - ttft["sdk"],
        "gateway_adds_itl_ms": itl["gateway"] - itl["sdk"],
        "node_http_adds_ttft_ms": ttft["node_http"] - ttft["sdk"],
        "node_http_adds_itl_ms": itl["node_http"] - itl["sdk"],
        "ways": [{"way": name, "ttft_ms": ttft[name], "itl_ms": itl[name]} for name in came],
    }


def _gap(times: Sequence[float]) -> float:
    return median(after - before for before, after in itertools.pairwise(times))


async def _sdk(client: Client, prompt: Sequence[int]) -> list[float]:
    began = time.perf_counter()
    generation = client.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return [time.perf_counter() - began async for _ in generation]


async def _http(url: str, prompt: Sequence[int]) -> list[float]:
    return [came for came, _ in await streamed(url, prompt, ANSWER_TOKENS)][:-1]  # the last one says how it ended


async def streamed(url: str, prompt: Sequence[int], tokens: int, **more: Any) -> list[tuple[float, bytes]]:
    """The events of an answer, but for its [DONE]: seconds since it was asked for, and data. A bare client on a
    connection of its own: what a library would add is not ours."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = wire.to_json({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
                         "stream": True, **more})  # fmt: skip
    reader, writer = await asyncio.open_connection(host, int(port))
    with closing(writer):
        began = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        came: list[tuple[float, bytes]] = []
        while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                came.append((time.perf_counter() - began, line.removeprefix(b"data: ")))
    return came
