"""What a load showed, as figures: one dict for people, programs and the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .load_request import Played
from .load_run import LoadRun
from .workload import Workload, best_hits

MS = 1_000_000
NS = 1_000_000_000
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def figures(run: LoadRun) -> dict[str, Any]:
    """Times in ms but for `wall_s`; rates from 0 to 1. `ttft_ms`, `latency_ms`: from when it was sent; those
    `from_scheduled` count the lateness, too."""
    done = [p for p in run.played if p.completed]
    sent = [p for p in run.played if p.sent_ns]
    wall_s = run.wall_ns / NS
    prompts, answers = sum(p.prompt_tokens for p in done), sum(p.answer_tokens for p in done)
    cached = sum(p.cached_tokens for p in done)
    return {
        "workload": run.workload.name,
        "requests": len(run.workload.requests),
        "completed": len(done),
        "failed": len(run.played) - len(done),
        "not_played": len(run.workload.requests) - len(run.played),  # not due before Ctrl-C
        "wall_s": wall_s,
        "scheduled_s": run.workload.requests[-1].at_ns / NS,
        "lateness_ms": spread((p.sent_ns - p.scheduled_ns) / MS for p in sent),
        "ttft_ms": spread((p.first_ns - p.sent_ns) / MS for p in done if p.first_ns),
        "ttft_from_scheduled_ms": spread((p.first_ns - p.scheduled_ns) / MS for p in done if p.first_ns),
        "itl_ms": spread(run.meter.gaps_ms),
        "latency_ms": spread((p.ended_ns - p.sent_ns) / MS for p in done),
        "latency_from_scheduled_ms": spread((p.ended_ns - p.scheduled_ns) / MS for p in done),
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "cached_tokens": cached,
        "hit_rate": cached / prompts if prompts else 0.0,
        "best_hit_rate": best_hit_rate(run, done),
        "remote": sum(p.remote for p in done),
        "requests_per_s": len(done) / wall_s,
        "prompt_tokens_per_s": prompts / wall_s,
        "answer_tokens_per_s": answers / wall_s,
        "nodes": _nodes(run),
        "failures": failures(run.played),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Count, mean, percentiles (the least value that so many lie at or below) and maximum; zeros when there is none."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return {"count": 0, "mean": 0.0, **dict.fromkeys(QUANTILES, 0.0), "max": 0.0}
    quantiles = {name: ordered[math.ceil(q * count) - 1] for name, q in QUANTILES.items()}
    return {"count": count, "mean": sum(ordered) / count, **quantiles, "max": ordered[-1]}


def best_hit_rate(run: LoadRun, done: Sequence[Played]) -> float:
    """Of the prompts that were answered, the tokens that prefix caches which never forget would have found, each
    decode node's for what it was asked."""
    hit = tokens = 0
    for number, target in enumerate(run.targets):
        asked = [run.workload.requests[p.index] for p in done if p.target == number]
        hits = best_hits(Workload("", asked, run.workload.block_tokens), target.block_tokens)
        hit, tokens = hit + hits.hit_tokens, tokens + hits.tokens
    return hit / tokens if tokens else 0.0


def failures(played: Sequence[Played]) -> list[dict[str, Any]]:
    """By cause, the most frequent first, with the first one's words."""
    failed = [p for p in played if p.cause]
    examples: dict[str, str] = {}
    for p in failed:
        examples.setdefault(p.cause, p.problem)
    counts = Counter(p.cause for p in failed)
    return [{"cause": cause, "count": n, "example": examples[cause]} for cause, n in counts.most_common()]


def _nodes(run: LoadRun) -> list[dict[str, Any]]:
    rows = []
    for number, target in enumerate(run.targets):
        mine = [p for p in run.played if p.target == number]
        done = sum(p.completed for p in mine)
        address = target.client.address
        rows.append({"name": target.name, "address": address, "requests": len(mine), "completed": done})
    return rows
