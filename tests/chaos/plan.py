"""Which faults, where and when: drawn by a seed, spread evenly over kinds, roles and steps."""

from __future__ import annotations

import random
from itertools import islice
from typing import NamedTuple

# of a request, in the order in which it meets them
STEPS = ("arriving", "asked", "accepted", "progress", "done", "claiming", "decoding")
AT_BOTH = (
    "kill control", "kill worker", "kill mover", "kill all", "freeze control", "freeze worker", "freeze mover",
    "terminate", "slow", "disk full",
)  # fmt: skip
# of the link to a prefill node: it hears nothing, or is not heard; in a partition one decode node alone is cut off
OF_LINK = ("cut", "silence", "delay", "deaf", "mute", "partition")
ROLES = ("prefill", "decode")
DYING = ("kill control", "kill all", "terminate")  # whose clients may hear of errors
PAIRS = tuple((kind, role) for role in ROLES for kind in (*AT_BOTH, *(OF_LINK if role == "prefill" else ())))


class Fault(NamedTuple):
    """`kind` happens to a node of `role`, or to the link to it, when a request is at `step`. All else that is drawn
    for it comes from `seed` and `number` alone, so that one can be run without those before it."""

    seed: int
    number: int
    kind: str
    role: str
    step: str

    def draw(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.number}")


def faults(seed: int, count: int) -> list[Fault]:
    """Every kind once before any of them a second time, and each of them at all steps before at one again."""
    draw = random.Random(seed)
    made: list[Fault] = []
    while len(made) < count:
        pairs = draw.sample(PAIRS, len(PAIRS))
        first = {pair: draw.randrange(len(STEPS)) for pair in pairs}
        drawn = ((pair, STEPS[(first[pair] + turn) % len(STEPS)]) for turn in range(len(STEPS)) for pair in pairs)
        for (kind, role), step in islice(drawn, count - len(made)):
            made.append(Fault(seed, len(made), kind, role, step))
    return made
