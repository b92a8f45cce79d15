"""What a simulation showed, as figures: the same names as those of a load against live nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..workload import Workload
from .asks import Ask
from .cluster import SimCluster
from .profile import NS_PER_MS

NS_PER_S = 1_000_000_000
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def figures(cluster: SimCluster, workload: Workload, wall_s: float) -> dict[str, Any]:
    """Times in ms as clients see them, from when a request was sent; rates from 0 to 1. `hit_rate`: of the prompts'
    tokens those that the decode node had cached; `prefill_hit_rate`: of what prefill nodes were asked for, those that
    they had cached. `wall_s`: what it took to simulate `simulated_s`; `events`: what cores heard meanwhile."""
    done = [ask for ask in cluster.asks if ask.end is not None and not ask.cause]
    prompts = sum(ask.prompt_tokens for ask in done)
    answers = sum(ask.tokens for ask in done)
    cached = sum(ask.end.cached_tokens for ask in done if ask.end)
    simulated_s = max(1, cluster.driver.now - cluster.began_ns) / NS_PER_S
    answer_ns = cluster.answer_ns
    plan = cluster.plan
    return {
        "workload": workload.name,
        "profile": plan.profile.name,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "requests": len(workload.requests),
        "completed": len(done),
        "failed": len(workload.requests) - len(done),
        "simulated_s": simulated_s,
        "wall_s": wall_s,
        "events": cluster.driver.handled,
        "ttft_ms": spread(Counter(ask.first_ns + answer_ns - ask.sent_ns for ask in done)),
        "itl_ms": spread(_gaps(done)),
        "latency_ms": spread(Counter(ask.last_ns + answer_ns - ask.sent_ns for ask in done)),
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "cached_tokens": cached,
        "hit_rate": cached / prompts if prompts else 0.0,
        "prefill_hit_rate": _prefill_hit_rate(cluster, done),
        "remote": sum(ask.end.timeline.remote for ask in done if ask.end),
        "retries": sum(max(0, ask.end.timeline.attempts - 1) for ask in done if ask.end),
        "requests_per_s": len(done) / simulated_s,
        "prompt_tokens_per_s": prompts / simulated_s,
        "answer_tokens_per_s": answers / simulated_s,
        "prefill_busy": _busy(cluster, cluster.prefills, simulated_s),
        "decode_busy": _busy(cluster, cluster.decodes, simulated_s),
        "failures": failures(cluster.asks),
        "attempts_failed": _causes(cluster.counters, "attempt.failed: "),
        "leases_ended": _causes(cluster.counters, "lease.ended: "),
    }


def spread(counts: Mapping[int, int]) -> dict[str, float]:
    """Of values in ns, each with how often it came: count, mean, percentiles (the least value that so many lie at or
    below) and maximum, in ms; zeros when there is none."""
    total = sum(counts.values())
    if not total:
        return {"count": 0, "mean": 0.0, **dict.fromkeys(QUANTILES, 0.0), "max": 0.0}
    ordered = sorted(counts)
    found: dict[str, float] = {}
    below = 0
    for value in ordered:
        below += counts[value]
        for name, q in QUANTILES.items():
            if name not in found and below >= math.ceil(q * total):
                found[name] = value / NS_PER_MS
    mean = sum(value * count for value, count in counts.items()) / total / NS_PER_MS
    return {"count": total, "mean": mean, **found, "max": ordered[-1] / NS_PER_MS}


def failures(asks: Iterable[Ask]) -> list[dict[str, Any]]:
    """By cause, the most frequent first, with the first one's words."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for ask in asks:
        if ask.cause:
            counts[ask.cause] += 1
            examples.setdefault(ask.cause, ask.end.problem if ask.end else "")
    return [{"cause": cause, "count": n, "example": examples[cause]} for cause, n in counts.most_common()]


def _gaps(asks: Iterable[Ask]) -> Counter[int]:
    gaps: Counter[int] = Counter()
    for ask in asks:
        for gap, count in ask.gaps.items():
            gaps[gap] += count
    return gaps


def _prefill_hit_rate(cluster: SimCluster, done: Sequence[Ask]) -> float:
    asked = sum(ask.prompt_tokens for ask in done if ask.end and ask.end.timeline.remote)
    computed = sum(cluster.computed_tokens[name] for name in cluster.prefills)
    return max(0.0, 1 - computed / asked) if asked else 0.0


def _busy(cluster: SimCluster, names: Sequence[str], simulated_s: float) -> float:
    """The part of the time that their workers computed."""
    return sum(cluster.busy_ns[name] for name in names) / NS_PER_S / simulated_s / len(names)


def _causes(counters: Mapping[str, int], begin: str) -> dict[str, int]:
    return {name.removeprefix(begin): n for name, n in sorted(counters.items()) if name.startswith(begin)}
