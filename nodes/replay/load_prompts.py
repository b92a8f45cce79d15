"""Prompts of a workload as token ids: two that begin with the same block ids begin with the same tokens, and else not.

A block's tokens are drawn from its id and the seed alone. A block of another size takes the beginning of the same
stream, so scaled prompts share what theirs shared.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import shake_128

from .workload import Workload

CONTROL_IDS = 32  # most vocabularies begin with special tokens, which may mean something to an engine
SALT = "pdbus load"


class Prompts:
    def __init__(self, workload: Workload, vocab_size: int, seed: int) -> None:
        self._workload = workload
        self._low = min(CONTROL_IDS, vocab_size // 3)
        self._count = vocab_size - self._low
        self._seed = seed

    def tokens(self, index: int) -> array[int]:
        """The token ids of the request's prompt."""
        asked, size = self._workload.requests[index], self._workload.block_tokens
        if not asked.hash_ids:
            return self._block(f"request {index}", asked.input_tokens)
        prompt = array("I")
        for at, hash_id in zip(range(0, asked.input_tokens, size), asked.hash_ids, strict=True):
            prompt += self._block(f"block {hash_id}", min(size, asked.input_tokens - at))
        return prompt

    def _block(self, name: str, tokens: int) -> array[int]:
        drawn = array("I", shake_128(f"{SALT} {self._seed} {name}".encode()).digest(4 * tokens))
        if sys.byteorder != "little":
            drawn.byteswap()
        return array("I", [self._low + value % self._count for value in drawn])
