"""A workload: what was asked when, how long, sharing which prefixes. Importers make it; load and simulate play it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """One request. `hash_ids`: one id for every block of the prompt, the partial last one too; two prompts that begin
    with the same ids begin with the same tokens. Empty: nothing is known to be shared.

    `session`: requests of one session, counted from 1, come one after the other: each at the earliest `think_ns` after
    the end of the one before it. 0: of no session.
    """

    at_ns: int  # after the workload began
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: int = 0
    think_ns: int = 0


class Workload(NamedTuple):
    """Requests in the order of their times, the first at 0."""

    name: str
    requests: Sequence[Asked]
    block_tokens: int = 0  # of a hash id; 0: no prefix is known
    notes: tuple[str, ...] = ()  # what a user should know of how it was read, a line each


class Hits(NamedTuple):
    """What a prefix cache found, or could have found."""

    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int

    @property
    def block_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def best_hits(workload: Workload, cache_block: int = 0) -> Hits:
    """What one prefix cache for all that never forgets would find: of each prompt its longest beginning, in blocks,
    that an earlier prompt began with, too. A partial last block hits where that whole prompt is repeated.

    With `cache_block`, its tokens of a block, `hit_tokens` are those that a node's cache could give: whole blocks of
    its own, and never a prompt's last token.
    """
    known: dict[tuple[int, int], int] = {}  # a prefix and the id that lengthens it, to the longer prefix
    blocks = hit_blocks = tokens = hit_tokens = 0
    for asked in workload.requests:
        hit = _extend(known, asked.hash_ids)
        same = min(hit * workload.block_tokens, asked.input_tokens)
        blocks += len(asked.hash_ids)
        hit_blocks += hit
        tokens += asked.input_tokens
        hit_tokens += min(same, asked.input_tokens - 1) // cache_block * cache_block if cache_block else same
    return Hits(blocks, hit_blocks, tokens, hit_tokens)


def _extend(known: dict[tuple[int, int], int], hash_ids: Sequence[int]) -> int:
    """How many of the ids, from the first on, were known as a prefix; all are from now on."""
    prefix, hit, knows = 0, 0, True
    for hash_id in hash_ids:
        longer = known.get((prefix, hash_id))
        if longer is None:
            knows = False
            longer = known[prefix, hash_id] = len(known) + 1
        hit += knows
        prefix = longer
    return hit
