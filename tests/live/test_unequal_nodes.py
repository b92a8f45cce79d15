"""Nodes whose KV lies differently hand over all the same: other block sizes and orders, each pair of them, every byte
checked by the coded engine."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdbus.nodes.node_process import NodeProcess

from .lone_nodes import Lone, lone_nodes

pytestmark = pytest.mark.live

PREFILL = {"p-16": ("native", 16), "p-nhd-32": ("NHD", 32), "p-hnd-8": ("HND", 8)}
DECODE = {"d-16": ("native", 16), "d-hnd-32": ("HND", 32)}
LENGTHS = (1, 15, 31, 32, 33, 65, 150)


class Unequal(Lone):
    """Every decode node knows every prefill node. The oracle does both, linked to nobody."""

    def begin(self) -> None:
        self.oracle = self.start("both", "oracle", http=False, kv_blocks=256)
        for name, (layout, size) in PREFILL.items():
            self.start("prefill", name, http=False, kv_layout=layout, block_size=size, kv_blocks=4096 // size)
        addresses = ",".join(node.address for node in self.nodes[1:])
        self.decode = [
            self.start("decode", name, http=False, kv_layout=layout, block_size=size, kv_blocks=4096 // size,
                       join=addresses)
            for name, (layout, size) in DECODE.items()
        ]  # fmt: skip
        self.ready(*self.nodes)
        for node in self.decode:
            for name in PREFILL:
                self.until_peer(node, name=name, state="up", detail="")


@pytest.fixture(scope="module")
def unequal() -> Iterator[Unequal]:
    with lone_nodes(Unequal) as lone:
        lone.begin()
        yield lone


def prompt(length: int, salt: str) -> list[int]:
    return random.Random(f"{length}/{salt}").choices(range(5, 256), k=length)


def answers(unequal: Unequal, node: NodeProcess, tokens: list[int]) -> tuple[str, int]:
    """Who prefilled, and how many tokens were here before; the answer is the oracle's."""
    here = unequal.answer(node, tokens, max_tokens=10)
    there = unequal.answer(unequal.oracle, tokens, max_tokens=10)
    assert here.finished.error is None, here.finished.error
    assert (here.tokens, here.finished.reason) == (there.tokens, there.finished.reason)
    return here.finished.timeline.prefill_node, here.finished.cached_tokens


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_every_length_from_every_prefill_node(unequal: Unequal, name: str, length: int) -> None:
    node = next(node for node in unequal.decode if node.name == name)
    asked = [answers(unequal, node, prompt(length, f"{name} {turn}"))[0] for turn in PREFILL]
    assert sorted(asked) == sorted(PREFILL)
    unequal.check_clean()


@pytest.mark.parametrize("name", DECODE)
def test_what_is_here_already_is_kept_whatever_the_blocks_there(unequal: Unequal, name: str) -> None:
    """A prefix of three of our blocks is half of a larger block there, or several smaller ones."""
    node = next(node for node in unequal.decode if node.name == name)
    size = DECODE[name][1]
    for turn in PREFILL:
        whole = prompt(5 * size + 3, f"warm {name} {turn}")
        answers(unequal, node, [*whole[: 3 * size], 1])
        source, cached = answers(unequal, node, whole)
        assert source in PREFILL and cached == 3 * size
    unequal.check_clean()
