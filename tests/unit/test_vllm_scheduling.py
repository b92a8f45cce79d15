"""The scheduler's side of vLLM's connector, on a fake core and fake requests: which copies are ordered, and when the
slab's blocks are given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.connector.vllm.copies import CopiesEnded, Copy, SlabAt, of_all_ranks
from pdbus.connector.vllm.events import EngineEvent, KvWanted, PromptCame, PromptSaved, RequestLeft
from pdbus.connector.vllm.scheduling import SchedulerSide
from pdbus.connector.vllm.wants import Want, WantState

SIZE = 4
TOKEN = "ab" * 16
SLAB = SlabAt(path="/nowhere", size_bytes=0, blocks=0)


class FakeDoor:
    def __init__(self) -> None:
        self.told: list[EngineEvent] = []
        self.wants: dict[str, Want] = {}
        self.blocks: tuple[int, ...] = (10, 11, 12)
        self.rests = 0

    def tell(self, event: EngineEvent) -> None:
        self.told.append(event)
        if isinstance(event, KvWanted):
            want = Want(event.request, event.id, "p", event.prompt_tokens, event.have, self.blocks)
            self.wants[event.request] = want
        elif isinstance(event, RequestLeft):
            self.wants.pop(event.request, None)

    def prompt_blocks(self, request: str) -> tuple[int, ...]:
        return self.blocks

    def want(self, request: str) -> Want | None:
        return self.wants.get(request)

    def rest(self) -> None:
        self.rests += 1

    @property
    def left(self) -> list[str]:
        return [event.request for event in self.told if isinstance(event, RequestLeft)]


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor()


def side_of(role: Any, door: FakeDoor, ranks: int = 1) -> SchedulerSide:
    return SchedulerSide(role, SIZE, (SLAB,) * ranks, door, digest=lambda ids: bytes(ids), new_id=lambda: b"i" * 16)


def request_of(tokens: int = 10, name: str = "r", **changed: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": name, "prompt_token_ids": list(range(tokens)), "num_tokens": tokens, "mm_features": [],
        "lora_request": None, "pooling_params": None, "kv_transfer_params": {"pdbus_pair": TOKEN},
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


class Tables:
    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks

    def get_block_ids(self, request: str) -> tuple[list[int], ...]:
        return (self.blocks,)


def scheduled(computed: int, tokens: int, *, new: bool, blocks: list[int]) -> Any:
    rows = [SimpleNamespace(req_id="r", num_computed_tokens=computed)] if new else []
    cached = SimpleNamespace(req_ids=[] if new else ["r"], num_computed_tokens=[] if new else [computed])
    return SimpleNamespace(
        scheduled_new_reqs=rows, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": tokens},
        kv_connector_block_state=Tables(blocks), total_num_scheduled_tokens=tokens,
    )  # fmt: skip


NOTHING = SimpleNamespace(
    scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={}, kv_connector_block_state=None, total_num_scheduled_tokens=0,
)  # fmt: skip


# ---------------------------------------------------------------- decode


def test_a_request_is_held_back_until_its_kv_is_there(door: FakeDoor) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    assert side.matched(request, 0) is None
    assert side.matched(request, 0) is None
    assert len(door.told) == 1
    door.wants["r"].state = WantState.READY
    assert side.matched(request, 0) == 9


def test_a_scheduler_with_nothing_but_requests_that_wait_rests(door: FakeDoor) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    side.step(NOTHING)
    assert door.rests == 0
    side.matched(request, 0)
    side.step(NOTHING)
    assert door.rests == 1
    side.step(scheduled(0, 1, new=False, blocks=[]))
    assert door.rests == 1, "others run: their tokens are not to be late"
    door.wants["r"].state = WantState.FAILED
    side.matched(request, 0)
    side.step(NOTHING)
    assert door.rests == 1


def test_the_blocks_that_hold_what_is_missing_are_loaded_once(door: FakeDoor) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    side.matched(request, 4)
    door.wants["r"].state = WantState.READY
    assert side.matched(request, 4) == 5
    side.allocated(request, [7, 5, 6], 5)
    assert side.step(NOTHING).loads == (Copy(request="r", source=(11, 12), target=(5, 6)),)
    assert side.step(NOTHING).loads == ()
    assert side.matched(request, 0) == 0  # preempted: computed again


def test_the_slabs_blocks_are_kept_until_the_load_has_ended(door: FakeDoor) -> None:
    """An aborted request's vLLM blocks may be in the prefix cache already: what is copied into them must be right."""
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    side.matched(request, 0)
    door.wants["r"].state = WantState.READY
    side.allocated(request, [7, 5, 6], side.matched(request, 0) or 0)
    (copy,) = side.step(NOTHING).loads
    side.finished(request)
    assert door.left == []
    side.copied([CopiesEnded(loaded=(copy,))])
    assert "r" in door.left
    assert len(side) == 0


@pytest.mark.parametrize("why", ["failed", "unknown", "evicted"])
def test_without_its_kv_the_prompt_is_computed(door: FakeDoor, why: str) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    assert side.matched(request, 4) is None
    door.wants["r"].state = WantState.FAILED if why == "failed" else WantState.READY
    if why == "unknown":
        door.wants.clear()
    assert side.matched(request, 0 if why == "evicted" else 4) == 0
    assert door.left == ["r"]


def test_what_vllm_will_not_load_is_given_back(door: FakeDoor) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    side.matched(request, 0)
    door.wants["r"].state = WantState.READY
    side.matched(request, 0)
    side.allocated(request, [7, 5, 6], 0)
    assert door.left == ["r"]
    assert side.step(NOTHING).loads == ()


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (9, 8)])
def test_nothing_is_asked_for_that_is_there(door: FakeDoor, tokens: int, computed: int) -> None:
    """The last position is computed here whatever happens."""
    side, request = side_of("decode", door), request_of(tokens)
    side.arrived(request)
    assert side.matched(request, computed) == 0
    assert door.told == []


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_transfer_params": None}, {"kv_transfer_params": {"pdbus_pair": "x"}}, {"mm_features": ["image"]},
        {"lora_request": "adapter"}, {"pooling_params": "embed"}, {"prompt_token_ids": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_cannot_be_handed_over_is_vllms_alone(door: FakeDoor, role: str, changed: dict[str, Any]) -> None:
    side, request = side_of(role, door), request_of(**changed)
    side.arrived(request)
    assert side.matched(request, 0) == 0
    side.allocated(request, [1, 2, 3], 0)
    side.finished(request)
    assert door.told == []


def test_an_aborted_request_that_waits_leaves_at_once(door: FakeDoor) -> None:
    side, request = side_of("decode", door), request_of()
    side.arrived(request)
    side.matched(request, 0)
    side.finished(request)
    assert door.left == ["r"]


# ---------------------------------------------------------------- prefill


def test_chunks_are_saved_from_where_the_last_ended(door: FakeDoor) -> None:
    side, request = side_of("prefill", door), request_of()
    side.arrived(request)
    assert isinstance(door.told[0], PromptCame)
    first = side.step(scheduled(0, 5, new=True, blocks=[3, 4])).saves
    second = side.step(scheduled(5, 5, new=False, blocks=[3, 4, 9])).saves
    assert first == (Copy(request="r", source=(3, 4), target=(10, 11), ready=5),)
    assert second == (Copy(request="r", source=(4, 9), target=(11, 12), ready=10),)
    assert side.step(scheduled(10, 1, new=False, blocks=[3, 4, 9])).saves == ()  # it decodes


def test_a_cached_prefix_is_saved_too(door: FakeDoor) -> None:
    side = side_of("prefill", door)
    side.arrived(request_of())
    (save,) = side.step(scheduled(8, 2, new=True, blocks=[3, 4, 9])).saves
    assert save == Copy(request="r", source=(3, 4, 9), target=(10, 11, 12), ready=10)


def test_saves_count_once_their_step_has_ended(door: FakeDoor) -> None:
    """vLLM may plan a step while the one before still runs, and ends a request before it tells of the copies."""
    side, request = side_of("prefill", door), request_of()
    side.arrived(request)
    (save,) = side.step(scheduled(0, 10, new=True, blocks=[3, 4, 9])).saves
    side.finished(request)
    assert len(door.told) == 1
    side.copied([CopiesEnded(saved=(save,))])
    assert door.told[1:] == [PromptSaved(request="r", ready=10), RequestLeft(request="r")]


def test_a_preempted_prompt_is_saved_from_its_new_blocks(door: FakeDoor) -> None:
    side = side_of("prefill", door)
    side.arrived(request_of())
    side.step(scheduled(0, 5, new=True, blocks=[3, 4]))
    assert side.step(scheduled(0, 5, new=False, blocks=[6, 7])).saves == ()  # those tokens are saved
    (save,) = side.step(scheduled(5, 5, new=False, blocks=[6, 7, 8])).saves
    assert (save.source, save.target) == ((7, 8), (11, 12))


def test_without_room_nothing_is_saved(door: FakeDoor) -> None:
    door.blocks = ()
    side = side_of("prefill", door)
    side.arrived(request_of())
    assert side.step(scheduled(0, 10, new=True, blocks=[3, 4, 9])).saves == ()


def test_a_save_that_fails_ends_the_offer(door: FakeDoor) -> None:
    side, request = side_of("prefill", door), request_of()
    side.arrived(request)
    (save,) = side.step(scheduled(0, 10, new=True, blocks=[3, 4, 9])).saves
    side.copied([CopiesEnded(failed=(save,))])
    assert door.left == ["r"]
    assert not any(isinstance(event, PromptSaved) for event in door.told)


# ---------------------------------------------------------------- several ranks

A, B = (Copy(request=name, source=(3,), target=(10,), ready=4) for name in "ab")


@pytest.mark.parametrize(
    ("told", "saved", "failed"),
    [
        ([CopiesEnded(saved=(A, B)), CopiesEnded(saved=(B, A))], (A, B), ()),
        ([CopiesEnded(saved=(A, B)), CopiesEnded(saved=(A,), failed=(B,))], (A,), (B,)),
        ([CopiesEnded(failed=(A,)), CopiesEnded(failed=(A,))], (), (A,)),
        ([CopiesEnded(saved=(A,))], (), (A,)),
    ],
    ids=["all", "one failed", "both failed", "one said nothing"],
)
def test_a_copy_is_made_when_every_rank_has_made_its_share(told: Any, saved: Any, failed: Any) -> None:
    ended = of_all_ranks(2, told)
    assert (ended.saved, ended.loaded, ended.failed) == (saved, (), failed)


def test_a_prompt_that_one_rank_could_not_save_is_not_offered(door: FakeDoor) -> None:
    """And its blocks are given back once, when the request is over too."""
    side, request = side_of("prefill", door, ranks=2), request_of()
    side.arrived(request)
    step = side.step(scheduled(0, 10, new=True, blocks=[3, 4, 9]))
    assert step.slabs == (SLAB, SLAB)
    side.copied([CopiesEnded(saved=step.saves), CopiesEnded(failed=step.saves)])
    assert not any(isinstance(event, PromptSaved) for event in door.told)
    side.finished(request)
    assert door.left == ["r", "r"] and len(side) == 0
