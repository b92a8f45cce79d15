"""What the time of a step depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdbus.connector.ipc import StepRow


class Shape(NamedTuple):
    """A step: so many `tokens` of prompts after `context` tokens on the average, and `rows` that decode one token each
    after `row_context`."""

    tokens: int
    context: float
    rows: int
    row_context: float


def shape_of(step: Sequence[StepRow]) -> Shape:
    """A row of one sampled position decodes, whatever it is called elsewhere."""
    tokens = rows = context = row_context = 0
    for row in step:
        if row.count == 1 and row.sample:
            rows += 1
            row_context += row.start
        else:
            tokens += row.count
            context += row.start * row.count
    return Shape(tokens, context / tokens if tokens else 0.0, rows, row_context / rows if rows else 0.0)
