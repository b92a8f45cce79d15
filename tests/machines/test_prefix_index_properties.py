"""The gateway's copy of a node's prefix cache against the block pool that publishes it."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from pdbus.bus.hashing import block_hashes
from pdbus.bus.wire import to_plain
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool
from pdbus.nodes.gateway.prefix_index import PrefixIndex

SIZE = 4
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)  # few tokens, so that many share a beginning
steps = st.lists(st.one_of(prompts, st.just("worker lost"), st.just("missed")), max_size=30)


def compute(pool: BlockPool, prompt: Sequence[int]) -> None:
    """A request's life, as far as its cache goes."""
    hashes = block_hashes(prompt, SIZE)
    reserved = pool.reserve(len(prompt), hashes, Holder.HELD)
    if reserved is None:
        return
    for i, block_hash in enumerate(hashes):
        pool.publish(reserved.blocks[i], block_hash, hashes[i - 1] if i else b"")
    pool.drop(reserved.blocks, Holder.HELD)


def snapshot(pool: BlockPool) -> dict[str, list[str]]:
    return {"hashes": [block_hash.hex() for block_hash in pool.shareable()]}


@given(steps, prompts)
def test_the_index_equals_the_pool_whatever_happens(script: list[list[int] | str], wanted: list[int]) -> None:
    """Small pools evict all the time. What was missed is made good by a snapshot."""
    pool, index = BlockPool(8, SIZE), PrefixIndex()
    for step in script:
        if step == "worker lost":
            pool.reset()
        elif isinstance(step, list):
            compute(pool, step)
        events = [to_plain(event) for event in pool.take_events()]
        if step == "missed":
            compute(pool, [7] * SIZE)
            pool.take_events()
            index.apply("snapshot", snapshot(pool))
        else:
            index.apply("blocks", {"events": events})
        assert index.same_as(pool.shareable())
        hashes = block_hashes(wanted, SIZE)
        assert index.match(hashes) == pool.match(hashes)


def test_what_is_not_understood_changes_nothing() -> None:
    index = PrefixIndex()
    index.apply("snapshot", {"hashes": ["ab" * 16]})
    for event, data in (
        ("snapshot", {"hashes": [3]}),
        ("snapshot", {"hashes": ["no hex"]}),
        ("snapshot", {"hashes": 7}),
        ("blocks", {"events": 7}),
        ("blocks", {"events": [{"t": "BlockStored", "block_hash": []}]}),
        ("other", {}),
        ("blocks", {}),
        ("blocks", {"events": [{"t": "BlockMoved", "block_hash": b""}]}),
    ):
        index.apply(event, data)
    assert index.same_as([bytes.fromhex("ab" * 16)])
