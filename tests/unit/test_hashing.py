"""Block hashes must be the same on every node and in every release: they name content across processes."""

from __future__ import annotations

from pdbus.bus.hashing import block_hashes, prompt_digest
from pdbus.bus.wire import pack_u32


def test_the_values_are_fixed() -> None:
    assert prompt_digest(pack_u32([1, 2, 3])).hex() == "a76f94d1118f3bcfe6d1006dda205ce7"
    assert [h.hex() for h in block_hashes(range(5), 2)] == [
        "cf68e872ea7766f66c3911ab3c2c7521",
        "793cd326382868b437dd2ac1f1abeda0",
    ]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(range(n), 4)) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_stands_for_the_whole_prefix() -> None:
    one, two = block_hashes([1, 2, 3, 4], 2), block_hashes([9, 2, 3, 4], 2)
    assert one[1] != two[1]
    assert block_hashes([1, 2, 3, 4, 5, 6], 2)[:2] == one


def test_ids_and_packed_ids_are_the_same() -> None:
    assert block_hashes(pack_u32([5, 6, 7]), 1) == block_hashes([5, 6, 7], 1)
