"""What stands in every KV block of one node, and who may be writing or using it, followed from what was recorded.

A full block of a prompt is named by the hash of the prompt up to its end, so that wherever it goes, by cache, step or
read, one can tell whether it is the right one. Nothing here comes from the machines that are being checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Own(NamedTuple):
    """Computed by a sequence, and nobody else's: the end of a prompt, or an answer."""

    seq: int


class Read(NamedTuple):
    """Read from a prefill node that has not confirmed it."""

    read: int


class Part(NamedTuple):
    """The last, partial block of a request's prompt, read and confirmed."""

    request: bytes


Content = bytes | Own | Read | Part | None  # a full block's hash; None: garbage


@dataclass(slots=True)
class Prompt:
    """What a sequence computes upon."""

    name: str  # for people
    tokens: int
    hashes: tuple[bytes, ...]
    request: bytes = b""  # of a client of this node; b'' for a prompt computed for another

    def right(self, index: int, size: int) -> Content:
        """What must stand in the prompt's block `index` when it is not computed here and now."""
        return self.hashes[index] if (index + 1) * size <= self.tokens else Part(self.request)


@dataclass(slots=True)
class Sequence:
    prompt: Prompt
    table: list[int] = field(default_factory=list)
    lost: str = ""  # how another took one of its blocks; then it must begin anew with others


@dataclass
class Blocks:
    """One node's. Maps hold only what is not empty."""

    size: int  # tokens
    staged: bool = False  # reads begin and land in a mirror
    content: dict[int, Content] = field(default_factory=dict)  # where steps compute
    mirror: dict[int, Content] = field(default_factory=dict)  # where reads begin and land; without staging the same
    copying: dict[int, int] = field(default_factory=dict)  # the copy that reads or writes it
    users: dict[int, dict[int, None]] = field(default_factory=dict)  # sequences whose tables name it
    writing: dict[int, int] = field(default_factory=dict)  # in the step that is out: whose
    reading: dict[int, int] = field(default_factory=dict)  # the read that may still write it
    advertised: dict[int, int] = field(default_factory=dict)  # how many held leases announce it
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.staged:
            self.mirror = self.content

    def attach(self, seq: int, s: Sequence, blocks: list[int]) -> None:
        s.table += blocks
        for block in blocks:
            self.users.setdefault(block, {})[seq] = None

    def detach(self, seq: int, s: Sequence) -> None:
        for block in s.table:
            users = self.users.get(block)
            if users is not None:
                users.pop(seq, None)
                if not users:
                    del self.users[block]
        s.table = []

    def taken(self, block: int, by: int | None, how: str) -> None:
        """The block is written for somebody else: whoever else has it in its table must have given it up."""
        users = self.users.get(block)
        for seq in [seq for seq in users or () if seq != by]:
            s = self.sequences[seq]
            s.lost = s.lost or how
            del self.users[block][seq]

    def advertise(self, block: int) -> None:
        self.advertised[block] = self.advertised.get(block, 0) + 1

    def withdraw(self, block: int) -> None:
        left = self.advertised.get(block, 0) - 1
        if left > 0:
            self.advertised[block] = left
        else:
            self.advertised.pop(block, None)


def describe(content: Content) -> str:
    match content:
        case bytes():
            return f"a prompt block {content.hex()[:12]}"
        case Own():
            return f"KV of sequence {content.seq}"
        case Read():
            return f"what read {content.read} brought, unconfirmed"
        case Part():
            return f"the end of the prompt of request {content.request.hex()}"
    return "garbage"
