"""Scratch is given out in parts that do not overlap, and is whole again when all are back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.scratch import BYTES_MIN, Scratch, scratch_bytes


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40))
def test_parts_never_overlap_and_come_back(steps: list[tuple[bool, int]]) -> None:
    scratch = Scratch(1_000, 100)
    taken: list[tuple[int, int]] = []
    for take, n in steps:
        if take:
            room = scratch.has_room(n)
            at = scratch.take(n)
            assert (at is not None) is room
            if at is not None:
                taken.append((at, n))
        elif taken:
            scratch.give_back(*taken.pop(n % len(taken)))
        places = [byte for at, size in taken for byte in range(at, at + size)]
        assert len(set(places)) == len(places) and all(1_000 <= byte < 1_100 for byte in places)
    for part in taken:
        scratch.give_back(*part)
    assert scratch.take(100) == 1_000


def test_none_has_no_room() -> None:
    assert Scratch(50, 0).take(1) is None


def test_two_of_a_peers_largest_blocks_fit() -> None:
    small, large = (layout_of(geometry_for(80, heads, 128, 16, "bfloat16"), 4) for heads in (1, 64))
    assert scratch_bytes(small) == BYTES_MIN
    assert scratch_bytes(large) == 2 * 128 * 80 * 2 * 64 * 128 * 2
