"""Invariants 2 and 4 and the rules R3, R6, R7, R9 on a decode node: reads go where nothing else is, a claim waits for
all of them, and what they brought counts only when the prefill node has confirmed exactly that lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdbus.bus.messages import (
    Hello,
    LeaseId,
    LeaseReleased,
    PrefillRequest,
    TransferDone,
    TryId,
    Welcome,
)
from pdbus.bus.wire import unpack_u32
from pdbus.connector.vllm.events import KvWanted, RequestLeft

from .. import events as ev
from ..peers import peer_key
from .blocks import Blocks, Part, Read
from .checks import Check, Report
from .facts import Confirmed, Facts, Life, announcements
from .turns import Turn

NOT_GIVEN = "2: no block that may still be written is given to anyone"
CLAIM_LAST = "R6: a claim comes when all reads are done"
NONE_LATE = "R9: no new reads from a peer with a late one"
ONE_SOURCE = "R3: one try, one lease, one source"


@dataclass(slots=True)
class Attempt:
    """One try of this node at one prefill node."""

    try_: TryId
    to: str
    to_inc: bytes
    have: int
    prompt_tokens: int
    hashes: tuple[bytes, ...]
    lease: LeaseId | None = None
    posted: int = 0  # tokens up to which reads were posted, or that were here before
    open: dict[int, None] = field(default_factory=dict)  # reads
    brought: dict[int, int] = field(default_factory=dict)  # block -> its place in the prompt
    claimed: bool = False

    @property
    def name(self) -> str:
        return f"attempt {self.try_.attempt} of request {self.try_.request.hex()} at {self.to}"


@dataclass(slots=True)
class OpenRead:
    attempt: Attempt
    target: tuple[int, ...]
    first: int  # place of target[0] in the prompt


class ReadCheck(Check):
    def __init__(self, report: Report, blocks: Blocks, facts: Facts) -> None:
        super().__init__(report)
        self.open: dict[int, OpenRead] = {}
        self._blocks = blocks
        self._facts = facts
        self._hashes: dict[bytes, tuple[bytes, ...]] = {}
        self._attempts: dict[bytes, list[Attempt]] = {}  # of requests that have not ended, the present one last
        self._wanted_as: dict[str, bytes] = {}  # of a vLLM server: its name for a request -> ours
        self._late: dict[int, Life] = {}  # reads that are doubtful: of whom
        self._sizes: dict[Life, int] = {}  # of the blocks of other nodes, in tokens
        self.events = {
            ev.GenerateAsked: self._asked,
            ev.MessageCame: self._came,
            ev.ReadEnded: self._read_ended,
            ev.ReadDoubtful: self._doubtful,
            ev.MoverLost: self._mover_lost,
            KvWanted: self._wanted,
            RequestLeft: self._left,
        }
        self.effects = {ev.Send: self._sent, ev.StartRead: self._start_read, ev.EndRequest: self._ends}

    # ------------------------------------------------------------ attempts

    def _asked(self, turn: Turn, event: ev.GenerateAsked) -> None:
        self._hashes[event.request] = event.block_hashes

    def _wanted(self, turn: Turn, event: KvWanted) -> None:
        """vLLM keeps the hashes of its blocks to itself: they are told apart by prompt and place."""
        if event.request not in self._wanted_as:
            self._wanted_as[event.request] = event.id
            places = range(event.prompt_tokens // self._blocks.size)
            self._hashes[event.id] = tuple(event.prompt_digest + place.to_bytes(4, "little") for place in places)

    def _left(self, turn: Turn, event: RequestLeft) -> None:
        if (request := self._wanted_as.pop(event.request, None)) is not None:
            self._over(request)

    def _ends(self, turn: Turn, effect: ev.EndRequest) -> None:
        self._over(effect.request)

    def _over(self, request: bytes) -> None:
        self._hashes.pop(request, None)
        self._attempts.pop(request, None)

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        message = effect.message
        if isinstance(message, PrefillRequest):
            self._ask(turn, effect, message)
        elif isinstance(message, TransferDone):
            self._claim(turn, message)

    def _ask(self, turn: Turn, effect: ev.Send[Any], message: PrefillRequest) -> None:
        try_ = message.try_
        attempts = self._attempts.setdefault(try_.request, [])
        if attempts and attempts[-1].try_ == try_:
            if (attempts[-1].to, attempts[-1].to_inc) != (effect.to, effect.to_inc):
                self.report(turn, ONE_SOURCE, f"{attempts[-1].name} is asked of {effect.to}, too")
            return
        new = Attempt(
            try_,
            effect.to,
            effect.to_inc,
            message.have,
            message.prompt_tokens,
            self._hashes.get(try_.request, ()),
            posted=message.have,
        )
        if any(a.try_.attempt >= try_.attempt or a.to == effect.to for a in attempts):
            self.report(turn, ONE_SOURCE, f"{new.name} comes after {attempts[-1].name}")
        attempts.append(new)

    def _present(self, try_: TryId) -> Attempt | None:
        attempts = self._attempts.get(try_.request)
        return attempts[-1] if attempts and attempts[-1].try_ == try_ else None

    # ------------------------------------------------------------ reads

    def _start_read(self, turn: Turn, effect: ev.StartRead) -> None:
        attempts = self._attempts.get(effect.request)
        if not attempts:
            self.report(
                turn, ONE_SOURCE, f"read {effect.read} is for request {effect.request.hex()}, which asks nobody"
            )
            return
        attempt = attempts[-1]
        self._check_source(turn, effect, attempt)
        self._check_target(turn, effect, attempt)
        self.open[effect.read] = OpenRead(attempt, effect.target, effect.begin // self._blocks.size)
        attempt.posted = effect.end
        attempt.open[effect.read] = None

    def _check_source(self, turn: Turn, effect: ev.StartRead, attempt: Attempt) -> None:
        lease, announced = _announcement(turn, attempt.try_)
        read = f"read {effect.read} of {attempt.name}"
        if lease is None:
            self.report(turn, ONE_SOURCE, f"{read} begins though nothing was announced")
            return
        if attempt.lease not in (None, lease):
            self.report(turn, ONE_SOURCE, f"{read} is of lease {lease.generation}, the ones before of another")
        attempt.lease = lease
        if effect.begin != attempt.posted or len(effect.target) != _blocks(effect, self._blocks.size):
            self.report(turn, ONE_SOURCE, f"{read} is of tokens {effect.begin} to {effect.end}, after {attempt.posted}")
        size = self._sizes.get((attempt.to, attempt.to_inc), self._blocks.size)
        first = effect.begin // size - attempt.have // size
        if tuple(announced[first : first + _blocks(effect, size)]) != effect.source:
            self.report(turn, ONE_SOURCE, f"{read} reads other blocks than were announced")
        if effect.peer != peer_key(attempt.to, attempt.to_inc, lease.epoch):
            self.report(turn, ONE_SOURCE, f"{read} goes to {effect.peer}, not to the lease's agent")
        if attempt.claimed:
            self.report(turn, CLAIM_LAST, f"{read} begins after the claim")
        if late := next((r for r, peer in self._late.items() if peer == (attempt.to, attempt.to_inc)), 0):
            self.report(turn, NONE_LATE, f"{read} begins while read {late} is late")

    def _check_target(self, turn: Turn, effect: ev.StartRead, attempt: Attempt) -> None:
        blocks = self._blocks
        for block in effect.target:
            into = f"read {effect.read} of {attempt.name} goes into block {block}"
            if block in blocks.reading:
                self.report(turn, NOT_GIVEN, f"{into}, which read {blocks.reading[block]} may still write")
            if block in blocks.writing:
                self.report(turn, NOT_GIVEN, f"{into}, which the step that runs writes")
            if block in blocks.copying:
                self.report(turn, NOT_GIVEN, f"{into}, which copy {blocks.copying[block]} may still read or write")
            if block in blocks.advertised:
                self.report(turn, NOT_GIVEN, f"{into}, which a held lease announces")
            if block in blocks.users:
                blocks.taken(block, None, f"read {effect.read} of {attempt.name} writes (block {block})")
            blocks.reading[block] = effect.read
            blocks.mirror[block] = blocks.content[block] = None

    def _read_ended(self, turn: Turn, event: ev.ReadEnded) -> None:
        found = self._close(event.read)
        if found is None:
            return
        attempt = found.attempt
        for index, block in enumerate(found.target, found.first):
            if not event.problem:
                self._blocks.mirror[block] = Read(event.read)
                attempt.brought[block] = index

    def _close(self, read: int) -> OpenRead | None:
        found = self.open.pop(read, None)
        self._late.pop(read, None)
        if found is not None:
            found.attempt.open.pop(read, None)
            for block in found.target:
                if self._blocks.reading.get(block) == read:
                    del self._blocks.reading[block]
        return found

    def _doubtful(self, turn: Turn, event: ev.ReadDoubtful) -> None:
        found = self.open.get(event.read)
        if found is not None:
            self._late[event.read] = (found.attempt.to, found.attempt.to_inc)

    def _mover_lost(self, turn: Turn, event: ev.MoverLost) -> None:
        for read in list(self.open):
            self._close(read)

    # ------------------------------------------------------------ the claim

    def _claim(self, turn: Turn, message: TransferDone) -> None:
        attempt = self._present(message.try_)
        if attempt is None:
            self.report(turn, CLAIM_LAST, f"lease {message.lease.generation} is claimed for an attempt that is over")
            return
        attempt.claimed = True
        if attempt.open:
            self.report(turn, CLAIM_LAST, f"{attempt.name} claims while read {next(iter(attempt.open))} is open")
        size = self._blocks.size
        needed = -(-attempt.prompt_tokens // size) - attempt.have // size
        if len(attempt.brought) < needed:
            self.report(turn, CLAIM_LAST, f"{attempt.name} claims with {len(attempt.brought)} of {needed} blocks read")
        if attempt.lease not in (None, message.lease):
            self.report(turn, ONE_SOURCE, f"{attempt.name} claims another lease than it has read under")
        attempt.lease = message.lease

    def _came(self, turn: Turn, event: ev.MessageCame[Any]) -> None:
        message = event.message
        hello = message.hello if isinstance(message, Welcome) else message
        if isinstance(hello, Hello) and hello.geometry is not None:
            self._sizes[event.header.from_, event.header.from_inc] = hello.geometry.block_size
        if not isinstance(message, LeaseReleased) or not message.valid:
            return
        attempt = self._present(message.try_)
        if attempt is None or not attempt.claimed or message.lease != attempt.lease:
            return
        if (event.header.from_, event.header.from_inc) != (attempt.to, attempt.to_inc):
            return
        self._facts.confirmed.append(Confirmed(message.lease, message.try_, turn.sequence, turn.now_ns))
        for block, index in attempt.brought.items():
            if isinstance(self._blocks.mirror.get(block), Read):
                whole = (index + 1) * self._blocks.size <= attempt.prompt_tokens
                self._blocks.mirror[block] = attempt.hashes[index] if whole else Part(message.try_.request)


def _blocks(read: ev.StartRead, size: int) -> int:
    """How many blocks hold the tokens that are read."""
    return -(-read.end // size) - read.begin // size


def _announcement(turn: Turn, try_: TryId) -> tuple[LeaseId | None, Sequence[int]]:
    """The lease and blocks that the turn's message announces for a try."""
    message = turn.event.message if isinstance(turn.event, ev.MessageCame) else None
    said = next((each for each in announcements(message) if each.try_ == try_), None)
    return (said.lease, unpack_u32(said.blocks)) if said is not None else (None, ())
