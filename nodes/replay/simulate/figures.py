"""What a simulation or a recording showed, as figures: the same names as those of a load against live nodes."""

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
    """Of a simulation. `prefill_hit_rate`: of what prefill nodes were asked for, the tokens that they had cached;
    `prefill_busy`: the part of the time that they computed. `wall_s`: what it took to simulate `simulated_s`; `events`:
    what cores heard meanwhile. The rest as `outcome`."""
    plan = cluster.plan
    span_ns = cluster.driver.now - cluster.began_ns
    return {
        "workload": workload.name,
        "profile": plan.profile.name,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "simulated_s": span_ns / NS_PER_S,
        "wall_s": wall_s,
        "events": cluster.driver.handled,
        **outcome(cluster.asks, len(workload.requests), span_ns, cluster.answer_ns),
        "prefill_hit_rate": _prefill_hit_rate(cluster),
        "prefill_busy": _busy(cluster, cluster.prefills, span_ns),
        "decode_busy": _busy(cluster, cluster.decodes, span_ns),
        "attempts_failed": _causes(cluster.counters, "attempt.failed: "),
        "leases_ended": _causes(cluster.counters, "lease.ended: "),
    }


def outcome(asks: Sequence[Ask], requests: int, span_ns: int, answer_ns: int = 0) -> dict[str, Any]:
    """Of what was asked, simulated or recorded. Times in ms from when a request was sent, each token `answer_ns` after
    it was sampled; rates from 0 to 1, per second over `span_ns`. `hit_rate`: of the tokens of prompts those that the
    decode node had cached."""
    done = [ask for ask in asks if ask.end is not None and not ask.cause]
    prompts = sum(ask.prompt_tokens for ask in done)
    answers = sum(ask.tokens for ask in done)
    cached = sum(ask.end.cached_tokens for ask in done if ask.end)
    span_s = max(1, span_ns) / NS_PER_S
    return {
        "requests": requests,
        "completed": len(done),
        "failed": requests - len(done),
        "ttft_ms": spread(Counter(ask.first_ns + answer_ns - ask.sent_ns for ask in done if ask.first_ns)),
        "itl_ms": spread(_gaps(done)),
        "latency_ms": spread(Counter(ask.last_ns + answer_ns - ask.sent_ns for ask in done if ask.first_ns)),
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "cached_tokens": cached,
        "hit_rate": cached / prompts if prompts else 0.0,
        "remote": sum(ask.end.timeline.remote for ask in done if ask.end),
        "retries": sum(max(0, ask.end.timeline.attempts - 1) for ask in done if ask.end),
        "requests_per_s": len(done) / span_s,
        "prompt_tokens_per_s": prompts / span_s,
        "answer_tokens_per_s": answers / span_s,
        "failures": failures(asks),
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


def _prefill_hit_rate(cluster: SimCluster) -> float:
    remote = [ask for ask in cluster.asks if ask.end is not None and ask.end.timeline.remote]
    asked = sum(ask.prompt_tokens for ask in remote)
    computed = sum(cluster.computed_tokens[name] for name in cluster.prefills)
    return max(0.0, 1 - computed / asked) if asked else 0.0


def _busy(cluster: SimCluster, names: Sequence[str], span_ns: int) -> float:
    return sum(cluster.busy_ns[name] for name in names) / max(1, span_ns) / len(names)


def _causes(counters: Mapping[str, int], begin: str) -> dict[str, int]:
    return {name.removeprefix(begin): n for name, n in sorted(counters.items()) if name.startswith(begin)}
