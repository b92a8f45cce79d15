"""Small workloads and profiles for tests of simulations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdbus.nodes.replay.simulate.cluster import SimCluster
from pdbus.nodes.replay.simulate.faults import parse_fault
from pdbus.nodes.replay.simulate.figures import figures
from pdbus.nodes.replay.simulate.plan import Options, Plan, plan_of
from pdbus.nodes.replay.simulate.profile import Profile
from pdbus.nodes.replay.workload import Asked, Workload

MS = 1_000_000
S = 1_000_000_000
PROFILE = Profile(
    name="made up",
    source="a test",
    prefill=((1, 5.0, 0.0), (101, 15.0, 1.0)),
    decode=((1, 10.0, 0.1), (11, 20.0, 1.1)),
    kv_bytes_per_token=1000,
    prefill_kv_tokens=100_000,
    decode_kv_tokens=100_000,
    link_gb_per_s=1.0,
    read_ms=1.0,
    message_ms=0.5,
    request_ms=0.5,
    max_model_len=20_000,
    prefill_chunk=400,
    max_batch_tokens=400,
    max_running=64,
)


def workload(*requests: Asked, block_tokens: int = 0) -> Workload:
    return Workload("made up", requests, block_tokens)


def many(count: int, every_ms: int, prompt: int = 1000, answer: int = 50) -> Workload:
    return workload(*(Asked(i * every_ms * MS, prompt + 7 * (i % 11), answer + i % 13) for i in range(count)))


def plan(wanted: Workload, *, faults: Sequence[str] = (), profile: Profile = PROFILE, **options: Any) -> Plan:
    given = Options(**{"block_size": 100, **options})
    return plan_of(given._replace(faults=tuple(parse_fault(text) for text in faults)), profile, wanted)


def play(wanted: Workload, **options: Any) -> SimCluster:
    cluster = SimCluster(plan(wanted, **options))
    cluster.play(wanted)
    return cluster


def figures_of(wanted: Workload, **options: Any) -> dict[str, Any]:
    """Without what differs from run to run."""
    return {**figures(play(wanted, **options), wanted, 0.0), "wall_s": 0.0}
