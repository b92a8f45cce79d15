"""`pd bench routing`: prompts that share beginnings over two prefill and two decode nodes, through one gateway by turns
and one by prefix, in turns in one run. Coded engine. What is nearly all cached on the decode node is computed there
(`--prefill-policy auto`): to send it away would make nothing of the hit.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

from rich.progress import Progress

from pdbus.bus.errors import Broken
from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import GATEWAY_COMMAND, PORTS_FROM, PORTS_TO, Cluster, http_ok
from pdbus.nodes.node_process import NodeProcess

from .gateway import streamed
from .serve import random_prompts

POLICIES = ("round-robin", "prefix")
SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 1024, 32, 2
GROUPS, EACH = 8, 3  # beginnings of a turn, and prompts with each: by turns most come where theirs is not cached
READY_S, LOOK_S = 30.0, 0.1
SEED = 0


class Answered(NamedTuple):
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


def run(turns: int = 5, step_ms: float = 20.0) -> dict[str, Any]:
    """For each policy the share of the prompts' tokens that were cached on the decode node, and the median time to the
    first token, in ms. `hits_ratio`: of prefix to round-robin."""
    return asyncio.run(_run(turns, step_ms))


async def _run(turns: int, step_ms: float) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {
        "engine": "coded", "coded_step_ms": step_ms, "coded_vocab": 4096, "kv_blocks": 16_384, "prefill_chunk": 256,
        "prefill_policy": "auto",
    }  # fmt: skip
    found: dict[str, list[Answered]] = {policy: [] for policy in POLICIES}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(2, 2, options=options))
        urls = {policy: await stack.enter_async_context(_gateway(cluster, policy)) for policy in POLICIES}
        with Progress(transient=True) as bar:
            for turn in bar.track(range(turns), description="turns"):
                for place, policy in enumerate(POLICIES):
                    for prompt in _prompts(turn * len(POLICIES) + place):
                        found[policy].append(await _ask(urls[policy], prompt))
    return _summary(found)


def _prompts(number: int) -> list[list[int]]:
    """Of one turn, in any order; no beginning is another turn's."""
    shared = random_prompts(GROUPS, SHARED_TOKENS, SEED + 2 * number)
    own = random_prompts(GROUPS * EACH, OWN_TOKENS, SEED + 2 * number + 1)
    prompts = [[*shared[i % GROUPS], *end] for i, end in enumerate(own)]
    random.Random(number).shuffle(prompts)
    return prompts


@asynccontextmanager
async def _gateway(cluster: Cluster, policy: str) -> AsyncIterator[str]:
    """Its URL, once it serves."""
    at = f"127.0.0.1:{free_port('127.0.0.1', random.randrange(PORTS_FROM, PORTS_TO))}"
    command = (*GATEWAY_COMMAND, "--http", at, "--join", cluster.decode[0].address, "--policy", policy)
    process = NodeProcess(f"gateway-{policy}", "gateway", command, address="", http=f"http://{at}")
    await process.start()
    try:
        due_s = time.monotonic() + READY_S
        while not await http_ok(f"{process.http}/health/ready"):
            if time.monotonic() > due_s or not process.running:
                raise Broken(f"the gateway does not serve: {' '.join(process.tail)}")
            await asyncio.sleep(LOOK_S)
        yield process.http
    finally:
        process.kill_all()
        await process.wait()
        await process.close()


async def _ask(url: str, prompt: Sequence[int]) -> Answered:
    came = await streamed(url, prompt, ANSWER_TOKENS, stream_options={"include_usage": True})
    usage = json.loads(came[-1][1]).get("usage") if came else None
    if not usage:
        raise Broken(f"the gateway did not answer in full: {came[-1:]!r:.200}")
    return Answered(came[0][0] * 1e3, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _summary(found: dict[str, list[Answered]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "policy": policy,
            "requests": len(answers),
            "hits": sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
            "ttft_p50_ms": median(a.ttft_ms for a in answers),
        }
        for policy, answers in found.items()
    ]
    by_turns, by_prefix = rows
    return {
        "hits_ratio": by_prefix["hits"] / by_turns["hits"],
        "ttft_p50_ratio": by_prefix["ttft_p50_ms"] / by_turns["ttft_p50_ms"],
        "policies": rows,
    }
