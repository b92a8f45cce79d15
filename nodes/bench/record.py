"""`pd bench record`: the same requests through two pairs of nodes, one of which records, in turns in one run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import descendants

from .figures import cpu_seconds, p99
from .serve import random_prompts

PROMPT_TOKENS, ANSWER_TOKENS = 256, 32
AT_ONCE = 16
REST_S = 0.5  # before each turn: neither shall start on a core that the other has just heated
WARM_UP_REQUESTS = 32


class Turn(NamedTuple):
    """All requests of one turn."""

    tokens_per_s: float
    cpu_us: float  # of all processes of both nodes, for each token
    requests_ms: list[float]
    ttft_ms: list[float]


Side = tuple[Client, Cluster]  # who asks, and whose CPU time counts


def run(pairs: int = 10, requests: int = 200, step_ms: float = 0.0) -> dict[str, Any]:
    """Turns of `requests` each, with the coded engine, whose steps take `step_ms`: with none, control is all that there
    is to slow down. `throughput_cost` is the median over the pairs of turns of what recording takes from tokens a
    second, as a share; `cpu_cost` of what it adds to the nodes' CPU time, which says more on a busy machine.
    Percentiles are over all requests."""
    return asyncio.run(_run(pairs, requests, step_ms))


async def _run(pairs: int, requests: int, step_ms: float) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {
        "engine": "coded", "kv_blocks": 4096, "coded_step_ms": step_ms, "coded_vocab": 4096,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = await stack.enter_async_context(Cluster(1, 1, options=options))
        recorded = await stack.enter_async_context(Cluster(1, 1, options={**options, "record": str(folder)}))
        without = await stack.enter_async_context(Client(plain.decode[0].address))
        with_ = await stack.enter_async_context(Client(recorded.decode[0].address))
        return _summary(await take_turns((without, plain), (with_, recorded), pairs, requests))


async def take_turns(one: Side, other: Side, pairs: int, requests: int) -> list[tuple[Turn, Turn]]:
    """So many pairs of turns; who is first in a pair changes."""
    for side in (one, other):
        await _turn(*side, WARM_UP_REQUESTS, seed=-1)
    turns: list[tuple[Turn, Turn]] = []
    with Progress(transient=True) as bar:
        for number in bar.track(range(pairs), description="pairs"):
            first, second = (one, other) if number % 2 == 0 else (other, one)
            early, late = [await _turn(*side, requests, number) for side in (first, second)]
            turns.append((early, late) if first is one else (late, early))
    return turns


async def _turn(client: Client, cluster: Cluster, requests: int, seed: int) -> Turn:
    """`AT_ONCE` at a time; no prompt has a block in common with another."""
    await asyncio.sleep(REST_S)
    gate = asyncio.Semaphore(AT_ONCE)
    timed: list[tuple[float, float, int]] = []

    async def ask(prompt: Sequence[int]) -> None:
        async with gate:
            began, first = time.perf_counter(), 0.0
            generation = client.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            async for _ in generation:
                first = first or time.perf_counter()
            ended = time.perf_counter()
        timed.append(((ended - began) * 1e3, (first - began) * 1e3, len(generation.tokens)))

    began, cpu_s = time.perf_counter(), _cpu_seconds(cluster)
    await asyncio.gather(*map(ask, random_prompts(requests, PROMPT_TOKENS, seed)))
    took_s = time.perf_counter() - began
    tokens = sum(count for *_, count in timed)
    cpu_us = (_cpu_seconds(cluster) - cpu_s) / tokens * 1e6
    return Turn(tokens / took_s, cpu_us, [t[0] for t in timed], [t[1] for t in timed])


def _cpu_seconds(cluster: Cluster) -> float:
    """What all processes of the nodes have used so far."""
    return sum(cpu_seconds(pid) for node in cluster.nodes for pid in (node.pid, *descendants(node.pid)))


def _summary(turns: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    plain, recorded = [pair[0] for pair in turns], [pair[1] for pair in turns]
    costs = sorted(1 - there.tokens_per_s / here.tokens_per_s for here, there in turns)
    cpu_costs = sorted(there.cpu_us / here.cpu_us - 1 for here, there in turns)
    return {
        "pairs": len(turns),
        "requests": sum(len(turn.requests_ms) for turn in recorded),
        "tokens_per_s": median(turn.tokens_per_s for turn in plain),
        "recorded_tokens_per_s": median(turn.tokens_per_s for turn in recorded),
        "throughput_cost": median(costs),
        "throughput_cost_least": costs[0],
        "throughput_cost_most": costs[-1],
        "cpu_us_per_token": median(turn.cpu_us for turn in plain),
        "recorded_cpu_us_per_token": median(turn.cpu_us for turn in recorded),
        "cpu_cost": median(cpu_costs),
        "cpu_cost_least": cpu_costs[0],
        "cpu_cost_most": cpu_costs[-1],
        **_latencies("", plain),
        **_latencies("recorded_", recorded),
    }


def _latencies(prefix: str, turns: Sequence[Turn]) -> dict[str, float]:
    """Medians and 99th percentiles over all requests."""
    found: dict[str, float] = {}
    for name in ("requests_ms", "ttft_ms"):
        values = [value for turn in turns for value in getattr(turn, name)]
        found[f"{prefix}{name.removeprefix('requests_')}_p50"] = median(values)
        found[f"{prefix}{name.removeprefix('requests_')}_p99"] = p99(values)
    return found
