"""`pd bench smooth`: what a very long hand-off does to the answers that the decode node is giving meanwhile.

Two prompts lie ready in the prefill node's prefix cache, so that all of one is announced, and read, at once. No two of
their blocks there are neighbours: every other block of that node has been used more lately (`_scatter`). The decode
node has room for one of them, so that in turns each is read again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken
from pdbus.bus.generation import Generation
from pdbus.bus.recording import read
from pdbus.nodes import events as ev
from pdbus.nodes.cluster import Cluster, Options
from pdbus.nodes.replay.rerun import recorded
from pdbus.nodes.replay.turns import Hole, turns_of

from .figures import p99
from .serve import random_prompts

BLOCK_TOKENS = 16
ANSWERS, ANSWER_TOKENS = 4, 200
ANSWER_PROMPT_TOKENS = 64
BEFORE_S = 0.5  # the answers go on for so long before the long prompt comes
ANSWERS_BLOCKS = 64  # for all answers, with room to spare
PROMPTS = 2
POOL = 2 * PROMPTS  # times what a prompt needs, in the prefill node: every second block
TOGETHER = 16  # of the prompts that are asked for again
SEED = 0


class Gap(NamedTuple):
    """Between two tokens of an answer, by the clock of this machine."""

    before_ns: int
    after_ns: int


class LongRead(NamedTuple):
    """`runs`: how many its blocks make, neighbours merged."""

    began_ns: int
    ended_ns: int
    runs: int


def run(prompt_tokens: int = 100_000, step_ms: float = 20.0, turns: int = 10) -> dict[str, Any]:
    """Gaps between tokens of four answers of coded KV (2 KiB a token): in `turns` without a read, and in as many with
    one, those that the read overlaps. `runs`: how many its blocks make, neighbours merged; times in ms."""
    return asyncio.run(_run(prompt_tokens, step_ms, turns))


async def _run(prompt_tokens: int, step_ms: float, turns: int) -> dict[str, Any]:
    needed = -(-prompt_tokens // BLOCK_TOKENS) + ANSWERS_BLOCKS
    options: dict[str, str | int | float | bool] = {
        "engine": "coded", "coded_layers": 8, "coded_vocab": 4096, "block_size": BLOCK_TOKENS,
        "kv_blocks": POOL * needed, "max_model_len": prompt_tokens + ANSWER_TOKENS,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slow: Options = {"coded_step_ms": step_ms, "kv_blocks": needed + ANSWERS_BLOCKS, "record": str(folder)}
        cluster = await stack.enter_async_context(Cluster(0, 1, both=1, options=options, role_options={"decode": slow}))
        here = await stack.enter_async_context(Client(cluster.decode[0].address))
        there = await stack.enter_async_context(Client(cluster.both[0].address))
        await _scatter(there, POOL * needed)
        alone: list[Gap] = []
        beside: list[Gap] = []
        with Progress(transient=True) as bar:
            prompts = itertools.cycle(random_prompts(PROMPTS, prompt_tokens, SEED))
            for prompt in bar.track(itertools.islice(prompts, turns), total=turns, description="turns"):
                await _all_of(there.generate(prompt, max_tokens=1))
                alone += await _gaps(here, None)
                beside += await _gaps(here, prompt)
        await cluster.stop()  # the recording is whole
        reads = _reads(folder, prompt_tokens // 2)
    return _summary(alone, beside, reads)


async def _scatter(client: Client, blocks: int) -> None:
    """Fill a node's prefix cache with prompts of one full block, and ask for every second again: what is evicted next
    has no neighbours."""
    prompts = random_prompts(blocks, BLOCK_TOKENS + 1, SEED + 1)
    for prompt in prompts:  # one after the other: blocks in the order of the prompts
        await _all_of(client.generate(prompt, max_tokens=1, ignore_eos=True))
    again = prompts[::2]
    for i in range(0, len(again), TOGETHER):
        some = [client.generate(prompt, max_tokens=1, ignore_eos=True) for prompt in again[i : i + TOGETHER]]
        await asyncio.gather(*map(_all_of, some))


async def _all_of(generation: Generation) -> None:
    async for _ in generation:
        pass


async def _gaps(client: Client, long_prompt: Sequence[int] | None) -> list[Gap]:
    """Between tokens of the answers. A long prompt comes into the midst of them and leaves with its first token."""
    prompts = random_prompts(ANSWERS, ANSWER_PROMPT_TOKENS, random.randrange(1 << 30))
    answers = [asyncio.create_task(_times(client, prompt)) for prompt in prompts]
    if long_prompt is not None:
        await asyncio.sleep(BEFORE_S)
        generation = client.generate(long_prompt, max_tokens=2, ignore_eos=True)
        await anext(generation)
        await generation.cancel()
    return [Gap(a, b) for came in await asyncio.gather(*answers) for a, b in itertools.pairwise(came)]


async def _times(client: Client, prompt: Sequence[int]) -> list[int]:
    return [time.monotonic_ns() async for _ in client.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)]


def _reads(folder: Path, tokens_min: int) -> list[LongRead]:
    """What the decode node recorded of them, from being asked for to their end."""
    found: list[LongRead] = []
    begun: dict[int, LongRead] = {}
    for raw in turns_of(read(next(folder.glob("decode-*")))):
        if isinstance(raw, Hole):
            break
        turn = recorded(raw)
        for effect in turn.effects:
            if isinstance(effect, ev.StartRead) and effect.end - effect.begin >= tokens_min:
                begun[effect.read] = LongRead(turn.now_ns, 0, _runs(effect.source, effect.target))
        if isinstance(turn.event, ev.ReadEnded) and turn.event.read in begun:
            found.append(begun.pop(turn.event.read)._replace(ended_ns=turn.now_ns))
    return found


def _runs(source: Sequence[int], target: Sequence[int]) -> int:
    """With one run a block, neighbours on both sides merged."""
    order = np.argsort(source)
    steps = [np.diff(np.asarray(blocks)[order]) for blocks in (source, target)]
    return int(1 + np.count_nonzero((steps[0] != 1) | (steps[1] != 1)))


def _summary(alone: Sequence[Gap], beside: Sequence[Gap], reads: Sequence[LongRead]) -> dict[str, Any]:
    if not reads:
        raise Broken("no long prompt was read from the other node")
    during = [gap for gap in beside if any(r.began_ns < gap.after_ns and gap.before_ns < r.ended_ns for r in reads)]
    figures: dict[str, Any] = {
        "reads": len(reads),
        "runs": median(r.runs for r in reads),
        "read_ms": median(r.ended_ns - r.began_ns for r in reads) / 1e6,
    }
    for name, gaps in (("alone", alone), ("during", during)):
        took_ms = [(gap.after_ns - gap.before_ns) / 1e6 for gap in gaps]
        figures |= {f"{name}_gaps": len(gaps), f"{name}_p50_ms": median(took_ms), f"{name}_p99_ms": p99(took_ms)}
        figures[f"{name}_max_ms"] = max(took_ms)
    figures["p99_ratio"] = figures["during_p99_ms"] / figures["alone_p99_ms"]
    return figures
