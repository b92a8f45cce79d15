"""`pd bench interference`: gaps between tokens while long prompts arrive one after the other. Coded engine.

In turns in one run: a decode node with a prefill node beside it, and a node that does both; each idle but for four
answers, and then with long prompts arriving. A token of a prompt takes its time wherever it is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.nodes.cluster import Cluster

from .figures import p99
from .serve import random_prompts

ANSWERS, ANSWER_TOKENS, ANSWER_PROMPT_TOKENS = 4, 200, 64
FIRST_GAPS = 2  # of an answer, not counted: the others are being admitted
AT_ONCE = 2  # long prompts under way at any time: the next one waits already


def run(prompt_tokens: int = 8192, step_ms: float = 20.0, token_us: float = 100.0, turns: int = 5) -> dict[str, Any]:
    """Gaps in ms between tokens of four answers; `ratio`: of the 99th percentile with long prompts to that without."""
    return asyncio.run(_run(prompt_tokens, step_ms, token_us, turns))


async def _run(prompt_tokens: int, step_ms: float, token_us: float, turns: int) -> dict[str, Any]:
    options: dict[str, str | int | float | bool] = {
        "engine": "coded", "coded_layers": 4, "coded_vocab": 4096, "coded_step_ms": step_ms, "coded_token_us": token_us,
        "kv_blocks": 8 * AT_ONCE * (prompt_tokens // 16 + ANSWERS * 32), "max_model_len": prompt_tokens + ANSWER_TOKENS,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(Cluster(1, 1, options=options))
        alone = await stack.enter_async_context(Cluster(0, 0, both=1, options=options))
        sides = [
            Side(name, await stack.enter_async_context(Client(node.address)), prompt_tokens)
            for name, node in (("pd", pair.decode[0]), ("both", alone.both[0]))
        ]
        with Progress(transient=True) as bar:
            for _ in bar.track(range(turns), description="turns"):
                for side in sides:
                    await side.turn()
    return {key: value for side in sides for key, value in side.summary().items()}


class Side:
    """One decode node: its gaps idle and under long prompts."""

    def __init__(self, name: str, client: Client, prompt_tokens: int) -> None:
        self._name, self._client, self._prompt_tokens = name, client, prompt_tokens
        self._idle_ms: list[float] = []
        self._during_ms: list[float] = []
        self._arrived = 0
        self._salts = itertools.count()

    async def turn(self) -> None:
        self._idle_ms += await self._gaps_ms()
        async with self._long_prompts():
            self._during_ms += await self._gaps_ms()

    @asynccontextmanager
    async def _long_prompts(self) -> AsyncIterator[None]:
        """One after the other, AT_ONCE of them under way."""
        tasks = [asyncio.create_task(self._arrive()) for _ in range(AT_ONCE)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _arrive(self) -> None:
        while True:
            (prompt,) = random_prompts(1, self._prompt_tokens, next(self._salts))
            async with self._client.generate(prompt, max_tokens=1, ignore_eos=True) as answer:
                async for _ in answer:
                    self._arrived += 1

    async def _gaps_ms(self) -> list[float]:
        prompts = [random_prompts(1, ANSWER_PROMPT_TOKENS, -1 - next(self._salts))[0] for _ in range(ANSWERS)]
        answers = await asyncio.gather(*map(self._times, prompts))
        return [(b - a) * 1e3 for came in answers for a, b in itertools.pairwise(came[FIRST_GAPS:])]

    async def _times(self, prompt: Any) -> list[float]:
        generation = self._client.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return [time.perf_counter() async for _ in generation]

    def summary(self) -> dict[str, Any]:
        idle, during = (p99(gaps) for gaps in (self._idle_ms, self._during_ms))
        return {
            f"{self._name}_long_prompts": self._arrived,
            f"{self._name}_idle_p50_ms": median(self._idle_ms),
            f"{self._name}_idle_p99_ms": idle,
            f"{self._name}_during_p50_ms": median(self._during_ms),
            f"{self._name}_during_p99_ms": during,
            f"{self._name}_ratio": during / idle,
        }
