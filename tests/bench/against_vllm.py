"""`python -m tests.bench.against_vllm`: vLLM alone, vLLM pairs with two connectors, and our engine, through HTTP.

Sides take turns, each with processes that were started for its turn, since a server that waits may still take a core.
Only ratios within one run mean anything; docs/benchmarks.md says what is measured and how it came out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from pdbus.nodes.bench.serve import random_model
from pdbus.nodes.tables import output

from .completions import complete, decode, prompts, ttft_ms
from .sides import SIDES, Setup, Up

PROMPTS = (128, 512, 1024)  # tokens
BATCHES = (1, 4, 8)
DECODED = (32, 64)  # tokens of a prompt and of its answer, where decoding is measured
CONTACTS = 3
TTFT_TURNS, DECODE_TURNS = 4, 2  # of each in a round

Figures = dict[str, list[float]]
Measure = Callable[[Up, int], Awaitable[Figures]]


async def warm_up(up: Up, seed: int) -> None:
    """Every shape once: first steps are slow. A first contact between two servers may fail on a busy machine."""
    for tokens in (*[PROMPTS[0]] * CONTACTS, *PROMPTS):
        (prompt,) = prompts(1, tokens, seed + tokens)
        with contextlib.suppress(AssertionError):
            await complete(up.url, prompt, 4)
    await decode(up.url, max(BATCHES), DECODED[0], 8, seed)


async def measure_ttft(up: Up, seed: int) -> Figures:
    found: Figures = {}
    for turn in range(TTFT_TURNS):
        for tokens in PROMPTS:
            took = await ttft_ms(up.url, tokens, seed + 10 * turn + tokens)
            found.setdefault(f"ttft_ms {tokens}", []).append(took)
    return found


async def measure_decoding(up: Up, seed: int) -> Figures:
    found: Figures = {}
    for turn in range(DECODE_TURNS):
        for batch in BATCHES:
            decoded = await decode(up.url, batch, *DECODED, seed + 1000 * turn + batch)
            found.setdefault(f"tokens_per_s {batch}", []).append(decoded.tokens_per_s)
            found.setdefault(f"itl_ms {batch}", []).append(decoded.itl_ms)
    return found


MEASURES: tuple[Measure, ...] = (measure_ttft, measure_decoding)


async def run(
    setup: Setup, names: Sequence[str], rounds: int, measures: Sequence[Measure] = MEASURES
) -> dict[str, Figures]:
    """All that was measured, by side and figure."""
    found: dict[str, Figures] = {name: {} for name in names}
    for number in range(rounds):
        for name in names:
            began = time.perf_counter()
            async with SIDES[name](setup) as up:
                new = {"start_s": [time.perf_counter() - began]}
                await warm_up(up, 7 + 100_000 * number)
                for measure in measures:
                    new |= await measure(up, 50_000 + 100_000 * number)
                new["memory_mib"] = [up.memory_bytes() / 2**20]
            for key, values in new.items():
                found[name].setdefault(key, []).extend(values)
            print(f"round {number + 1}, {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return found


def medians(found: dict[str, Figures]) -> dict[str, dict[str, float]]:
    return {name: {key: median(values) for key, values in figures.items()} for name, figures in found.items()}


def show(result: dict[str, dict[str, float]]) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    for name in result:
        table.add_column(name, justify="right")
    for key in dict.fromkeys(key for figures in result.values() for key in figures):
        table.add_row(key, *(_number(figures.get(key)) for figures in result.values()))
    output().print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def arguments(words: Sequence[str] | None = None) -> tuple[Setup, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="against_vllm", description=__doc__, allow_abbrev=False)
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="the Python that vLLM is installed for")
    parser.add_argument("--model", default="", help="a folder; else a random Llama of 58M parameters")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", default=",".join(SIDES), help="which, and in which order")
    parser.add_argument("--preload", default="", help="libraries for vLLM's processes, with colons between")
    parser.add_argument("--eager", action="store_true", help="vLLM without compiling")
    parser.add_argument("--logs", type=Path, help="a folder; else a new one")
    parser.add_argument("--json", action="store_true", help="every single figure")
    given = parser.parse_args(words)
    given.names = given.sides.split(",")
    if unknown := [name for name in given.names if name not in SIDES]:
        parser.error(f"--sides: {unknown[0]} is none of {', '.join(SIDES)}")
    if not Path(given.vllm).exists():
        parser.error(f"--vllm: {given.vllm} is not there: make vllm")
    logs = given.logs or Path(tempfile.mkdtemp(prefix="against-vllm-"))
    logs.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        given.model or str(random_model()), str(Path(given.vllm).absolute()), logs, given.preload, given.eager
    )
    return setup, given


def main() -> None:
    setup, given = arguments()
    found = asyncio.run(run(setup, given.names, given.rounds))
    result: Any = {"sides": found, "medians": medians(found)}
    print(json.dumps(result, indent=1)) if given.json else show(result["medians"])


if __name__ == "__main__":
    main()
