"""Staged nodes: they compute in one memory, NIXL sees another. On a device whose copies are late and whose events lie,
with every byte checked by the coded engine, and every recording run again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.bus.recording import read
from pdbus.nodes import events as ev
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.history import turns
from pdbus.nodes.replay.timeline.spans import spans_of_node

from .conftest import Live, answer, live_cluster
from .faults import OPTIONS, SLOW_PREFILL, TCP, Site, ask, ask_remotely, pids_of, site_of, until_status
from .lone_nodes import Lone, lone_nodes
from .test_handoff_coded import LENGTHS, B, assert_equal, forget_all, prompt, storm
from .test_same_tokens import SEEDED, assert_same
from .test_same_tokens import prompt as text

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

FAKE: dict[str, Any] = {"device": "fake", "kv_buffer_device": "cpu"}
WHERE = {"prefill": ("prefill",), "decode": ("decode",), "both": ("prefill", "decode")}


@pytest.fixture(
    scope="module", params=[*(pytest.param(p, marks=pytest.mark.long) for p in ("prefill", "decode")), "both"]
)
def staged_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """1P + 1D, of which these are staged, and an oracle that is not. In the end what they decided is run again."""
    folder = tmp_path_factory.mktemp("staged")
    options = {"engine": "coded", "kv_blocks": 512, "prefill_chunk": 64, "record": str(folder)}
    with live_cluster(options=options, role_options=dict.fromkeys(WHERE[request.param], FAKE)) as live:
        yield live
    assert ClusterRun([folder]).failures == []


@pytest.fixture
def staged(staged_cluster: Live) -> Iterator[Live]:
    yield staged_cluster
    staged_cluster.check_clean()


def test_every_length_is_right_after_poison(staged: Live) -> None:
    for length in LENGTHS:
        staged.poison(staged.decode)
        here, there = staged.both_answer(prompt(length, salt=length), max_tokens=20)
        assert_equal(here, there)
        assert here.finished.timeline.remote and here.finished.timeline.read_bytes > 0


def test_blocks_that_are_here_or_there_already(staged: Live) -> None:
    """On the decode node, on its device: kept. On the prefill node: only what its mirror lacks goes down."""
    for warm in (B, 3 * B):
        whole = prompt(4 * B + 3, salt=200 + warm)
        staged.both_answer([*whole[:warm], 1], max_tokens=2)
        here, there = staged.both_answer(whole, max_tokens=10)
        assert_equal(here, there)
        assert here.finished.cached_tokens == warm
    staged.ask(staged.decode, forget_all)
    here, there = staged.both_answer(whole, max_tokens=10)
    assert_equal(here, there)
    assert here.finished.timeline.remote


def test_requests_and_cancels_at_once_leave_nothing(staged: Live) -> None:
    outcomes = staged.ask(staged.decode, lambda client: storm(client, requests=100, cancels=25))
    assert set(outcomes) <= {"length", "cancelled"}


# ---------------------------------------------------------------- beside the steps


@pytest.mark.long
def test_copies_go_on_beside_steps(tmp_path: Path) -> None:
    """Steps of 20 ms, copies that are 2 ms late: a chunk's copy ends while the next chunk is computed. This is counted,
    and seen on the timeline."""
    slow = {**FAKE, "coded_step_ms": 20, "record": str(tmp_path)}
    options = {"engine": "coded", "kv_blocks": 512, "prefill_chunk": 64}
    with live_cluster(options=options, role_options={"prefill": slow, "decode": FAKE}) as live:
        here, there = live.both_answer(prompt(12 * 64, salt=1), max_tokens=4)
        assert_equal(here, there)
        metrics = live.ask(live.prefill, lambda client: client.status())["metrics"]
        assert metrics["kv_copies_total"] == 12 and 0 < metrics["kv_copies_in_step_total"] < 12
        live.check_clean()
    (recording,) = tmp_path.iterdir()
    copies = [bar for bar in spans_of_node(read(recording)).bars if bar.group == "copies"]
    assert len(copies) == 12 and all(bar.end_ns for bar in copies)
    assert sum("ended while a step was running" in bar.details for bar in copies) == metrics["kv_copies_in_step_total"]


# ---------------------------------------------------------------- same tokens


@pytest.mark.long
@pytest.mark.parametrize("device", ["fake", "cpu"])
def test_the_tokens_of_a_real_model_are_bitwise_those_of_one_node(tiny_llama: Path, device: str) -> None:
    """With other blocks and orders on each node."""
    options = {"model": str(tiny_llama), "deterministic": True, "kv_blocks": 256, "prefill_chunk": 64}
    both = {"device": device, "kv_buffer_device": "cpu"}
    roles = {"prefill": {**both, "block_size": 64, "kv_layout": "NHD"}, "decode": {**both, "kv_layout": "HND"}}
    with live_cluster(options=options, role_options=roles) as live:
        for length in (1, 16, 17, 64, 65, 197):
            here, there = live.both_answer(text(length, salt=70), max_tokens=12, ignore_eos=True, **SEEDED)
            assert_same(here, there)
            assert here.finished.timeline.remote
        live.check_clean()


@pytest.mark.long
def test_ranks_are_staged_each_for_itself() -> None:
    """Two ranks there, one here, and digests of what was read, taken from the mirror."""
    options = {"engine": "coded", "coded_kv_heads": 2, "kv_blocks": 256, "prefill_chunk": 64, "kv_digest": "on", **FAKE}
    with live_cluster(options=options, role_options={"prefill": {"tp": 2}}) as live:
        for length in LENGTHS:
            live.poison(live.decode)
            here, there = live.both_answer(prompt(length, salt=300 + length), max_tokens=6)
            assert_equal(here, there)
            assert here.finished.timeline.remote
        metrics = live.ask(live.decode, lambda client: client.status())["metrics"]
        assert metrics["kv_digests_right_total"] >= len(LENGTHS) and metrics["kv_digests_wrong_total"] == 0
        live.check_clean()


# ---------------------------------------------------------------- preemption, kills


@pytest.mark.long
def test_a_preemption_between_two_chunks(tmp_path: Path) -> None:
    """The prefill node answers clients of its own, too, until it has no block left for their answers: they give way to
    each other between the chunks of prompts that it computes for the decode node and copies down."""
    with lone_nodes(Lone) as lone:
        both = lone.start(
            "both", "pb", http=False, kv_blocks=40, block_size=16, prefill_chunk=16, max_batch_tokens=64,
            coded_step_ms=1, record=str(tmp_path), **FAKE,
        )  # fmt: skip
        decode = lone.start("decode", "d", http=False, join=both.address, **FAKE)
        lone.ready(both, decode)
        lone.until_peer(decode, name="pb", state="up", detail="")

        async def crowd() -> None:
            async with Client(both.address) as own, Client(decode.address) as other:
                mine = [answer(own, prompt(40, salt=n), max_tokens=200) for n in range(4)]
                theirs = [answer(other, prompt(100 + n, salt=50 + n), max_tokens=4) for n in range(12)]
                for answered in await asyncio.gather(*mine, *theirs):
                    assert answered.finished.error is None, answered.finished.error

        lone.run(crowd())
        lone.check_clean()
    assert ClusterRun([tmp_path]).failures == []
    (recording,) = tmp_path.glob("pb-*")
    steps = [effect for turn in turns(read(recording)) for effect in turn.effects if isinstance(effect, ev.RunStep)]
    begun = Counter(row.seq for step in steps for row in step.rows if row.reset)
    assert max(begun.values()) > 1, "nobody was preempted"


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    roles = {"prefill": {**FAKE, **SLOW_PREFILL}, "decode": FAKE}
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP) as site:
        yield site


@pytest.fixture
def hurt(pair: Site) -> Iterator[Site]:
    yield pair
    pair.mend()


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed_in_mid_copy(hurt: Site, role: str) -> None:
    hurt.run(_killed_in_mid_copy(hurt, role))


async def _killed_in_mid_copy(hurt: Site, role: str) -> None:
    """Frozen again and again, until a copy is under way. What was computed for the request is computed again, or copied
    again; its tokens are right, and nothing is left."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        victim = p if role == "prefill" else d
        await ask_remotely(d, len(role))
        worker = (await pids_of(victim))["worker"]
        asked = random.Random(role).choices(range(5, 256), k=1000)
        task = asyncio.create_task(ask(d, asked))
        while not (await victim.ledger()).ledger["copies"]:
            assert not task.done(), "no copy was seen"
            os.kill(worker, signal.SIGCONT)
            await asyncio.sleep(0.0005)
            os.kill(worker, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        await task
        await until_status(victim, lambda s: s["ready"] and s["pids"]["worker"] not in (0, worker))
        await ask_remotely(d, 100 + len(role))
