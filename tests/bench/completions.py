"""Streamed completions as a client sees them, over a bare connection: what a library would add is not the servers'."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from statistics import median
from typing import NamedTuple

WORDS = (4, 4096)  # token ids of prompts: every model that is measured has these


class Answer(NamedTuple):
    """When it was asked for, and when its tokens came, in most cases one by one; seconds."""

    asked: float
    came: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        return (self.came[0] - self.asked) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in pairwise(self.came)]


class Decoded(NamedTuple):
    """Several answers at the same time, from when all of them had begun."""

    tokens_per_s: float
    itl_ms: float


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(*WORDS), k=tokens) for _ in range(count)]


async def complete(url: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Raises AssertionError for an answer that is not of so many tokens."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = json.dumps({
        "prompt": list(prompt), "max_tokens": max_tokens, "min_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    asked = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    with closing(writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        heard = []
        while line := await reader.readline():
            heard.append((time.perf_counter(), line))
            if line.startswith(b"data: [DONE]"):
                break
    parts = [(at, json.loads(line[6:])) for at, line in heard if line.startswith(b"data: {")]
    came = tuple(at for at, part in parts if part.get("choices"))
    usage = next((part["usage"] for _, part in parts if part.get("usage")), {})
    assert usage.get("completion_tokens") == max_tokens, b"".join(line for _, line in heard)[-800:]
    return Answer(asked, came)


async def ttft_ms(url: str, tokens: int, seed: int) -> float:
    (prompt,) = prompts(1, tokens, seed)
    return (await complete(url, prompt, 1)).ttft_ms


async def decode(url: str, batch: int, prompt_tokens: int, max_tokens: int, seed: int) -> Decoded:
    asked = prompts(batch, prompt_tokens, seed)
    answers = await asyncio.gather(*(complete(url, prompt, max_tokens) for prompt in asked))
    begun, over = max(a.came[0] for a in answers), max(a.came[-1] for a in answers)
    later = sum(at > begun for a in answers for at in a.came)
    return Decoded(later / (over - begun), median(gap for a in answers for gap in a.gaps_ms))
