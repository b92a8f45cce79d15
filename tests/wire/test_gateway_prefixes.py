"""The gateway follows what nodes have cached, over real sockets: holes, late starts, restarts; and routes by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdbus.bus.wire import to_plain
from pdbus.connector.pool import BlockPool
from pdbus.nodes.gateway.prefixes import Prefixes

from tests.fake_node import FakeNode, answer_words
from tests.gateways import Gate, asked, decode_node, gate
from tests.loop import on_loop, until
from tests.machines.test_prefix_index_properties import SIZE, compute, snapshot

HELLO = answer_words(["hel", "lo"])
PROMPT = list(range(100, 120))


class Caching:
    """A node whose cache is a real block pool."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.pool = BlockPool(16, SIZE)
        node.publisher.provide("kv", lambda: snapshot(self.pool))

    def compute(self, prompt: Sequence[int]) -> None:
        compute(self.pool, prompt)
        events = [to_plain(event) for event in self.pool.take_events()]
        self.node.publisher.publish("kv", "blocks", {"events": events})

    def compute_unheard(self, prompt: Sequence[int]) -> None:
        """Its event is lost on the way."""
        compute(self.pool, prompt)
        self.pool.take_events()
        self.node.publisher._sequences[f"kv@{self.node.name}"] += 1


def caching_node(name: str, **says: Any) -> Caching:
    return Caching(decode_node(name, HELLO, block_size=SIZE, vocab_size=256, **says))


def prefixes(gated: Gate) -> Prefixes:
    assert gated.gateway.prefixes is not None
    return gated.gateway.prefixes


def knows_all(gated: Gate, *caches: Caching) -> bool:
    """Whether the gateway's copies equal the pools."""
    nodes = {node.name: node for node in gated.gateway.fleet.ready()}
    followed = prefixes(gated)
    return all(
        cache.node.name in nodes and followed.index(nodes[cache.node.name]).same_as(cache.pool.shareable())
        for cache in caches
    )


@on_loop
async def test_a_late_start_knows_what_was_cached_before() -> None:
    d1, d2 = caching_node("d1"), caching_node("d2")
    d1.compute(PROMPT)
    async with gate([d1.node, d2.node], policy="cost") as gated:
        await until(lambda: knows_all(gated, d1, d2))
        assert len(d1.pool.shareable()) == len(PROMPT) // SIZE


@on_loop
async def test_a_hole_is_repaired() -> None:
    d1 = caching_node("d1")
    async with gate([d1.node], policy="cost") as gated:
        d1.compute(PROMPT)
        await until(lambda: knows_all(gated, d1))
        d1.compute_unheard([1] * 12)
        assert not knows_all(gated, d1)
        d1.compute([2] * 8)
        await until(lambda: knows_all(gated, d1))


@on_loop
async def test_a_restarted_nodes_cache_is_empty_though_it_says_nothing() -> None:
    d1 = caching_node("d1")
    d1.compute(PROMPT)
    async with gate([d1.node], policy="cost") as gated:
        await until(lambda: len(prefixes(gated).index(gated.gateway.fleet.ready()[0])))
        address = d1.node.address
        d1.node.close()
        await gated.ready(0)
        again = FakeNode(HELLO, "d1")
        again.status = d1.node.status
        again.bind(address)
        gated.nodes.append(again)
        await gated.ready(1)
        restarted = Caching(again)
        await until(lambda: knows_all(gated, restarted))
        restarted.compute([3] * 8)
        await until(lambda: knows_all(gated, restarted))


@on_loop
async def test_prompts_go_where_their_beginning_is_cached() -> None:
    d1, d2 = caching_node("d1"), caching_node("d2")
    async with gate([d1.node, d2.node], policy="prefix") as gated:
        d2.compute(PROMPT)
        await until(lambda: knows_all(gated, d1, d2) and len(d2.pool.shareable()))
        for i in range(4):
            await gated.post(prompt=[*PROMPT, i])
        assert [asked(d1.node), asked(d2.node)] == [0, 4]


@on_loop
async def test_text_is_tokenized_like_at_the_node() -> None:
    """With the tokenizer that the node gives; here one token a byte."""
    d1, d2 = caching_node("d1"), caching_node("d2")
    text = "shared beginning, other end"
    async with gate([d1.node, d2.node], policy="prefix") as gated:
        d2.compute(list(text.encode()))
        await until(lambda: knows_all(gated, d1, d2) and prefixes(gated)._reader is not None)
        for i in range(4):
            await gated.post(prompt=f"{text} {i}")
        assert [asked(d1.node), asked(d2.node)] == [0, 4]


@on_loop
async def test_without_a_tokenizer_text_is_routed_by_load() -> None:
    d1 = decode_node("d1", HELLO)
    d1.tokenizer = None
    async with gate([d1], policy="cost") as gated:
        assert (await gated.post()).status_code == 200
