"""Requests that share beginnings go where these are cached: more hits than by turns, over real nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from .faults import OPTIONS, B, Site, prompt, scenario, site_of, until
from .gateway_process import Gate, gateway_of

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

GROUPS, EACH = 20, 2
SHARED = 8 * B


@pytest.fixture(scope="module")
def four() -> Iterator[Site]:
    with site_of(2, 2, options=OPTIONS) as site:
        yield site


async def hits(gate: Gate, salt: int) -> int:
    """Cached tokens of a workload: groups that share a beginning, each request with an end of its own, in any order."""
    order = [group for group in range(GROUPS) for _ in range(EACH)]
    random.Random(3).shuffle(order)
    cached = 0
    for number, group in enumerate(order):
        asked = [*prompt(SHARED, salt + group), *prompt(B, salt + 1000 + number)]
        usage = (await gate.right(asked, 2))["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached


@scenario
async def test_prefix_routing_hits_more_than_turns(four: Site) -> None:
    found = {}
    for salt, policy in enumerate(("round-robin", "prefix", "cost")):
        async with gateway_of("--join", four.p.address, "--policy", policy) as gate:
            await gate.sees("decode-1", "decode-2")
            if policy != "round-robin":
                await follows_caches(gate, 10_000 * (salt + 1))
            found[policy] = await hits(gate, 100_000 * (salt + 1))
    most = GROUPS * (EACH - 1) * SHARED
    assert found["prefix"] >= 1.5 * found["round-robin"], found
    assert found["cost"] >= 1.5 * found["round-robin"], found
    assert found["prefix"] <= most


async def follows_caches(gate: Gate, salt: int) -> None:
    """Both nodes have something cached, and the gateway knows."""
    for i in range(2):
        await asyncio.gather(*(gate.right(prompt(2 * B, salt + 10 * i + k), 40) for k in range(4)))

    async def so() -> bool:
        return all(node["cached_blocks"] for node in (await gate.nodes()).values() if node["ready"])

    await until(so)
