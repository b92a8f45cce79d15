"""Pages: whole blocks between a cache of vLLM's and the slab, whatever lies inside; and caches that are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdbus.bus.errors import Broken
from pdbus.connector.slab import Slab
from pdbus.connector.vllm.copies import Copy, SlabAt, StepCopies
from pdbus.connector.vllm.pages import Pages
from pdbus.connector.vllm.working import WorkerSide

BLOCKS, SLAB_BLOCKS = 6, 4
PAGE = 2 * 4 * 8 * 4  # heads, slots, channels of K and V, bytes


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return {name: torch.randn(BLOCKS, 2, 4, 8) for name in ("l0", "l1", "l2")}


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(SLAB_BLOCKS * 3 * PAGE)
    yield made
    made.close()


def at(slab: Slab) -> SlabAt:
    return SlabAt(path=slab.path, size_bytes=slab.size_bytes, blocks=SLAB_BLOCKS)


def test_what_is_saved_comes_back_as_it_was(caches: dict[str, torch.Tensor], slab: Slab) -> None:
    worker = WorkerSide(tuple(caches), PAGE, heads=1)
    worker.register(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    save = Copy(request="r", source=(5, 0), target=(3, 1), ready=8)
    worker.save(StepCopies(slabs=(at(slab),), saves=(save,)))
    for cache in caches.values():
        cache.zero_()
    load = Copy(request="r", source=(3, 1), target=(2, 4))
    worker.load(StepCopies(slabs=(at(slab),), loads=(load,)))
    for name, cache in caches.items():
        assert torch.equal(cache[2], before[name][5])
        assert torch.equal(cache[4], before[name][0])
        assert not cache[[0, 1, 3, 5]].any()
    ended = worker.take_ended()
    assert ended is not None and (ended.saved, ended.loaded, ended.failed) == ((save,), (load,), ())
    assert worker.take_ended() is None
    worker.close()


def test_a_slab_that_is_gone_fails_the_copy_not_the_worker(caches: dict[str, torch.Tensor]) -> None:
    worker = WorkerSide(tuple(caches), PAGE, heads=1)
    worker.register(caches)
    load = Copy(request="r", source=(0,), target=(3,))
    worker.load(StepCopies(slabs=(SlabAt(path="/proc/self/fd/9999", size_bytes=10, blocks=1),), loads=(load,)))
    ended = worker.take_ended()
    assert ended is not None and ended.failed == (load,)
    assert worker.take_wrong_blocks() == {3}
    assert worker.take_wrong_blocks() == set()


def test_blocks_that_are_one_run_are_pages_whatever_their_inside() -> None:
    inside = torch.randn(BLOCKS, 4, 2, 8).transpose(1, 2)
    assert Pages({"l": inside}, ["l"], PAGE).blocks == BLOCKS


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(2, BLOCKS, 4, 8).transpose(0, 1), torch.zeros(BLOCKS, 2, 4, 9)[..., :8], torch.zeros(BLOCKS, 2, 4, 7)],
)
def test_blocks_that_are_not_one_run_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(Broken, match="not runs of"):
        Pages({"l": cache}, ["l"], PAGE)


def test_with_other_ranks_a_head_must_be_one_run(caches: dict[str, torch.Tensor]) -> None:
    assert Pages(caches, ["l0"], PAGE, heads=2).blocks == BLOCKS
    by_token = torch.randn(BLOCKS, 4, 2, 8).transpose(1, 2)
    with pytest.raises(Broken, match="not 2 runs, one for each head"):
        Pages({"l": by_token}, ["l"], PAGE, heads=2)


def test_each_rank_copies_into_its_own_slab(caches: dict[str, torch.Tensor], slab: Slab) -> None:
    other = Slab.create(SLAB_BLOCKS * 3 * PAGE)
    save = Copy(request="r", source=(5,), target=(3,), ready=4)
    worker = WorkerSide(tuple(caches), PAGE, heads=2, rank=1)
    worker.register(caches)
    worker.save(StepCopies(slabs=(at(other), at(slab)), saves=(save,)))
    assert not any(other.memory) and any(slab.memory)
    worker.close()
    other.close()


def test_a_layer_without_a_cache_is_refused() -> None:
    with pytest.raises(Broken, match="layer l9"):
        Pages({}, ["l9"], PAGE)
