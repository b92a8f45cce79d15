"""Runs cut into slices, each fit for one post."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pdbus.connector.apply import Runs
from pdbus.connector.runs import slices


def runs(*each: tuple[int, int, int]) -> Runs:
    return Runs(*(np.array(column, np.uint64) for column in zip(*each, strict=True)))


def bytes_of(some: Runs) -> dict[int, int]:
    """Where every byte comes from, by where it goes."""
    each = zip(*(column.tolist() for column in some), strict=True)
    return {to + i: at + i for at, to, length in each for i in range(length)}


@pytest.mark.parametrize("count", [1, 2, 40])
def test_slices_hold_every_byte_once_and_are_bounded(count: int) -> None:
    chosen = random.Random(count)
    whole = runs(*((chosen.randrange(10_000), 1_000 * i, chosen.randint(1, 999)) for i in range(count)))
    pieces = slices(whole, 7, 256)
    assert all(len(piece.source) <= 7 and piece.bytes <= 256 for piece in pieces)
    together = [item for piece in pieces for item in bytes_of(piece).items()]
    assert len(together) == whole.bytes and dict(together) == bytes_of(whole)


def test_runs_come_in_order_of_source() -> None:
    """So that neighbours there are posted together."""
    (piece,) = slices(runs((9, 0, 1), (3, 1, 1), (5, 2, 1)), 10, 10)
    assert piece.source.tolist() == [3, 5, 9]


def test_nothing_is_no_slice() -> None:
    assert not slices(Runs(*(np.empty(0, np.uint64) for _ in range(3))), 10, 10)
