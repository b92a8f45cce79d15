"""Shelf: prompts that the engine computes or has computed, in blocks of the slab, until their reader has come for them.

The engine owns its KV memory, and gives a block to the next request when it likes. What peers read is therefore a
copy, in memory of ours: a block of the slab, held from the prompt's arrival until its lease and its time are over.
It is the `BlockOwner` of the offering half: a reader's request is given the blocks that its pair's prompt has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdbus.bus.messages import TryId

from ..handoff import Holder, Reservation
from ..pool import BlockPool

Reader = tuple[str, bytes, bytes]  # node, incarnation, request


@dataclass(slots=True)
class Prompt:
    request: str
    pair: bytes
    prompt_tokens: int
    prompt_digest: bytes
    blocks: tuple[int, ...]  # (): there was no room, or it is spent
    ready: int = 0  # tokens whose KV is in the blocks
    left: bool = False  # the engine is done with it
    spent: bool = False  # its reader came, and has it or will not
    reader: Reader | None = None  # who came first
    try_: TryId | None = None  # whose lease is held

    @property
    def complete(self) -> bool:
        return self.ready == self.prompt_tokens


class Shelf:
    """By request and by pair. Implements `BlockOwner`, with a pair in the place of block hashes."""

    def __init__(self, pool: BlockPool) -> None:
        self.block_size = pool.block_size
        self._pool = pool
        self._by_pair: dict[bytes, Prompt] = {}
        self._by_request: dict[str, Prompt] = {}

    def __len__(self) -> int:
        return len(self._by_pair)

    def put(self, request: str, pair: bytes, prompt_tokens: int, prompt_digest: bytes) -> Prompt | None:
        """A new prompt, with blocks if there is room. None: that pair or request is here already."""
        if pair in self._by_pair or request in self._by_request:
            return None
        room = self._pool.reserve(prompt_tokens, (), Holder.HELD)
        prompt = Prompt(request, pair, prompt_tokens, prompt_digest, room.blocks if room else ())
        self._by_pair[pair] = self._by_request[request] = prompt
        return prompt

    def prompts(self) -> Iterable[Prompt]:
        """All, in the order they came."""
        return self._by_pair.values()

    def of_pair(self, pair: bytes) -> Prompt | None:
        return self._by_pair.get(pair)

    def of_request(self, request: str) -> Prompt | None:
        return self._by_request.get(request)

    def of_try(self, try_: TryId) -> Prompt | None:
        """Whose lease is held under that try."""
        return next((prompt for prompt in self._by_pair.values() if prompt.try_ == try_), None)

    def empty(self, prompt: Prompt) -> None:
        """Its blocks are free once no lease holds them either."""
        self._pool.drop(prompt.blocks, Holder.HELD)
        prompt.blocks = ()

    def take_away(self, prompt: Prompt) -> None:
        """Nothing of it is left."""
        self.empty(prompt)
        del self._by_pair[prompt.pair], self._by_request[prompt.request]

    # ------------------------------------------------------------ BlockOwner

    def reserve(self, tokens: int, block_hashes: Sequence[bytes], holder: Holder) -> Reservation | None:
        """The blocks of the prompt with the pair `block_hashes[0]`. Nothing of it counts as cached: what is ready is
        told like any chunk."""
        prompt = self._by_pair.get(block_hashes[0]) if block_hashes else None
        if prompt is None or not prompt.blocks or prompt.prompt_tokens != tokens:
            return None
        self._pool.hold(prompt.blocks, holder)
        return Reservation(blocks=prompt.blocks, cached_tokens=0)

    def hold(self, blocks: Sequence[int], holder: Holder) -> None:
        self._pool.hold(blocks, holder)

    def drop(self, blocks: Sequence[int], holder: Holder) -> None:
        self._pool.drop(blocks, holder)
