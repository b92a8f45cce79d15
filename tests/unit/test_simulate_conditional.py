"""Where decode nodes have prompts computed, on a simulated cluster, whose time is exact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import replace
from pdbus.nodes.replay.simulate.cluster import SimCluster
from pdbus.nodes.replay.verify import verify
from pdbus.nodes.replay.workload import Asked, Workload

from tests.simulated import MS, PROFILE, S, figures_of, plan, play, workload

LONG = 4000
FAR = replace(PROFILE, message_ms=10)  # to ask and to claim takes longer than to compute a short prompt


def mix(count: int, seed: int = 3) -> Workload:
    """A third of the prompts are long, the others short; answers run all the time."""
    chances, at, asked = random.Random(seed), 0, []
    for _ in range(count):
        at += int(chances.expovariate(1 / 180) * MS)
        tokens = chances.randint(3000, 6000) if chances.random() < 0.3 else chances.randint(50, 250)
        asked.append(Asked(at, tokens, chances.randint(20, 80)))
    return workload(*asked)


def warm(count: int) -> Workload:
    """One long beginning that all share, and 250 tokens of their own; answers run all the time."""
    return workload(
        *(Asked(i * 400 * MS, 4250, 60, (*range(40), 100 + 3 * i, 101 + 3 * i, 102 + 3 * i)) for i in range(count)),
        block_tokens=100,
    )


def test_auto_is_sooner_than_always_and_than_never_on_a_mix() -> None:
    wanted = mix(200)
    mean = {
        policy: figures_of(wanted, prefill_policy=policy)["ttft_ms"]["mean"] for policy in ("remote", "local", "auto")
    }
    assert mean["auto"] < 0.5 * min(mean["remote"], mean["local"])


def test_short_prompts_stay_and_long_ones_go() -> None:
    """A prefill node that is free; some answers run."""
    asked = [Asked(i * 500 * MS, LONG if i % 4 == 0 else 60, 100) for i in range(60)]
    done = [
        ask
        for ask in play(workload(*asked), prefill_policy="auto", profile=FAR).asks
        if ask.end and ask.sent_ns > 5 * S
    ]
    remote = {
        long: [ask.end.timeline.remote for ask in done if ask.end and (ask.prompt_tokens == LONG) is long]
        for long in (True, False)
    }
    assert all(remote[True]) and len(remote[True]) > 10
    assert not any(remote[False])


def test_warm_prefixes_stay() -> None:
    """The prefill node has the prefix too, but would have as much to compute, and messages come on top."""
    cluster = play(warm(30), prefill_policy="auto", profile=FAR)
    late = [ask.end for ask in cluster.asks[10:] if ask.end]
    assert late and all(end.cached_tokens == 4000 for end in late)
    assert not any(end.timeline.remote for end in late)


@pytest.mark.parametrize("policy", ["remote", "local"])
def test_a_policy_that_says_where_is_obeyed(policy: str) -> None:
    done = [ask.end for ask in play(mix(30), prefill_policy=policy).asks]
    assert all(end and end.timeline.remote is (policy == "remote") for end in done)


def test_every_choice_stands_in_the_recording_which_verifies(tmp_path: Path, capsys: Any) -> None:
    """Rates are measured from recorded events alone: each core decides the same again."""
    wanted = mix(40)
    cluster = SimCluster(plan(wanted, prefill=2, decode=1, prefill_policy="auto"), record=tmp_path)
    cluster.play(wanted)
    assert verify([tmp_path]) == 0
    assert {ask.end.timeline.remote for ask in cluster.asks if ask.end} == {True, False}


def test_a_policy_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--prefill-policy.*'sometimes'.*remote, auto, local"):
        plan(workload(), prefill_policy="sometimes")
