"""Prompts honour block ids: what shall be a prefix hit begins with the same tokens, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdbus.bus.hashing import block_hashes
from pdbus.nodes.replay.load_prompts import Prompts
from pdbus.nodes.replay.reshape import scaled
from pdbus.nodes.replay.workload import Asked, Workload, best_hits

SHARED = [
    Asked(0, 150, 1, (1, 2, 3)),
    Asked(0, 190, 1, (1, 2, 4)),
    Asked(0, 150, 1, (1, 2, 3)),
    Asked(0, 128, 1, (5, 2)),
    Asked(0, 100, 1),
    Asked(0, 100, 1),
]
WORKLOAD = Workload("w", SHARED, 64)


def prompts(workload: Workload, seed: int = 0, vocab: int = 256) -> list[list[int]]:
    made = Prompts(workload, vocab, seed)
    return [list(made.tokens(index)) for index in range(len(workload.requests))]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_lengths_are_those_asked_for() -> None:
    assert [len(prompt) for prompt in prompts(WORKLOAD)] == [asked.input_tokens for asked in SHARED]


def test_the_same_beginning_of_ids_is_the_same_beginning_of_tokens() -> None:
    a, b, again, other, *_ = prompts(WORKLOAD)
    assert again == a
    assert 128 <= shared(a, b) < 144  # the third block differs within a block of any cache
    assert shared(a, other) < 16


def test_without_ids_nothing_is_shared() -> None:
    *_, one, two = prompts(WORKLOAD)
    assert shared(one, two) < 16


@pytest.mark.parametrize("factor", [1, 0.5, 0.26, 2])
def test_hits_of_a_cache_are_those_that_are_possible(factor: float) -> None:
    """By the hashes that nodes compute, for scaled blocks that fit no block of the cache, too."""
    workload = scaled(WORKLOAD, factor)
    known: set[bytes] = set()
    hit = 0
    for prompt in prompts(workload):
        hashes = block_hashes(prompt, 16)
        usable = hashes[: (len(prompt) - 1) // 16]
        hit += 16 * next((i for i, h in enumerate(usable) if h not in known), len(usable))
        known.update(hashes)
    assert hit == best_hits(workload, 16).hit_tokens > 0


@pytest.mark.parametrize("vocab", [16, 256, 49_152, 128_256])
def test_ids_are_in_the_vocabulary_and_above_its_control_tokens(vocab: int) -> None:
    ids = {token for prompt in prompts(WORKLOAD, vocab=vocab) for token in prompt}
    assert min(32, 5) <= min(ids) and max(ids) < vocab
    assert len(ids) > min(vocab, 400) / 3


def test_another_seed_asks_other_prompts() -> None:
    assert prompts(WORKLOAD, seed=1) == prompts(WORKLOAD, seed=1)
    assert all(shared(a, b) < 16 for a, b in zip(prompts(WORKLOAD, 1), prompts(WORKLOAD, 2), strict=True))
