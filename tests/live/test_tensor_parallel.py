"""Nodes of several ranks: every rank reads its own heads, whoever prefilled and however many ranks that node has."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.node_process import NodeProcess

from .conftest import Answered, poison
from .lone_nodes import Lone, lone_nodes
from .test_same_tokens import NEAR_TIE

pytestmark = pytest.mark.live

LENGTHS = (1, 17, 64, 150)
CODED_RANKS = {"kv_blocks": 256, "coded_kv_heads": 6, "http": False}


class Ranked(Lone):
    """Prefill nodes and decode nodes by how many ranks they have, and an oracle of one."""

    def begin(self, prefill: dict[str, dict[str, Any]], decode: dict[str, dict[str, Any]], **settings: Any) -> None:
        self.oracle = self.start("both", "oracle", **settings)
        self.prefill = [self.start("prefill", name, **{**settings, **more}) for name, more in prefill.items()]
        if self.prefill:
            settings = {**settings, "join": ",".join(node.address for node in self.prefill)}
        self.decode = [self.start("decode", name, **{**settings, **more}) for name, more in decode.items()]
        self.ready(*self.nodes)
        for node in self.decode:
            for name in prefill:
                self.until_peer(node, name=name, state="up", detail="")

    def both(self, node: NodeProcess, tokens: list[int], **sampling: Any) -> tuple[Answered, Answered]:
        """The answers of a decode node and of the oracle."""
        here = self.answer(node, tokens, **{"max_tokens": 10, **sampling})
        there = self.answer(self.oracle, tokens, **{"max_tokens": 10, **sampling})
        assert here.finished.error is None and there.finished.error is None, here.finished.error
        return here, there

    def same(self, node: NodeProcess, tokens: list[int], **sampling: Any) -> str:
        """The answer is the oracle's. Who prefilled."""
        here, there = self.both(node, tokens, **sampling)
        assert (here.tokens, here.finished.reason) == (there.tokens, there.finished.reason)
        return here.finished.timeline.prefill_node


def prompt(length: int, salt: str) -> list[int]:
    return random.Random(f"{length}/{salt}").choices(range(5, 256), k=length)


@pytest.fixture(scope="module")
def ranked() -> Iterator[Ranked]:
    with lone_nodes(Ranked) as lone:
        ranks = {f"tp-{n}": {"tp": n} for n in (1, 2, 3)}
        lone.begin(
            {f"p-{name}": how for name, how in ranks.items()},
            {f"d-{name}": how for name, how in ranks.items()},
            **CODED_RANKS,
        )
        yield lone


@pytest.mark.parametrize("length", LENGTHS)
def test_any_number_of_ranks_reads_from_any_other(ranked: Ranked, length: int) -> None:
    """Into poisoned memory: what a read leaves out is a wrong byte."""
    for node in ranked.decode:
        poison(node.pid)
        asked = [ranked.same(node, prompt(length, f"{node.name} {turn}")) for turn in range(3)]
        assert sorted(asked) == ["p-tp-1", "p-tp-2", "p-tp-3"]
    ranked.check_clean()


@pytest.mark.long
def test_more_ranks_than_kv_heads_hold_copies() -> None:
    """Four ranks, two heads: each rank reads its own copy, from one rank that has the head."""
    with lone_nodes(Ranked) as lone:
        ranks = {"tp": 4, "kv_digest": "on"}
        lone.begin({"p1": {}, "p4": ranks}, {"d4": ranks}, kv_blocks=128, coded_kv_heads=2, http=False)
        for turn in range(6):
            assert lone.same(lone.decode[0], prompt(40 + turn, "copies")) == ("p1", "p4")[turn % 2]
        lone.check_clean()


# ---------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small random Llama that two or three ranks can share."""
    from pdbus.nodes.models.random_llama import write_random_llama

    folder = write_random_llama(tmp_path_factory.mktemp("models") / "tiny6", "tiny6")
    return {"engine": "torch", "model": str(folder), "prefill_chunk": 64, "http": False}


SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "top_k": 40, "top_p": 0.9}


@pytest.mark.long
def test_two_ranks_to_two_give_the_bits_of_one_node_of_two(model: dict[str, Any]) -> None:
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {}}, {"d": {}}, tp=2, deterministic=True, **model)
        for length in LENGTHS:
            for sampling in ({}, SEEDED):
                tokens = prompt(length, f"bits {sampling}")
                assert lone.same(lone.decode[0], tokens, ignore_eos=True, max_tokens=20, **sampling) == "p"
        lone.check_clean()


@pytest.mark.long
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (1, 3), (3, 1)])
def test_greedy_tokens_are_those_of_one_rank_but_for_near_ties(
    model: dict[str, Any], there: int, here: int, record_property: Any
) -> None:
    """Other numbers of ranks add in another order."""
    near_ties = 0
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {"tp": there}}, {"d": {"tp": here}}, **model)
        for length in (*LENGTHS, 300, 500):
            tokens = prompt(length, "greedy")
            ours, theirs = lone.both(lone.decode[0], tokens, ignore_eos=True, max_tokens=24)
            at = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b), None)
            if at is not None:
                assert gap_at(lone, tokens, at) <= NEAR_TIE
                near_ties += 1
        lone.check_clean()
    record_property("near_ties", near_ties)


@pytest.mark.long
def test_workers_that_lose_one_of_them_compute_on_as_others(model: dict[str, Any]) -> None:
    """The rest wait for it in the middle of a layer; they are ended, too."""
    with lone_nodes(Ranked) as lone:
        lone.begin({}, {"d": {}}, tp=2, deterministic=True, **model)
        (node,) = lone.decode
        asked: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}

        async def killed(client: Client) -> list[int]:
            generation = client.generate(prompt(30, "killed"), **asked)
            ranks = (await client.status())["ranks"]
            await anext(generation)
            os.kill(ranks[1]["worker"], signal.SIGKILL)
            async for _ in generation:
                pass
            return generation.tokens

        tokens = lone.ask(node, killed)
        assert tokens == lone.answer(lone.oracle, prompt(30, "killed"), **asked).tokens
        lone.check_clean()


def gap_at(lone: Ranked, ids: list[int], at: int) -> float:
    """Between the oracle's two best logits for the token at `at`."""

    async def logprobs(client: Client) -> list[Any]:
        generation = client.generate(ids, max_tokens=at + 1, logprobs=2, ignore_eos=True)
        return [one for token in [t async for t in generation] for one in token.logprobs]

    best, second = lone.ask(lone.oracle, logprobs)[at].top
    return float(abs(best[1] - second[1]))
