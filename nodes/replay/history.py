"""The history of a lease or of a request over all nodes: every record that is about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pdbus.bus.messages import LeaseId, LeaseRenew, LeaseRenewed, TryId
from pdbus.bus.recording import Recording
from pdbus.bus.wire import Declared, to_plain
from pdbus.connector.recording import kind_of

from .. import events as ev
from .check_messages import name_of
from .client_run import client_story, is_client
from .rerun import recorded
from .story import Moment
from .turns import RawTurn, Turn, Unreadable, began, turns_of
from .words import describe


class Subject(NamedTuple):
    """What a record is about: a request, and one try of it unless `attempt` is 0."""

    request: bytes
    attempt: int = 0


class Lease(NamedTuple):
    """As `--lease` names it: [NODE/[EPOCH/]]GENERATION. `node` is '' and `epoch` 0 for any."""

    node: str
    epoch: int
    generation: int

    def __str__(self) -> str:
        epoch = f" in epoch {self.epoch}" if self.epoch else ""
        return f"{self.generation}{f' of {self.node}' if self.node else ''}{epoch}"

    def is_meant(self, node: str, epoch: int, generation: int) -> bool:
        return generation == self.generation and self.node in ("", node) and self.epoch in (0, epoch)


def opened(recording: Recording) -> tuple[int, Iterator[Turn]]:
    """The size of its blocks in tokens, and what was recorded, typed, as far as it can be read: nothing of another
    program's recording."""
    try:
        made, _ = began(recording)
    except Unreadable:
        return 1, iter(())
    return made.core.block_size, _turns(recording)


def _turns(recording: Recording) -> Iterator[Turn]:
    for raw in turns_of(recording):
        if isinstance(raw, RawTurn):
            try:
                yield recorded(raw)
            except Unreadable:
                continue


def turns(recording: Recording) -> Iterator[Turn]:
    return opened(recording)[1]


class Follower:
    """Knows, along one node's turns, what each record is about, though it may name but a sequence or a read."""

    def __init__(self) -> None:
        self._seqs: dict[int, Subject] = {}
        self._reads: dict[int, Subject] = {}
        self._copies: dict[int, Subject] = {}
        self._attempts: dict[bytes, int] = {}

    def of_seq(self, seq: int) -> Subject | None:
        """Whose sequence that is."""
        return self._seqs.get(seq)

    def about(self, value: Declared) -> list[Subject]:
        match value:
            case ev.MessageCame() | ev.Send():
                return self._message(value)
            case ev.OpenSequence(seq=seq):
                self._seqs[seq] = _of(value.try_) if value.try_ else Subject(value.request)
                return [self._seqs[seq]]
            case ev.CloseSequence(seq=seq):
                return self._known(self._seqs.get(seq))
            case ev.RunStep(rows=rows) | ev.StepEnded(rows=rows):
                return [subject for row in rows if (subject := self._seqs.get(row.seq))]
            case ev.StartRead(read=read, request=request):
                self._reads[read] = Subject(request, self._attempts.get(request, 0))
                return [self._reads[read]]
            case ev.StartCopy(copy=copy, request=request):
                self._copies[copy] = Subject(request)
                return [self._copies[copy]]
            case ev.CopyEnded(copy=copy):
                return self._known(self._copies.pop(copy, None))
            case ev.ReadEnded(read=read) | ev.ReadDoubtful(read=read):
                return self._known(self._reads.get(read))
            case ev.Publish(topic="lease" | "request", data=data):
                return [Subject(bytes.fromhex(str(data["request"])), int(str(data.get("attempt", 0))))]
        request = getattr(value, "request", b"")
        return [Subject(request)] if request else []

    def _message(self, value: Any) -> list[Subject]:
        message = value.message
        if isinstance(message, LeaseRenew | LeaseRenewed):
            return [_of(entry.try_) for entry in message.entries]
        try_ = getattr(message, "try_", None)
        if try_ is None:
            return []
        if isinstance(value, ev.Send):
            self._attempts[try_.request] = try_.attempt
        return [_of(try_)]

    def _known(self, subject: Subject | None) -> list[Subject]:
        return [subject] if subject else []


def _of(try_: TryId) -> Subject:
    return Subject(try_.request, try_.attempt)


def tries_of(lease: Lease, recordings: Sequence[Recording]) -> dict[tuple[str, bytes, int], Subject]:
    """The leases of that generation, by node, incarnation and generation, and the try that each was granted to."""
    found: dict[tuple[str, bytes, int], Subject] = {}
    for recording in recordings:
        header = recording.header
        for turn in turns(recording):
            for value in (turn.event, *turn.effects):
                for granted, subject in _leases(value, header.node, header.incarnation):
                    if lease.is_meant(granted.node, granted.epoch, granted.generation):
                        found.setdefault((granted.node, granted.incarnation, granted.generation), subject)
    return found


def _leases(value: Declared, node: str, incarnation: bytes) -> Iterator[tuple[LeaseId, Subject]]:
    if isinstance(value, ev.Publish) and value.topic == "lease":
        data: Any = value.data
        granted = LeaseId(node=node, incarnation=incarnation, epoch=data["epoch"], generation=data["generation"])
        yield granted, Subject(bytes.fromhex(data["request"]), data["attempt"])
    if isinstance(value, ev.MessageCame | ev.Send):
        for part in (value.message, *getattr(value.message, "entries", ())):
            lease = getattr(part, "lease", None)
            if lease is not None:
                yield lease, _of(part.try_)


def requests_like(beginning: str, recordings: Sequence[Recording]) -> list[bytes]:
    """The requests whose ids begin so in hex."""
    found: dict[bytes, None] = {}
    for recording in recordings:
        follower = Follower()
        for turn in turns(recording):
            for value in (turn.event, *turn.effects):
                for subject in follower.about(value):
                    if subject.request.hex().startswith(beginning):
                        found[subject.request] = None
    return list(found)


def story_of(wanted: Subject, recording: Recording, offset_ns: int) -> list[Moment]:
    """One node's or client's moments of a request, or of one try of it."""
    if is_client(recording):
        return [] if wanted.attempt else client_story(wanted.request, recording, offset_ns)
    follower, node = Follower(), recording.header.node
    moments: list[Moment] = []
    for turn in turns(recording):
        for place, value in enumerate((turn.event, *turn.effects)):
            subjects = follower.about(value)
            meant = any(s == wanted or (not wanted.attempt and s.request == wanted.request) for s in subjects)
            if meant and not _is_routine(value):
                moments.append(_moment(turn, place, value, node, offset_ns))
    return moments


def _is_routine(value: Declared) -> bool:
    """Decode steps: their tokens tell as much."""
    if isinstance(value, ev.StepEnded):
        return not any(row.payload or row.problem for row in value.rows)
    return isinstance(value, ev.RunStep) and all(row.count == 1 for row in value.rows)


def _moment(turn: Turn, place: int, value: Declared, node: str, offset_ns: int) -> Moment:
    what, details = describe(kind_of(value), to_plain(value))
    name = name_of(value.message) if isinstance(value, ev.MessageCame | ev.Send) else b""
    said, heard = (name, b"") if isinstance(value, ev.Send) else (b"", name)
    return Moment(turn.now_ns + offset_ns, node, turn.sequence + place, what, details, said, heard)
