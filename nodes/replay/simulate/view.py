"""A simulation for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ...tables import output, pairs, table

LATENCIES = {"ttft_ms": "first token", "itl_ms": "between tokens", "latency_ms": "whole answer"}
BESIDE = {"recorded": "recorded", "as_it_was": "simulated as it was"}

Figures = Mapping[str, Any]


def show(result: Figures) -> None:
    """Prints the figures on standard output."""
    console = output()
    console.print(pairs(headlines(result)))
    console.print()
    runs = {name: result[key] for key, name in BESIDE.items() if key in result}
    _show_latencies(console, result, runs)
    if runs:
        console.print()
        console.print(table([_compared(name, run) for name, run in ({**runs, "simulated": result}).items()]))
    if result["failures"]:
        console.print(Text("\nfailures", style="bold red"))
        console.print(table(result["failures"]))


def show_search(result: Figures) -> None:
    """What was tried, and the cheapest that will do."""
    console = output()
    console.print(table(result["tried"]))
    console.print()
    targets = ", ".join(result["targets"])
    if not result["found"]:
        console.print(Text(f"no cluster of that size meets {targets}", style="bold red"))
        return
    console.print(f"[bold]{result['prefill']} prefill and {result['decode']} decode nodes[/bold] meet {targets}")
    console.print()
    _show_latencies(console, result, {})


def _show_latencies(console: Console, result: Figures, beside: Mapping[str, Figures]) -> None:
    rows = []
    for key, name in LATENCIES.items():
        for run, figures in beside.items():
            rows.append({"ms": name, "": run, **figures[key]})
        rows.append({"ms": name, "": "simulated" if beside else "", **result[key]})
    console.print(table(rows))


def _compared(name: str, r: Figures) -> dict[str, Any]:
    return {
        "": name,
        "completed": f"{r['completed']:,} of {r['requests']:,}",
        "hit_rate": f"{r['hit_rate']:.1%}",
        "remote": r["remote"],
        "attempts repeated": r["retries"],
        "answer tokens/s": r["answer_tokens_per_s"],
    }


def headlines(r: Figures) -> dict[str, str]:
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
