"""What a node says of itself in its status, as Prometheus metrics; some of it under vLLM's names as well."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "pdbus_"
VLLM = "vllm:"
ENGINE = "0"  # vLLM's label for one of several engines behind a server; a node is one


class Alias(NamedTuple):
    """What vLLM calls one of our families. `only`: the samples whose label has one of these values; None: all. They are
    added up but for `label`, which is kept: its name with us and with vLLM, and vLLM's words for our values."""

    ours: str
    only: tuple[str, frozenset[str]] | None = None
    label: tuple[str, str, Mapping[str, str]] | None = None


# Those that mean the same. vLLM's buckets are others.
ALIASES: dict[str, Alias] = {
    "nixl_xfer_time_seconds": Alias("read_seconds"),
    "nixl_post_time_seconds": Alias("read_post_seconds"),
    "nixl_bytes_transferred": Alias("read_bytes"),
    "nixl_num_descriptors": Alias("read_runs"),
    "nixl_num_failed_transfers": Alias("reads", only=("outcome", frozenset(("failed",)))),
    "nixl_num_kv_expired_reqs": Alias("leases_ended", only=("cause", frozenset(("expired",)))),
    "time_to_first_token_seconds": Alias("request_first_token_seconds"),
    "e2e_request_latency_seconds": Alias("request_seconds"),
    "request_queue_time_seconds": Alias("request_queue_seconds"),
    "request_prefill_time_seconds": Alias("request_prefill_seconds"),
    "prompt_tokens": Alias("prompt_tokens"),
    "generation_tokens": Alias("generation_tokens"),
    "prefix_cache_queries": Alias("prompt_tokens"),
    "prefix_cache_hits": Alias("cached_tokens"),
    "request_success": Alias(
        "requests_ended",
        only=("reason", frozenset(("stop", "length", "cancelled"))),
        label=("reason", "finished_reason", {"stop": "stop", "length": "length", "cancelled": "abort"}),
    ),
}


class NodeMetrics(Collector):
    """`status` is a node's; an empty one gives nothing. What is malformed in it is left out: the node may be of another
    version."""

    def __init__(self) -> None:
        self.status: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        numbers = {
            name: float(value)
            for name, value in (self.status.get("metrics") or {}).items()
            if isinstance(name, str) and isinstance(value, int | float)
        }
        families = {f.name: f for f in map(_family, self.status.get("measured") or ()) if f is not None}
        yield from _plain(numbers)
        yield from families.values()
        yield from self._as_vllm(numbers, families)

    def _as_vllm(self, numbers: Mapping[str, float], families: Mapping[str, Metric]) -> Iterator[Metric]:
        labels = {"model_name": str(self.status.get("model", "")), "engine": ENGINE}
        for name, alias in ALIASES.items():
            if (ours := families.get(PREFIX + alias.ours)) is not None:
                yield _renamed(ours, VLLM + name, alias, labels)
        for name, value in vllm_gauges(numbers).items():
            gauge = GaugeMetricFamily(VLLM + name, "As vLLM has it.", labels=tuple(labels))
            gauge.add_metric(tuple(labels.values()), value)
            yield gauge
        if "requests_preempted_total" in numbers:
            counter = CounterMetricFamily(VLLM + "num_preemptions", "As vLLM has it.", labels=tuple(labels))
            counter.add_metric(tuple(labels.values()), numbers["requests_preempted_total"])
            yield counter


def _plain(numbers: Mapping[str, float]) -> Iterator[Metric]:
    """Without labels; names that end in _total are counters."""
    for name, value in numbers.items():
        full = PREFIX + re.sub(r"\W", "_", name.removeprefix(PREFIX), flags=re.ASCII)
        if full.endswith("_total"):
            yield CounterMetricFamily(full, "Counted by the node.", value=value)
        else:
            yield GaugeMetricFamily(full, "Told by the node.", value=value)


def vllm_gauges(numbers: Mapping[str, float]) -> dict[str, float]:
    """vLLM counts requests that wait for remote KV among the waiting."""
    try:
        blocks = numbers["kv_blocks"]
        used = blocks - numbers["kv_blocks_free"] - numbers["kv_blocks_cached"]
        return {
            "num_requests_running": numbers["requests_running"],
            "num_requests_waiting": numbers["requests_waiting"] + numbers["requests_fetching"],
            "kv_cache_usage_perc": used / blocks if blocks else 0.0,
        }
    except KeyError:
        return {}


def _family(said: Any) -> Metric | None:
    try:
        name, kind, meaning, samples = said
        metric = Metric(name, meaning, kind)
        for suffix, labels, value in samples:
            metric.add_sample(name + suffix, {str(k): str(v) for k, v in labels.items()}, float(value))
    except (TypeError, ValueError, AttributeError):
        return None
    return metric


def _renamed(ours: Metric, name: str, alias: Alias, labels: Mapping[str, str]) -> Metric:
    """Samples that differ only in labels which vLLM does not have are added up."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in ours.samples:
        if alias.only is None or sample.labels.get(alias.only[0]) in alias.only[1]:
            kept = dict(_kept(sample.labels, alias))
            sums[sample.name.removeprefix(ours.name), tuple(kept.items())] += sample.value
    metric = Metric(name, f"As vLLM has it; here {ours.name}.", ours.type)
    if not sums and alias.label is None and ours.type == "counter":
        sums["_total", ()] = 0.0
    for (suffix, kept_labels), value in sums.items():
        metric.add_sample(name + suffix, {**labels, **dict(kept_labels)}, value)
    return metric


def _kept(labels: Mapping[str, str], alias: Alias) -> Iterable[tuple[str, str]]:
    if "le" in labels:
        yield "le", labels["le"]
    if alias.label is not None:
        label, theirs, words = alias.label
        yield theirs, words.get(labels[label], labels[label])
