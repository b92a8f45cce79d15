"""A simulation for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ...tables import output, pairs, table

LATENCIES = {"ttft_ms": "first token", "itl_ms": "between tokens", "latency_ms": "whole answer"}


def show(result: Mapping[str, Any]) -> None:
    """Prints the figures on standard output."""
    console = output()
    console.print(pairs(headlines(result)))
    console.print()
    console.print(table([{"ms": name, **result[key]} for key, name in LATENCIES.items()]))
    if result["failures"]:
        console.print(Text("\nfailures", style="bold red"))
        console.print(table(result["failures"]))


def headlines(r: Mapping[str, Any]) -> dict[str, str]:
    failed = f", {r['failed']:,} failed" if r["failed"] else ""
    retries = f", {r['retries']:,} attempts repeated" if r["retries"] else ""
    return {
        "simulated": f"{r['workload']} on {r['prefill']:,} prefill and {r['decode']:,} decode nodes, {r['profile']}",
        "requests": f"{r['completed']:,} of {r['requests']:,} completed{failed} in {r['simulated_s']:,.1f} s",
        "prefilled": f"{r['remote']:,} on prefill nodes{retries}",
        "hits": f"{r['hit_rate']:.1%} of the prompts' tokens on decode nodes, {r['prefill_hit_rate']:.1%} on prefill",
        "busy": f"prefill nodes {r['prefill_busy']:.1%}, decode nodes {r['decode_busy']:.1%}",
        "tokens/s": f"{r['prompt_tokens_per_s']:,.0f} of prompts, {r['answer_tokens_per_s']:,.0f} of answers",
        "took": f"{r['wall_s']:.1f} s, {r['events']:,} events",
    }
