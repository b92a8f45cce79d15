"""The scheduler's side of the connector: vLLM's calls as events for the core, its decisions as numbers for vLLM.

A decode server's request is held back (vLLM asks again each step) until its KV is in the slab or will not come; only
then does vLLM give it blocks, and the copy is part of its first step. So no read ever writes into vLLM's memory, and
a hand-off that fails is a prompt that vLLM computes as if it had never been handed over.

A request's slab blocks are given back when it is over *and* the step that copies from or into them has reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..layout import blocks_for
from .copies import CopiesEnded, Copy, SlabAt, StepCopies, of_all_ranks
from .events import EngineEvent, KvWanted, PromptCame, PromptSaved, RequestLeft
from .pair import Pair, pair_of
from .wants import Want, WantState


class Door(Protocol):
    """The core, from another thread than its loop's (control.py)."""

    def tell(self, event: EngineEvent) -> None: ...

    def prompt_blocks(self, request: str) -> tuple[int, ...]: ...

    def want(self, request: str) -> Want | None: ...

    def rest(self) -> None:
        """Wait until some KV is there or will not come, or for a while."""


@dataclass(slots=True)
class _Tracked:
    pair: Pair
    prompt_tokens: int
    digest: bytes
    asked: bool = False
    over: bool = False  # nothing more is saved or loaded
    saved: int = 0  # tokens that steps so far have saved or will
    copying: int = 0  # copies that no step has reported yet
    finished: bool = False


class SchedulerSide:
    """`slabs`: of all ranks. `digest` hashes token ids; `new_id` mints 128 bits that were never used. All calls from
    vLLM's scheduler."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        block_size: int,
        slabs: tuple[SlabAt, ...],
        door: Door,
        *,
        digest: Callable[[Sequence[int]], bytes],
        new_id: Callable[[], bytes],
    ) -> None:
        self._role = role
        self._block_size = block_size
        self._slabs = slabs
        self._door = door
        self._digest = digest
        self._new_id = new_id
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Copy] = []

    def __len__(self) -> int:
        """Requests that are handed over or may be."""
        return len(self._tracked)

    def arrived(self, request: Any) -> None:
        """A request was given to this server. Without a pair, or with what is not only text, it is vLLM's alone."""
        pair = pair_of(getattr(request, "kv_transfer_params", None))
        ids = request.prompt_token_ids
        if pair is None or not ids or not _is_text(request) or request.request_id in self._tracked:
            return
        tracked = _Tracked(pair, len(ids), self._digest(ids))
        self._tracked[request.request_id] = tracked
        if self._role == "prefill":
            self._door.tell(
                PromptCame(
                    request=request.request_id,
                    pair=pair.token,
                    prompt_tokens=tracked.prompt_tokens,
                    prompt_digest=tracked.digest,
                )
            )

    # ------------------------------------------------------------ decode

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens beyond `computed` will be loaded in the step that first runs it; None: not known yet. The
        last position is always computed here: its logits are wanted."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.over or self._role != "decode":
            return 0
        missing = tracked.prompt_tokens - 1 - computed
        if missing <= 0 or request.num_tokens != tracked.prompt_tokens:
            return self._give_up(request.request_id, tracked)
        if not tracked.asked:
            tracked.asked = True
            self._door.tell(self._wanted(request.request_id, tracked, computed))
        want = self._door.want(request.request_id)
        if want is not None and want.state is WantState.FETCHING:
            return None
        if want is None or want.state is WantState.FAILED or computed < want.have:  # evicted what it builds upon
            return self._give_up(request.request_id, tracked)
        return missing

    def _wanted(self, request: str, tracked: _Tracked, computed: int) -> KvWanted:
        return KvWanted(
            request=request,
            id=self._new_id(),
            pair=tracked.pair.token,
            node=tracked.pair.node,
            prompt_tokens=tracked.prompt_tokens,
            prompt_digest=tracked.digest,
            have=computed - computed % self._block_size,
        )

    def _give_up(self, request: str, tracked: _Tracked) -> int:
        tracked.over = True
        if tracked.asked:
            self._door.tell(RequestLeft(request=request))
        return 0

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """vLLM has given it blocks, and will run it in this step; `external` tokens are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.over or self._role != "decode":
            return
        want = self._door.want(request.request_id)
        if external <= 0 or want is None or want.state is not WantState.READY:
            self._give_up(request.request_id, tracked)
            return
        first = (tracked.prompt_tokens - 1 - external) // self._block_size
        end = blocks_for(tracked.prompt_tokens - 1, self._block_size)
        copy = Copy(request=request.request_id, source=want.blocks[first:end], target=tuple(blocks[first:end]))
        self._loads.append(copy)
        tracked.over = True
        tracked.copying += 1

    # ------------------------------------------------------------ steps

    def step(self, scheduled: Any) -> StepCopies:
        """What the worker is to copy in this step. Where nothing runs and KV is awaited, vLLM would ask again at once,
        and take the core that computes it."""
        if not scheduled.total_num_scheduled_tokens and any(t.asked and not t.over for t in self._tracked.values()):
            self._door.rest()
        loads, self._loads = tuple(self._loads), []
        saves = tuple(self._saves(scheduled)) if self._role == "prefill" else ()
        return StepCopies(slabs=self._slabs, loads=loads, saves=saves)

    def _saves(self, scheduled: Any) -> list[Copy]:
        cached = scheduled.scheduled_cached_reqs
        begins = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        begins += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        saves = []
        for request, computed in begins:
            tracked = self._tracked.get(request)
            blocks = self._door.prompt_blocks(request) if tracked is not None else ()
            if tracked is None or not blocks:
                continue
            ready = min(tracked.prompt_tokens, computed + scheduled.num_scheduled_tokens[request])
            if ready > tracked.saved:
                saves.append(self._save(request, tracked, scheduled.kv_connector_block_state, blocks, ready))
        return saves

    def _save(self, request: str, tracked: _Tracked, tables: Any, blocks: tuple[int, ...], ready: int) -> Copy:
        """All of what is not saved yet, the blocks of a prefix that was cached too."""
        (table,) = tables.get_block_ids(request)
        first, end = tracked.saved // self._block_size, blocks_for(ready, self._block_size)
        tracked.saved = ready
        tracked.copying += 1
        return Copy(request=request, source=tuple(table[first:end]), target=blocks[first:end], ready=ready)

    def copied(self, told: Sequence[CopiesEnded]) -> None:
        """A step has ended, and with it its copies, as each rank tells of its own."""
        ended = of_all_ranks(len(self._slabs), told)
        for copy in ended.saved:
            self._door.tell(PromptSaved(request=copy.request, ready=copy.ready))
        for copy in ended.loaded:
            self._door.tell(RequestLeft(request=copy.request))
        for copy in ended.failed:
            self._door.tell(RequestLeft(request=copy.request))
        for copy in (*ended.saved, *ended.loaded, *ended.failed):
            tracked = self._tracked.get(copy.request)
            if tracked is not None:
                tracked.copying -= 1
                self._leave_if_over(copy.request, tracked)

    def finished(self, request: Any) -> None:
        """Answered, aborted or failed: vLLM frees its blocks now."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            tracked.finished = True
            self._leave_if_over(request.request_id, tracked)

    def _leave_if_over(self, request: str, tracked: _Tracked) -> None:
        if tracked.finished and not tracked.copying:
            del self._tracked[request]
            self._door.tell(RequestLeft(request=request))


def _is_text(request: Any) -> bool:
    """Nothing but token ids decides its KV, and tokens are wanted of it."""
    others = (request.lora_request, request.pooling_params, getattr(request, "prompt_embeds", None))
    return not request.mm_features and all(other is None for other in others)
