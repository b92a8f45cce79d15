"""The stages that a step's rows pass through, each with some of the model's layers: what one hands to the next.

A step is cut into parts of PART_ROWS rows or more, up to PARTS_PER_STAGE for every stage: while a stage computes one,
the stage before it computes the next (Huang et al., 2019, arXiv:1811.06965).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdbus.connector.layout import layers_of

from .attention import Span

PART_ROWS = 32  # the products of fewer rows are bound by reading the weights, which each part does again
PARTS_PER_STAGE = 2  # stages stand idle at a step's begin and end: for a fifth of it with 2 stages and 4 parts

Part = list[tuple[int, Span]]  # spans, or pieces of them, each with its place in the step


class Stage:
    """`index` of `count`. Alone, everything is as it is."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index = index
        self.count = count

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, layers: int) -> range:
        """Which of the model's are this stage's."""
        return layers_of(layers, self.count, self.index)

    def parts(self, spans: Sequence[Span]) -> list[Part]:
        """A step's spans in parts, rows in the same order. Of one stage alone, one part."""
        rows = sum(span.count for span in spans)
        return cut(spans, max(PART_ROWS, -(-rows // (self.count * PARTS_PER_STAGE))) if self.count > 1 else rows)

    def give(self, rows: Tensor) -> None:
        """Hand [T, hidden] to the next stage."""
        raise NotImplementedError

    def take(self, rows: Tensor) -> Tensor:
        """What the stage before gives, into `rows` [T, hidden]."""
        raise NotImplementedError


class SentStage(Stage):
    """Of processes: rows go to the rank `each` ranks on, and are on their way while the next part is computed."""

    def __init__(self, rank: int, each: int, count: int) -> None:
        super().__init__(rank // each, count)
        self._before, self._next = rank - each, rank + each
        self._sending: tuple[Any, Tensor] | None = None  # it must not be freed before it has left

    def give(self, rows: Tensor) -> None:
        if self._sending:
            self._sending[0].wait()
        rows = rows.contiguous()
        self._sending = dist.isend(rows, self._next), rows

    def take(self, rows: Tensor) -> Tensor:
        dist.recv(rows, self._before)
        return rows


def cut(spans: Sequence[Span], rows: int) -> list[Part]:
    """Into parts of so many rows, the last one of what is left. What a span wants stays with its last positions."""
    parts: list[Part] = [[]]
    room = rows
    for i, span in enumerate(spans):
        at = span.start
        while at < span.end:
            if not room:
                parts.append([])
                room = rows
            count = min(room, span.end - at)
            wanted = max(0, at + count - max(at, span.end - span.wanted))
            parts[-1].append((i, Span(at, count, span.blocks, wanted)))
            at, room = at + count, room - count
    return parts


def joined(logits: Sequence[Tensor | None], parts: Sequence[Part]) -> Tensor | None:
    """The parts' logits under each other, without their padding."""
    wanted = [sum(span.wanted for _, span in part) for part in parts]
    some = [rows[:count] for rows, count in zip(logits, wanted, strict=True) if rows is not None]
    return torch.cat(some) if some else None
