"""A prefill node of several stages: every rank of a decode node reads each layer from the stage that holds it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client

from .conftest import answer
from .lone_nodes import lone_nodes, until
from .test_tensor_parallel import SEEDED, Ranked

pytestmark = [pytest.mark.live, pytest.mark.long]

LENGTHS = (1, 15, 16, 17, 150)  # blocks have 16 tokens, chunks 64


def prompt(length: int, salt: str) -> list[int]:
    return random.Random(f"{length}/{salt}").choices(range(5, 256), k=length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from pdbus.nodes.models.random_llama import write_random_llama

    folder = write_random_llama(tmp_path_factory.mktemp("models") / "tiny6", "tiny6")
    return {"engine": "torch", "model": str(folder), "prefill_chunk": 64, "http": False, "deterministic": True}


@pytest.fixture(scope="module")
def staged(model: dict[str, Any]) -> Iterator[Ranked]:
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {"pp": 2}}, {"d": {"kv_digest": "on"}}, **model)
        yield lone


@pytest.mark.parametrize("length", LENGTHS)
def test_two_stages_to_one_rank_give_the_bits_of_one_node(staged: Ranked, length: int) -> None:
    """Asked twice, the second time with a longer end: what both have cached of the prompt stays where it is."""
    for sampling in ({}, SEEDED):
        tokens = prompt(length, f"stages {sampling}")
        for asked in (tokens, tokens + prompt(70, "more")):
            assert staged.same(staged.decode[0], asked, ignore_eos=True, max_tokens=20, **sampling) == "p"
    staged.check_clean()


def test_a_prefix_that_is_cached_at_the_prefill_node_alone_is_read_from_both_stages(staged: Ranked) -> None:
    tokens = prompt(100, "cached there")
    with_end = [tokens + prompt(20, end) for end in ("one", "other")]
    assert staged.same(staged.decode[0], with_end[0], ignore_eos=True) == "p"
    assert staged.same(staged.decode[0], with_end[1], ignore_eos=True) == "p"
    staged.check_clean()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_killed_in_the_middle_of_a_prompt_is_replaced_with_the_others(staged: Ranked, stage: int) -> None:
    """The rest wait for its rows; they are ended, too, and the prompt is computed elsewhere."""
    (node,), (there,) = staged.decode, staged.prefill
    asked = prompt(900, f"killed {stage}")

    async def killed(client: Client) -> list[int]:
        task = asyncio.create_task(answer(client, asked, max_tokens=10, ignore_eos=True))
        async with Client(there.address) as owner:
            await until(lambda: leased(owner))
            os.kill(before[stage]["worker"], signal.SIGKILL)
        return (await task).tokens

    async def healed(client: Client) -> bool:
        """A decode node keeps away for a while from where an attempt has failed."""
        answered = await answer(client, prompt(40, f"{stage} {random.random()}"), max_tokens=2, ignore_eos=True)
        return answered.finished.timeline.prefill_node == "p"

    before = staged.ask(there, ranks)
    tokens = staged.ask(node, killed)
    assert tokens == staged.answer(staged.oracle, asked, max_tokens=10, ignore_eos=True).tokens
    staged.ready(there)
    assert not {r["worker"] for r in staged.ask(there, ranks)} & {r["worker"] for r in before}
    staged.ask(node, lambda client: until(lambda: healed(client)))
    assert staged.same(node, prompt(100, f"healed {stage}"), ignore_eos=True) == "p"
    staged.check_clean()


async def ranks(client: Client) -> list[dict[str, int]]:
    found: list[dict[str, int]] = (await client.status())["ranks"]
    return found


async def leased(client: Client) -> bool:
    return bool((await client.status())["leases"])


def test_stages_of_two_ranks_feed_a_decode_node_of_two(model: dict[str, Any]) -> None:
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {"pp": 2}}, {"d": {}}, **{**model, "tp": 2})
        for length in LENGTHS:
            assert lone.same(lone.decode[0], prompt(length, "both"), ignore_eos=True, max_tokens=20) == "p"
        lone.check_clean()


def test_coded_kv_of_three_stages_is_right_on_decode_nodes_of_any_number_of_ranks() -> None:
    """Five layers in shares of 2, 2 and 1, whose blocks are of unequal size."""
    shape = {"kv_blocks": 256, "coded_layers": 5, "coded_kv_heads": 2, "http": False}
    with lone_nodes(Ranked) as lone:
        lone.begin(
            {"p3": {"pp": 3}, "p2x2": {"pp": 2, "tp": 2}}, {"d1": {}, "d2": {"tp": 2, "kv_digest": "on"}}, **shape
        )
        for node in lone.decode:
            asked = [lone.same(node, prompt(40 + turn, f"coded {node.name}")) for turn in range(4)]
            assert sorted(asked) == ["p2x2", "p2x2", "p3", "p3"]
        lone.check_clean()
