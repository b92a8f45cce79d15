"""A real model's worker is killed in mid-answer: what is computed again is bitwise what it was."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from pdbus.bus.client import Client

from .conftest import Live, answer
from .faults import pids_of

pytestmark = [pytest.mark.live, pytest.mark.long]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("child", ["worker", "mover"])
def test_an_answer_goes_on_where_it_was(deterministic: Live, child: str, sampling: dict[str, Any]) -> None:
    asked = random.Random(child).choices(range(4, 256), k=90)
    options = {"max_tokens": 80, "ignore_eos": True, **sampling}

    async def killed_on_the_way(client: Client) -> list[int]:
        pids = await pids_of(client)
        generation = client.generate(asked, **options)
        async for _ in generation:
            if len(generation.tokens) == 20:
                os.kill(pids[child], signal.SIGKILL)
        return generation.tokens

    here = deterministic.ask(deterministic.decode, killed_on_the_way)
    there = deterministic.ask(deterministic.oracle, lambda client: answer(client, asked, **options))
    assert here == there.tokens
    deterministic.ask(deterministic.decode, pids_of)
