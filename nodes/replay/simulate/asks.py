"""What clients ask in a simulation, and what they saw of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdbus.bus.messages import Sampling

from ...events import EndRequest
from ..workload import Asked, Workload


@dataclass(slots=True)
class Ask:
    """One request. Times are the cluster's, in ns; 0 until it happens."""

    number: int
    asked: Asked
    request: bytes
    client: str
    prompt_tokens: int
    block_hashes: tuple[bytes, ...]
    sampling: Sampling
    node: str = ""  # which decode node it was sent to
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    ended_ns: int = 0
    tokens: int = 0
    gaps: dict[int, int] = field(default_factory=dict)  # ns between two tokens: how often
    end: EndRequest | None = None
    cause: str = ""  # why it failed

    def sampled(self, tokens: int, each_ns: int, now_ns: int) -> None:
        """So many tokens, `each_ns` apart, the last one now."""
        first_ns = now_ns - (tokens - 1) * each_ns
        if not self.first_ns:
            self.first_ns = first_ns
        else:
            gap_ns = first_ns - self.last_ns
            self.gaps[gap_ns] = self.gaps.get(gap_ns, 0) + 1
        if tokens > 1:
            self.gaps[each_ns] = self.gaps.get(each_ns, 0) + tokens - 1
        self.last_ns = now_ns
        self.tokens += tokens


class Hashes:
    """Names of KV blocks: what a prompt's prefix up to a block's end is, without a token of it.

    A workload's ids name blocks of its own size. A prefix of them has one number here, and a KV block is named by the
    number of the prefix that it ends in, and by its place.
    """

    def __init__(self, workload_block: int, block_size: int) -> None:
        self._unit = workload_block
        self._size = block_size
        self._prefixes: dict[tuple[int, int], int] = {}  # (number of the prefix before, id): number

    def of(self, asked: Asked, number: int) -> tuple[bytes, ...]:
        """Of the prompt's full blocks. Without ids nothing is shared with any other request (`number`)."""
        full = asked.input_tokens // self._size
        if not asked.hash_ids or not self._unit:
            name = f"r{number}."
            return tuple((name + str(i)).encode() for i in range(full))
        chain = self._chain(asked.hash_ids)
        last = len(chain) - 1
        if self._unit == self._size:
            return tuple(str(chain[min(i, last)]).encode() for i in range(full))
        ends = (min(((i + 1) * self._size - 1) // self._unit, last) for i in range(full))
        return tuple(f"{chain[end]}.{i}".encode() for i, end in enumerate(ends))

    def _chain(self, ids: tuple[int, ...]) -> list[int]:
        prefixes, chain, before = self._prefixes, [], 0
        for id_ in ids:
            before = prefixes.setdefault((before, id_), len(prefixes) + 1)
            chain.append(before)
        return chain


def asks_of(workload: Workload, block_size: int) -> Iterator[Ask]:
    """The workload's requests in the order of their times; of no tokens they ask for one."""
    hashes = Hashes(workload.block_tokens, block_size)
    for number, asked in enumerate(workload.requests):
        yield Ask(
            number=number,
            asked=asked,
            request=number.to_bytes(16, "big"),
            client=f"c{number}",
            prompt_tokens=max(1, asked.input_tokens),
            block_hashes=hashes.of(asked, number),
            sampling=Sampling(max_tokens=max(1, asked.output_tokens), ignore_eos=True),
        )
