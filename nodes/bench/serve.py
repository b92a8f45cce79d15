"""`pd bench serve`: the same prompts through P + D and through one node doing both, in turns in one run."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.bus.messages import Timeline
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.models.cache import models_cache

ANSWER_TOKENS = 32
WARM_UPS = 2  # of each kind, not counted: first steps of a new shape, first contact
REST_S = 0.5  # before each request: neither shall start on a core that the other has just heated
SEED = 0


class Timed(NamedTuple):
    """One answer as its client saw it."""

    tokens: list[int]
    ttft_ms: float
    itl_ms: float
    timeline: Timeline


def run(prompt_tokens: int = 512, requests: int = 20, model: str = "") -> dict[str, Any]:
    """Medians over `requests`; times in ms. `first_step_ms` is the decode step within `handover_ms`: it comes after a
    rest, when the weights have left the caches, and is slower than the median step (`itl_ms`). Without `model` the 58M
    random Llama that it writes itself."""
    return asyncio.run(_run(prompt_tokens, requests, model or str(random_model())))


def random_model() -> Path:
    from pdbus.nodes.models.random_llama import write_random_llama

    return write_random_llama(models_cache() / "random-llama-58m", "58m")


async def _run(prompt_tokens: int, requests: int, model: str) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {
        "model": model, "threads": 1, "max_model_len": prompt_tokens + ANSWER_TOKENS, "prefill_chunk": 256,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(Cluster(1, 1, options=options))
        one = await stack.enter_async_context(Cluster(0, 0, both=1, options={**options, "cpus": _first_core()}))
        here = await stack.enter_async_context(Client(pair.decode[0].address))
        there = await stack.enter_async_context(Client(one.both[0].address))
        for prompt in random_prompts(WARM_UPS, prompt_tokens, SEED + 1):
            await _timed(here, prompt), await _timed(there, prompt)
        pairs: list[tuple[Timed, Timed]] = []
        with Progress(transient=True) as bar:
            for prompt in bar.track(random_prompts(requests, prompt_tokens, SEED), description="requests"):
                first, second = (here, there) if len(pairs) % 2 == 0 else (there, here)
                early, late = await _timed(first, prompt), await _timed(second, prompt)
                pairs.append((early, late) if first is here else (late, early))
    return _summary(pairs)


def _first_core() -> int:
    """The prefill node's core: the same thread count on the same core, which is idle while the other answers."""
    return min(os.sched_getaffinity(0))


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Random ids, no two prompts with a block in common."""
    rng = random.Random(seed)
    return [rng.choices(range(4, 4096), k=tokens) for _ in range(count)]


async def _timed(client: Client, prompt: Sequence[int]) -> Timed:
    await asyncio.sleep(REST_S)
    began = time.perf_counter()
    generation = client.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    came: list[float] = []
    async for _ in generation:
        came.append(time.perf_counter())
    assert generation.finished is not None
    gaps = [after - before for before, after in itertools.pairwise(came)]
    return Timed(
        generation.tokens, (came[0] - began) * 1e3, median(gaps) * 1e3 if gaps else 0.0, generation.finished.timeline
    )


def _summary(pairs: Sequence[tuple[Timed, Timed]]) -> dict[str, Any]:
    here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    remote = [t.timeline for t in here if t.timeline.remote]
    ttft, one_node_ttft = median(t.ttft_ms for t in here), median(t.ttft_ms for t in there)
    return {
        "requests": len(pairs),
        "remote": len(remote),
        "ttft_ms": ttft,
        "one_node_ttft_ms": one_node_ttft,
        "ttft_ratio": ttft / one_node_ttft,
        "itl_ms": median(t.itl_ms for t in here),
        "one_node_itl_ms": median(t.itl_ms for t in there),
        "handover_ms": median(t.handover_ns for t in remote) / 1e6 if remote else None,
        "read_ms": median(t.read_ns for t in remote) / 1e6 if remote else None,
        "confirm_ms": median(t.confirm_ns for t in remote) / 1e6 if remote else None,
        "first_step_ms": median(t.first_step_ns for t in remote) / 1e6 if remote else None,
        "mover_ms": median(t.mover_ns for t in remote) / 1e6 if remote else None,
        "tokens_equal": sum(a.tokens == b.tokens for a, b in pairs) == len(pairs),
    }
