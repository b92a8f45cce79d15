"""Requests while a fault happens: each checked token by token against what one node would answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping

from pdbus.bus.client import Client, Generation
from pdbus.bus.errors import PdError

from .outcome import Outcome
from tests.live.faults import CHUNK, expected, prompt

DEADLINE_MS = 30_000
HUNG_S = 45.0  # a request that has not ended by then never will
CANCELLED = 0.15  # of the requests, by their client, at some time
PROMPT_TOKENS, ANSWER_TOKENS = 400, 60  # at most
LONG_PROMPT, LONG_ANSWER = 6 * CHUNK + 5, 150  # the one that is brought to a step


class Traffic:
    """All requests around one fault. `clients`: of the decode nodes, by name; `hurt`: the one that dies, if any, whose
    clients may hear of errors."""

    def __init__(self, draw: random.Random, clients: Mapping[str, Client], hurt: Collection[str]) -> None:
        self._draw, self._clients, self._hurt = draw, clients, hurt
        self._salt = draw.getrandbits(60)
        self._asked: list[asyncio.Task[None]] = []
        self._outcome: Outcome | None = None

    def count(self, outcome: Outcome) -> None:
        self._outcome = outcome

    @property
    def under_way(self) -> int:
        return sum(not task.done() for task in self._asked)

    def ask_long(self, node: str) -> None:
        self._ask(node, LONG_PROMPT, LONG_ANSWER, cancel_s=None)

    def ask_some(self, count: int) -> None:
        for _ in range(count):
            draw = self._draw
            node, cancelled = draw.choice(sorted(self._clients)), draw.random() < CANCELLED
            lengths = draw.randrange(1, PROMPT_TOKENS), draw.randrange(1, ANSWER_TOKENS)
            self._ask(node, *lengths, cancel_s=draw.random() / 2 if cancelled else None)

    async def ended(self) -> None:
        """Every request has, or counts as hung."""
        _, hung = await asyncio.wait(self._asked, timeout=HUNG_S)
        for task in hung:
            task.cancel()
        assert self._outcome is not None
        self._outcome.hung += len(hung)
        await asyncio.gather(*self._asked, return_exceptions=True)

    def _ask(self, node: str, length: int, count: int, cancel_s: float | None) -> None:
        self._salt += 1
        asked = prompt(length, self._salt)
        generation = self._clients[node].generate(asked, max_tokens=count, deadline_ms=DEADLINE_MS)
        self._asked.append(asyncio.create_task(self._follow(node, generation, asked, count, cancel_s)))

    async def _follow(
        self, node: str, generation: Generation, asked: list[int], count: int, cancel_s: float | None
    ) -> None:
        problem: PdError | None = None
        try:
            if cancel_s is not None:
                await asyncio.sleep(cancel_s)
                await generation.cancel()
            async for _ in generation:
                pass
        except PdError as e:
            problem = e
        self._judge(node, generation, asked, None if cancel_s is not None else count, problem)

    def _judge(
        self, node: str, generation: Generation, asked: list[int], count: int | None, problem: PdError | None
    ) -> None:
        """`count`: of tokens asked for; None for one that its client has cancelled."""
        outcome, tokens = self._outcome, generation.tokens
        assert outcome is not None
        reason = generation.finished.reason if generation.finished else ""
        if tokens != expected(asked, len(tokens)):
            outcome.wrong += 1
            outcome.problems.append(f"wrong tokens at {node} after {len(asked)} of prompt")
        elif problem is not None and node in self._hurt:
            outcome.failed += 1
        elif problem is not None:
            outcome.unfair += 1
            outcome.problems.append(f"a request at {node}: {problem}")
        elif count is None:
            outcome.cancelled += 1
        elif reason == "length" and len(tokens) == count:
            outcome.right += 1
        else:
            outcome.wrong += 1
            outcome.problems.append(f"{len(tokens)} of {count} tokens at {node}, ended by {reason!r}")
