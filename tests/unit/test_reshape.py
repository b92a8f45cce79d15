"""Other workloads out of one."""

from __future__ import annotations

from collections import Counter

import pytest

from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.reshape import dequantised, faster, first, scaled
from pdbus.nodes.replay.workload import Asked, Workload, best_hits

from tests.traces import trace

S = 1_000_000_000


def workload(*requests: Asked, block: int = 512) -> Workload:
    return Workload("w", requests, block)


def test_the_first_ones() -> None:
    made = first(workload(Asked(0, 1, 1), Asked(1, 1, 1)), 1)
    assert list(made.requests) == [Asked(0, 1, 1)]


def test_faster() -> None:
    made = faster(workload(Asked(0, 1, 1), Asked(4 * S, 1, 1, session=1, think_ns=S)), 2)
    assert [(a.at_ns, a.think_ns) for a in made.requests] == [(0, 0), (2 * S, S // 2)]


@pytest.mark.parametrize(("factor", "block", "tokens"), [(1, 512, 1300), (0.125, 64, 162), (2, 1024, 2600)])
def test_scaling_keeps_every_block(factor: float, block: int, tokens: int) -> None:
    made = scaled(workload(Asked(0, 1300, 10, (1, 2, 3))), factor)
    (asked,) = made.requests
    assert (made.block_tokens, asked.input_tokens, asked.hash_ids) == (block, tokens, (1, 2, 3))
    assert (asked.output_tokens, made.notes) == (max(1, round(10 * factor)), ())


def test_a_factor_that_makes_no_whole_block_is_told() -> None:
    made = scaled(workload(Asked(0, 513, 10, (1, 2))), 0.005)
    assert (made.block_tokens, made.requests[0].input_tokens, made.requests[0].output_tokens) == (3, 4, 1)
    assert made.notes == ("prompts are scaled by 0.005859: a block of 512 tokens becomes 3",)


def test_scaling_without_blocks() -> None:
    made = scaled(workload(Asked(0, 1000, 10), Asked(0, 1, 1), block=0), 0.0123)
    assert [(a.input_tokens, a.output_tokens) for a in made.requests] == [(12, 1), (1, 1)]
    assert made.notes == ()


def test_scaling_changes_no_hit() -> None:
    whole = import_workload(trace("mooncake_conversation.jsonl"))
    assert best_hits(scaled(whole, 1 / 32)).hit_blocks == best_hits(whole).hit_blocks


def test_ticks_are_spread_over_their_width_in_order() -> None:
    requests = [Asked(tick * S, 10 * tick + i, 1) for tick in range(5) for i in range(4)]
    made = dequantised(workload(*requests), seed=1)
    times = [a.at_ns for a in made.requests]
    assert [a.input_tokens for a in made.requests] == [a.input_tokens for a in requests]
    assert times == sorted(times) and len(set(times)) == 20 and times[0] == 0
    assert made == dequantised(workload(*requests), seed=1) != dequantised(workload(*requests), seed=2)


def test_the_public_trace_stands_on_no_tick_any_more() -> None:
    whole = import_workload(trace("mooncake_conversation.jsonl"))
    made = dequantised(whole, seed=0)
    at = [a.at_ns for a in made.requests]
    assert max(Counter(at).values()) == 1 and at == sorted(at)
    begin = whole.requests[0].at_ns - at[0]
    late = [a - b.at_ns - begin for a, b in zip(at, whole.requests, strict=True)]
    assert max(late) - min(late) < 3.1 * S
    assert len({a // (S // 4) for a in at}) > 7_000  # of 14,148 quarters of a second; 1,180 before


@pytest.mark.parametrize("times", [[0, 1, 2, 3], [0, 0, 1, 2], [5, 5, 5]])
def test_times_of_their_own_stay(times: list[int]) -> None:
    made = dequantised(workload(*(Asked(at, 1, 1) for at in times)), seed=1)
    assert [a.at_ns for a in made.requests] == times
    assert made.notes == ("its times stand on no ticks: nothing to spread",)
