"""A load for people: while it runs, and what it showed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from ..tables import output, pairs, table
from .load_request import BIN_NS
from .load_run import LoadRun

REFRESH_S = 0.25
RATE_BINS = 30  # three seconds of tokens, for the present rate
LATENCIES = {
    "lateness_ms": "late",
    "ttft_ms": "first token, from sent",
    "ttft_from_scheduled_ms": "first token, from scheduled",
    "itl_ms": "between tokens",
    "latency_ms": "whole answer, from sent",
    "latency_from_scheduled_ms": "whole answer, from scheduled",
}


@asynccontextmanager
async def live_view(run: LoadRun) -> AsyncIterator[None]:
    """A bar and the present figures on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    progress = Progress(BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), expand=True)
    task = progress.add_task("", total=len(run.workload.requests))
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def refresh() -> None:
            while True:
                progress.update(task, completed=run.meter.completed + run.meter.failed)
                live.update(Group(progress, Text(now_line(run))), refresh=True)
                await asyncio.sleep(REFRESH_S)

        refreshing = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refreshing.cancel()
            await asyncio.wait([refreshing])


def now_line(run: LoadRun) -> str:
    """How it stands."""
    meter = run.meter
    present = meter.now() // BIN_NS
    tokens = sum(meter.tokens_by_bin[b] for b in range(present - RATE_BINS, present))
    parts = [
        f"{meter.in_flight} in flight, {meter.failed} failed",
        f"{meter.lateness_ns / 1e6:.1f} ms late",
        f"{tokens / RATE_BINS / (BIN_NS / 1e9):.0f} tokens/s",
    ]
    if meter.recent_ttft_ms:
        parts.append(f"TTFT {median(meter.recent_ttft_ms):.0f} ms")
    if meter.prompt_tokens:
        parts.append(f"{meter.cached_tokens / meter.prompt_tokens:.1%} cached")
    return " · ".join(parts)


def show(result: Mapping[str, Any]) -> None:
    """Prints the figures on standard output."""
    console = output()
    console.print(pairs(headlines(result)))
    console.print()
    console.print(table(latency_rows(result)))
    if len(result["nodes"]) > 1:
        console.print()
        console.print(table(result["nodes"]))
    if result["failures"]:
        console.print(Text("\nfailures", style="bold red"))
        console.print(table(result["failures"]))


def headlines(result: Mapping[str, Any]) -> dict[str, str]:
    r = result
    rest = f", {r['not_played']:,} not due before it ended" if r["not_played"] else ""
    per_s = f"{r['prompt_tokens_per_s']:,.0f} prompt tokens, {r['answer_tokens_per_s']:,.0f} answer tokens"
    return {
        "played": played_as(r["shape"]),
        "requests": f"{r['requests']:,}: {r['completed']:,} completed, {r['failed']:,} failed{rest}",
        "time": f"{r['wall_s']:.1f} s; the last one was scheduled at {r['scheduled_s']:.1f} s",
        "a second": f"{r['requests_per_s']:.2f} requests, {per_s}",
        "prefix hits": f"{r['hit_rate']:.1%} of prompt tokens; the best possible is {r['best_hit_rate']:.1%}",
        "hand-offs": f"{r['remote']:,} prompts read from a prefill node",
    }


def played_as(shape: Mapping[str, Any]) -> str:
    """How the workload was changed."""
    parts = [
        f"{shape['speed']:g} times as fast" if shape["speed"] != 1 else "at its own pace",
        f"{shape['scale_tokens']:.4g} times the tokens" if shape["scale_tokens"] != 1 else "",
        "ticks spread" if shape["dequantise"] else "",
        f"seed {shape['seed']}",
    ]
    return ", ".join(part for part in parts if part)


def latency_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds."""
    rows = []
    for key, name in LATENCIES.items():
        values = {part: round(value, 2) for part, value in result[key].items() if part != "count"}
        rows.append({"ms": name, "count": result[key]["count"], **values})
    return rows
