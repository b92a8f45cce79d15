"""The slab: shared through /proc, aligned, and refused in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.errors import Broken, ConfigError
from pdbus.connector import slab as slab_module
from pdbus.connector.slab import Slab


def test_two_mappings_share_their_bytes() -> None:
    one = Slab.create(100_000)
    other = Slab.open(one.path, 100_000)
    one.populate(one.size_bytes)
    one.memory[99_999] = 7
    assert other.memory[99_999] == 7
    other.memory[0] = 9
    assert one.memory[0] == 9
    other.close()
    one.close()


@pytest.mark.parametrize("size", [5, 4096, slab_module.HUGE_PAGE_BYTES, 3 * slab_module.HUGE_PAGE_BYTES + 5])
def test_addresses_are_those_of_huge_pages_and_sizes_exact(size: int) -> None:
    slab = Slab.create(size)
    assert slab.address % slab_module.HUGE_PAGE_BYTES == 0
    assert (slab.size_bytes, len(slab.memory)) == (size, size)
    slab.memory[size - 1] = 3
    slab.populate(slab.size_bytes)
    assert slab.memory[size - 1] == 3
    slab.close()


def test_bytes_written_by_one_stay_when_the_other_populates() -> None:
    """A mover that is replaced populates a slab in use."""
    size = 4 * slab_module.HUGE_PAGE_BYTES
    one = Slab.create(size)
    one.memory[:] = bytes(range(256)) * (size // 256)
    other = Slab.open(one.path, size)
    other.populate(other.size_bytes)
    assert one.memory == other.memory == bytes(range(256)) * (size // 256)
    other.close()
    one.close()


def test_slab_is_gone_with_its_creator() -> None:
    slab = Slab.create(10)
    slab.close()
    with pytest.raises(Broken, match="cannot open the KV slab"):
        Slab.open(slab.path, 10)


def test_closing_twice_and_under_a_reader_is_harmless() -> None:
    slab = Slab.create(10)
    looking = slab.memory[:3]
    slab.close()
    slab.close()
    assert bytes(looking) == b"\x00\x00\x00"


def test_smaller_slab_than_expected_is_refused() -> None:
    slab = Slab.create(10)
    with pytest.raises(Broken, match="not 1000000"):
        Slab.open(slab.path, 1_000_000)
    slab.close()


def test_more_than_the_machine_has_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory: the KV cache needs .* MiB of memory are free"):
        Slab.create(1 << 50)


def test_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        Slab.create(0)


def test_available_memory_is_read() -> None:
    assert 0 < slab_module.available_bytes() < 1 << 62
    assert Path("/proc/meminfo").exists()
