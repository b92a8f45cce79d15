"""`pd bench plan`: what a transfer plan costs to make, and what to apply, for 1,000 scattered blocks.

The model is one of 32 layers with 8 KV heads of 128 channels in 16 bits. Nothing is read: permuting is measured apart.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import replace
from pdbus.connector.apply import Pairing, direct_runs, pair, permute, scratch_runs
from pdbus.connector.layout import blocks_for, geometry_for
from pdbus.connector.plan import TransferPlan, plan
from pdbus.connector.readable import layouts_of

ROUNDS = 5
COUNTS = (1_000, 4_000)  # source blocks, to show that the cost is linear
PERMUTED_BLOCKS = 8  # what one scratch buffer might hold

Shape = tuple[str, int, int]  # order, block size, ranks
PAIRS: dict[str, tuple[Shape, Shape]] = {
    "native to native": (("native", 16, 1), ("native", 16, 1)),
    "native, TP 1 to 2": (("native", 16, 1), ("native", 16, 2)),
    "native, TP 4 to 1": (("native", 16, 4), ("native", 16, 1)),
    "native, blocks of 64 to 16": (("native", 64, 1), ("native", 16, 1)),
    "NHD to NHD": (("NHD", 16, 1), ("NHD", 16, 1)),
    "NHD to HND": (("NHD", 16, 1), ("HND", 16, 1)),
    "NHD to native, TP 2 to 1": (("NHD", 16, 2), ("native", 16, 1)),
}


def run() -> dict[str, Any]:
    """Milliseconds, the median of some rounds; runs are those of all source ranks together."""
    return {"pairs": [_measure(name, there, here) for name, (there, here) in PAIRS.items()]}


def _layouts(shape: Shape, blocks: int) -> tuple[KVLayout, ...]:
    order, block_size, ranks = shape
    return layouts_of(replace(geometry_for(32, 8, 128, block_size, "float16"), layout=order, tp=ranks), blocks)


def _planned(there: Shape, here: Shape, source_blocks: int) -> Callable[[], TransferPlan]:
    """Makes the plan between two nodes that have twice the blocks that are read."""
    sources = _layouts(there, 2 * source_blocks)
    target = _layouts(here, 2 * blocks_for(source_blocks * there[1], here[1]))[0]
    return lambda: plan(sources, target)


def _measure(name: str, there: Shape, here: Shape) -> dict[str, Any]:
    make = _planned(there, here, max(COUNTS))
    made = make()
    row: dict[str, Any] = {"pair": name, "plan_ms": _ms(make)}
    for count in COUNTS:
        pairing = _paired(made, count)
        row[f"pair_ms_{count}"] = _ms(lambda: _paired(made, count))  # noqa: B023
        row[f"runs_ms_{count}"] = _ms(lambda: _runs(made, pairing))  # noqa: B023
        row[f"runs_{count}"] = _runs(made, pairing)
    row["permute_gbps"] = _permute_gbps(_planned(there, here, PERMUTED_BLOCKS)())
    return row


def _paired(made: TransferPlan, count: int) -> Pairing:
    chosen, tokens = random.Random(1), count * made.source_size
    source = chosen.sample(range(made.source_blocks), count)
    target = chosen.sample(range(made.target_blocks), blocks_for(tokens, made.target_size))
    return pair(made, 0, tokens, source, target)


def _runs(made: TransferPlan, pairing: Pairing) -> int:
    return sum(len(runs(rank, pairing).source) for rank in made.ranks for runs in (direct_runs, scratch_runs))


def _permute_gbps(made: TransferPlan) -> float | None:
    """10^9 bytes a second out of scratch, None when nothing goes through it."""
    rank = made.ranks[0]
    if not rank.reads:
        return None
    some = _paired(made, PERMUTED_BLOCKS)
    scratch = memoryview(bytearray(PERMUTED_BLOCKS * rank.scratch_bytes))
    region = memoryview(bytearray(b"\1") * made.target_bytes)  # its pages are there before it counts
    return PERMUTED_BLOCKS * rank.scratch_bytes / 1e6 / _ms(lambda: permute(made, rank, some, scratch, region))


def _ms(work: Callable[[], object]) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e6
