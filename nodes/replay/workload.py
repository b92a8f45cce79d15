"""A workload: what was asked when, how long, sharing which prefixes. Importers make it; load and simulate play it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """One request. `hash_ids`: one id for every block of the prompt, the partial last one too; two prompts that begin
    with the same ids begin with the same tokens. Empty: nothing is known to be shared."""

    at_ns: int  # after the workload began
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class Workload(NamedTuple):
    """Requests in the order of their times."""

    name: str
    requests: Sequence[Asked]
    block_tokens: int = 0  # of a hash id; 0: no prefix is known
