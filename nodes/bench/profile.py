"""`pd bench profile`: what steps, reads and messages take on this machine, as a profile to simulate with.

A prefill and a decode node run here as they would anywhere, and record. Prompts of many lengths come one by one, then
ever more answers are decoded together, upon short contexts and upon long ones. What their recordings say that steps,
reads and messages took becomes the profile; what a client waited beyond its node's own word is added.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.bus.errors import ConfigError
from pdbus.bus.generation import Generation
from pdbus.bus.wire import replace, to_plain
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.replay.simulate.profile import Profile, save_profile
from pdbus.nodes.replay.simulate.recorded import RecordedCluster

from .serve import random_model

SHORTEST = 16  # tokens of a prompt
LONGEST = 2048
ROWS = 16  # decoded together at most
REPEAT = 5  # of each prompt
TOKENS = 24  # that all rows decode together, of each kind
NS_PER_MS = 1_000_000
SEED = 0
ID_RANGE = range(5, 256)  # of every vocabulary here, without its special tokens


def run(
    out: str, settings: Mapping[str, str], *, longest: int = LONGEST, rows: int = ROWS, repeat: int = REPEAT
) -> dict[str, Any]:
    """Measures, writes the profile to `out`, returns it. Without a model, the 58M random Llama. Raises ConfigError."""
    path = Path(out)
    if path.exists() and path.is_dir():
        raise ConfigError("--out", f"{path} is a folder; give a file")
    options: dict[str, str | int | float | bool] = {"threads": 1, **settings}
    if options.get("engine", "torch") == "torch":
        options.setdefault("model", str(random_model()))
    profile = replace(asyncio.run(_measure(options, longest, rows, repeat)), name=path.stem)
    save_profile(profile, path)
    return {**to_plain(profile), "prefill": _rows("tokens", profile.prefill), "decode": _rows("rows", profile.decode)}


def _rows(size: str, lines: Sequence[tuple[float, float, float]]) -> list[dict[str, float]]:
    return [{size: line[0], "ms": line[1], "ms_per_1k_context": line[2]} for line in lines]


async def _measure(options: Mapping[str, str | int | float | bool], longest: int, rows: int, repeat: int) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(Cluster(1, 1, options={**options, "record": folder}))
            client = await stack.enter_async_context(Client(cluster.decode[0].address))
            says = await client.status()
            longest = min(longest, says["max_model_len"] // 2)
            beyond_ms = await _Pattern(client, longest, min(rows, int(options.get("max_running", rows)))).play(repeat)
        profile = RecordedCluster(Path(folder)).profile("")
    return replace(
        profile,
        source=f"{profile.source} of {says['model']} with {says['engine']} on one machine, two nodes",
        request_ms=round(beyond_ms, 4),
    )


class _Pattern:
    """What is asked, in which order."""

    def __init__(self, client: Client, longest: int, rows: int) -> None:
        self._client = client
        self._longest = longest
        self._rows = rows
        self._random = random.Random(SEED)

    async def play(self, repeat: int) -> float:
        """Returns the ms that a client waits for a first token beyond what the node's timeline says."""
        lengths, batches = list(_doubling(SHORTEST, self._longest)), list(_doubling(1, self._rows))
        contexts = (SHORTEST, self._longest)
        with Progress(transient=True) as bar:
            task = bar.add_task("measuring", total=len(lengths) * (repeat + 1) + len(batches) * len(contexts))
            beyond = []
            for length in lengths:
                for number in range(repeat + 1):
                    waited = await self._one(length)
                    beyond += [waited] if number else []  # the first one of a length warms up
                    bar.advance(task)
            for batch in batches:
                for context in contexts:
                    await self._together(batch, context)
                    bar.advance(task)
        return max(0.0, median(beyond))

    def _ask(self, length: int, tokens: int) -> Generation:
        prompt = self._random.choices(ID_RANGE, k=length)
        return self._client.generate(prompt, max_tokens=tokens, ignore_eos=True)

    async def _one(self, length: int) -> float:
        generation = self._ask(length, 4)
        began = time.perf_counter_ns()
        first_ns = 0
        async for _ in generation:
            first_ns = first_ns or time.perf_counter_ns() - began
        assert generation.finished is not None
        return (first_ns - generation.finished.timeline.ttft_ns) / NS_PER_MS

    async def _together(self, count: int, length: int) -> None:
        """Until the last one to begin has decoded enough; then nobody needs the rest."""
        generations = [self._ask(length, self._longest) for _ in range(count)]
        running = asyncio.Event()
        left = count

        async def read(generation: Generation) -> None:
            nonlocal left
            async for _ in generation:
                if len(generation.tokens) == 2:
                    left -= 1
                if not left and not running.is_set():
                    running.set()

        tasks = [asyncio.create_task(read(generation)) for generation in generations]
        await asyncio.wait([asyncio.create_task(running.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
        target = min(len(g.tokens) for g in generations) + TOKENS
        while not all(task.done() for task in tasks) and min(len(g.tokens) for g in generations) < target:
            await asyncio.wait(tasks, timeout=0.02)
        for generation in generations:
            await generation.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            task.exception()


def _doubling(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last
