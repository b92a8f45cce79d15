"""Other workloads out of one: shorter, faster, with fewer tokens, its ticks spread. Pure, given a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import median_low

from .workload import Asked, Workload

ON_TICKS = 2  # requests for each distinct time from which on times count as ticks


def first(workload: Workload, count: int) -> Workload:
    return workload._replace(requests=workload.requests[:count])


def faster(workload: Workload, speed: float) -> Workload:
    """Everything `speed` times as fast, think times too."""
    requests = [a._replace(at_ns=round(a.at_ns / speed), think_ns=round(a.think_ns / speed)) for a in workload.requests]
    return workload._replace(requests=requests)


def scaled(workload: Workload, factor: float) -> Workload:
    """Prompts and answers of `factor` times the tokens, at least one each. Blocks keep their ids: as a block has whole
    tokens, prompts are scaled by what makes a block of the nearest size, and a note tells when that is another one."""
    block = max(1, round(workload.block_tokens * factor)) if workload.block_tokens else 0
    prompts = block / workload.block_tokens if block else factor
    requests = [
        a._replace(
            input_tokens=_scaled_prompt(a, workload.block_tokens, block) if block and a.hash_ids
            else max(1, round(a.input_tokens * prompts)),
            output_tokens=max(1, round(a.output_tokens * factor)),
        )
        for a in workload.requests
    ]  # fmt: skip
    notes = workload.notes
    if abs(prompts / factor - 1) > 0.01:
        notes += (f"prompts are scaled by {prompts:.4g}: a block of {workload.block_tokens} tokens becomes {block}",)
    return workload._replace(requests=requests, block_tokens=block, notes=notes)


def _scaled_prompt(asked: Asked, old: int, new: int) -> int:
    """The same count of blocks: a partial last one keeps at least a token."""
    full, rest = divmod(asked.input_tokens, old)
    return full * new + (max(1, round(rest * new / old)) if rest else 0)


def dequantised(workload: Workload, seed: int) -> Workload:
    """Requests that stand together on coarse ticks, spread over the tick. A workload whose times are its own stays as
    it is."""
    times = [asked.at_ns for asked in workload.requests]
    ticks = sorted(set(times))
    if len(times) < ON_TICKS * len(ticks) or len(ticks) < 2:
        return workload._replace(notes=(*workload.notes, "its times stand on no ticks: nothing to spread"))
    tick = median_low([b - a for a, b in pairwise(ticks)])
    widths = {a: min(tick, b - a) for a, b in pairwise([*ticks, ticks[-1] + tick])}
    chance = random.Random(seed)
    spread = [
        asked
        for at, group in groupby(workload.requests, key=lambda asked: asked.at_ns)
        for asked in _spread(list(group), at, widths[at], chance)
    ]
    begin = spread[0].at_ns
    return workload._replace(requests=[asked._replace(at_ns=asked.at_ns - begin) for asked in spread])


def _spread(group: Sequence[Asked], at: int, width: int, chance: random.Random) -> list[Asked]:
    """In the order that they had."""
    offsets = sorted(chance.randrange(width) for _ in group)
    return [asked._replace(at_ns=at + offset) for asked, offset in zip(group, offsets, strict=True)]
