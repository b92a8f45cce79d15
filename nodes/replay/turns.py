"""One node's recording as what it means: every input with the effects that followed it, typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pdbus.bus.errors import RemoteProtocolError
from pdbus.bus.messages import MESSAGES
from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import Declared, decode, decoder, encode
from pdbus.connector.recording import CoreRaised
from pdbus.connector.vllm.events import EngineEvent
from pdbus.connector.vllm.recording import PairBegan

from .. import events as ev
from ..recording import CoreBegan

Decoder = Callable[[Any], Any]
Began = CoreBegan | PairBegan
Event = ev.NodeEvent | EngineEvent


class Turn(NamedTuple):
    """An input and what was decided."""

    sequence: int
    now_ns: int
    event: Event
    effects: list[ev.NodeEffect]


class RawTurn(NamedTuple):
    """A turn as it stands in the file."""

    heard: RawRecord
    decided: list[RawRecord]


class Unreadable(Exception):
    """A record that this version does not understand. `str()` says why."""


class Hole(NamedTuple):
    """Why nothing after this point can be followed. `lost`: the node itself could not keep up."""

    after: int  # the last record before it
    problem: str
    lost: bool


def turns_of(recording: Recording) -> Iterator[RawTurn | Hole]:
    """Inputs with their effects, in order; a Hole ends it. Where the beginning is gone the first input that is there
    with all its effects comes first."""
    heard: RawRecord | None = None
    decided: list[RawRecord] = []
    last = 0
    gone = recording.gone
    for record in recording.raw():
        if gone and not last:
            if record.cause:
                continue
            last = record.sequence - 1
        last += 1
        cause = record.cause
        if record.sequence != last or (cause and (heard is None or cause != heard.sequence)):
            if heard is not None:
                yield RawTurn(heard, decided)
            yield _hole(recording, record, last)
            return
        if cause:
            decided.append(record)
            continue
        if heard is not None:
            yield RawTurn(heard, decided)
        heard, decided = record, []
    if heard is not None:
        yield RawTurn(heard, decided)


def _hole(recording: Recording, record: RawRecord, expected: int) -> Hole:
    if record.sequence > expected and recording.lost:
        missing = record.sequence - expected
        return Hole(expected - 1, f"{missing} records are missing: the node's disk did not keep up", lost=True)
    if record.sequence != expected:
        return Hole(expected - 1, f"record {expected} should follow, but it is numbered {record.sequence}", lost=False)
    return Hole(expected - 1, f"record {expected} names {record.cause} as its input, which is another", lost=False)


def began(recording: Recording) -> tuple[Began, bool]:
    """What the core of a node or of a vLLM server was made of, and whether this version knows all of it. Raises
    Unreadable for the recording of something else."""
    about = recording.header.about
    tag = tag_of(recording)
    type_: Any = next((t for t in (CoreBegan, PairBegan) if t.__name__ == tag), None)
    if type_ is None:
        raise Unreadable(f"begins with {tag!r}, not with a node's settings: another program wrote it")
    try:
        made: Began = decode(about, type_, name=tag)
    except RemoteProtocolError as e:
        raise Unreadable(f"{tag}: {e}") from None
    return made, encode(made) == bytes(about)


def node_began(recording: Recording) -> CoreBegan:
    """Of a node of ours. Raises Unreadable for a vLLM server, which has no requests of clients, too."""
    made, _ = began(recording)
    if isinstance(made, PairBegan):
        raise Unreadable("of a vLLM server: what its clients asked is not in it")
    return made


class _Tag(Declared):
    t: str = ""


def tag_of(recording: Recording) -> str:
    """The type of what was recorded, '' for none that has one."""
    try:
        return decode(recording.header.about, _Tag).t
    except RemoteProtocolError:
        return ""


def event_of(record: RawRecord) -> Event:
    """The input, typed. Raises Unreadable."""
    return _decoded(_decoder(record.kind, ev.NodeEvent, EngineEvent), record)  # type: ignore[no-any-return]


def effect_of(record: RawRecord) -> ev.NodeEffect | CoreRaised:
    """The effect, typed. Raises Unreadable."""
    return _decoded(_decoder(record.kind, ev.NodeEffect), record)  # type: ignore[no-any-return]


_decoders: dict[str, Decoder] = {CoreRaised.__name__: decoder(CoreRaised)}  # by a record's kind


def _decoder(kind: str, *bases: type[Declared]) -> Decoder:
    """Of the type and, where it carries one, the message that a record's kind names."""
    found = _decoders.get(kind)
    if found is None:
        name, _, message = kind.partition(" ")
        type_: Any = next((c for base in bases for c in base.__subclasses__() if c.__name__ == name), None)
        generic = type_ in (ev.MessageCame, ev.Send)
        if type_ is None or bool(message) is not generic or (generic and message not in MESSAGES):
            raise Unreadable(f"{kind!r} is unknown to this version")
        found = _decoders[kind] = decoder(type_[MESSAGES[message]] if generic else type_)
    return found


def _decoded(decode_one: Decoder, record: RawRecord) -> Any:
    try:
        return decode_one(record.payload)
    except RemoteProtocolError as e:
        raise Unreadable(f"{record.kind}: {e}") from None
