"""`pd bench http`: what many streaming clients do to the bus, and how many tokens a core streams. Coded engine.

In turns in one run: nobody, clients at the decode node's HTTP, clients at the gateway. In each the round trips of a
small message with the decode node's control are measured, and in the latter two the CPU time of the process that
streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.progress import Progress

from pdbus.bus.endpoint import Endpoint
from pdbus.bus.errors import Broken
from pdbus.bus.messages import Ledger, LedgerReply
from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import PORTS_FROM, PORTS_TO, Cluster
from pdbus.nodes.node_process import NodeProcess, descendants

from .figures import cpu_seconds, p99

TURN_S = 3.0
EVERY_S = 0.005  # a round trip: often enough to meet a delay, too seldom to be a load
ANSWER_S = 5.0


def run(clients: int = 16, step_ms: float = 20.0, turns: int = 5) -> dict[str, Any]:
    """Round trips in ms; `moved`: the 99th percentile with clients less that without. `tokens_per_core_s`: tokens sent
    for each second of CPU time of the process that sends them."""
    result: dict[str, Any] = uvloop.run(_run(clients, step_ms, turns))
    return result


async def _run(clients: int, step_ms: float, turns: int) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {"engine": "coded", "coded_step_ms": step_ms, "coded_vocab": 4096}
    port = free_port("127.0.0.1", random.randrange(PORTS_FROM, PORTS_TO))
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(1, 1, options=options, gateway_port=port))
        bus = stack.enter_context(contextlib.closing(Bus(cluster.decode[0].address)))
        quiet: list[float] = []
        ways = [
            Way("node", cluster.decode[0].http, _http_pid(cluster.decode[0]), clients),
            Way("gateway", cluster.gateway[0].http, cluster.gateway[0].pid, clients),
        ]
        with Progress(transient=True) as bar:
            for _ in bar.track(range(turns), description="turns"):
                for way in ways:
                    quiet += await bus.trips()
                    await way.turn(bus)
    return _summary(clients, quiet, ways)


class Bus:
    """A link of its own to a node's control."""

    def __init__(self, address: str) -> None:
        self._endpoint = Endpoint("bench", os.urandom(16), lambda _: None)
        self._link = self._endpoint.connect(address)

    async def trips(self) -> list[float]:
        """Milliseconds of each, for TURN_S."""
        took = []
        end = time.perf_counter() + TURN_S
        while (began := time.perf_counter()) < end:
            await self._endpoint.request(self._link, Ledger(), LedgerReply, ANSWER_S)
            took.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(EVERY_S)
        return took

    def close(self) -> None:
        self._endpoint.close()


class Way:
    """Clients at one address, and the process that answers there."""

    def __init__(self, name: str, url: str, pid: int, clients: int) -> None:
        self.name = name
        self.trips: list[float] = []
        self.tokens = self.failed = 0
        self.cpu_s = self.wall_s = 0.0
        self._url, self._pid, self._clients = url, pid, clients

    async def turn(self, bus: Bus) -> None:
        cpu_s, began = cpu_seconds(self._pid), time.perf_counter()
        async with _busy(self._url, self._clients) as process:
            self.trips += await bus.trips()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            tokens, failed = map(int, (await process.stdout.readline()).split())
        self.wall_s += time.perf_counter() - began
        self.cpu_s += cpu_seconds(self._pid) - cpu_s
        self.tokens += tokens
        self.failed += failed


@asynccontextmanager
async def _busy(url: str, clients: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """All clients are being answered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdbus.nodes.bench.busy_clients", url, str(clients),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"busy\n":
            raise Broken("the clients could not begin")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _http_pid(node: NodeProcess) -> int:
    for pid in descendants(node.pid):
        if b"nodes.http.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise Broken(f"{node.name} has no HTTP process")


def _summary(clients: int, quiet: list[float], ways: list[Way]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "clients": clients,
        "quiet_p50_ms": median(quiet),
        "quiet_p99_ms": p99(quiet),
        "failed": sum(way.failed for way in ways),
    }
    for way in ways:
        said |= {
            f"{way.name}_p50_ms": median(way.trips),
            f"{way.name}_p99_ms": p99(way.trips),
            f"{way.name}_moved_p99_ms": p99(way.trips) - p99(quiet),
            f"{way.name}_tokens_per_s": way.tokens / way.wall_s,
            f"{way.name}_tokens_per_core_s": way.tokens / way.cpu_s,
        }
    return said
