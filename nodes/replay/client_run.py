"""A client's or gateway's recording: what it asked, that each answer came whole, in order, and ended once, and that a
gateway would choose the same nodes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdbus.bus.client_recorder import ClientBegan, Got, Sent
from pdbus.bus.errors import RemoteProtocolError
from pdbus.bus.messages import MESSAGES, Cancel, Cancelled, Error, Finished, Generate, Token
from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import Header, decode, decoder, to_plain

from ..gateway.choices import Chose
from ..gateway.routing import POLICIES, choose
from .facts import Answered, Facts
from .findings import Finding, Kind
from .runs import Run
from .story import Moment
from .turns import Decoder, tag_of
from .words import describe

RULE = "7: a request ends exactly once, and a client always learns how"


class Said(NamedTuple):
    """One message that a client sent, or got."""

    sequence: int
    now_ns: int
    got: bool
    link: str
    header: Header
    message: Any


class Chosen(NamedTuple):
    """A choice of the gateway's."""

    sequence: int
    now_ns: int
    value: Chose


class NotUnderstood(Exception):
    """A record that this version does not know, or that is missing. `str()` says which and why."""


@dataclass
class Asked:
    """One generation, as its client saw it."""

    sent: tuple[str, int]  # link and seq of its generate
    tokens: int = 0
    request: bytes = b""
    over: bool = False  # its end, or why there is none, has come
    finished: bool = False
    left: bool = False  # cancelled by the client


def is_client(recording: Recording) -> bool:
    return tag_of(recording) == ClientBegan.__name__


def said(recording: Recording) -> Iterator[Said]:
    """A client's messages, typed. Raises NotUnderstood."""
    return (each for each in _told(recording) if isinstance(each, Said))


def _told(recording: Recording) -> Iterator[Said | Chosen]:
    """A client's records, typed. Raises NotUnderstood."""
    last = 0
    for record in recording.raw():
        if record.sequence != last + 1 and (last or not recording.gone):
            raise NotUnderstood(f"record {last + 1} should follow, but it is numbered {record.sequence}")
        last = record.sequence
        try:
            value = _decoder(record)(record.payload)
        except RemoteProtocolError as e:
            raise NotUnderstood(f"record {record.sequence}: {e}") from None
        if isinstance(value, Chose):
            yield Chosen(record.sequence, record.now_ns, value)
            continue
        got = isinstance(value, Got)
        yield Said(record.sequence, record.now_ns, got, value.link, value.header, value.message)


def client_story(request: bytes, recording: Recording, offset_ns: int) -> list[Moment]:
    """The client's moments of a request, from before it had its id."""
    try:
        records = list(_told(recording))
    except NotUnderstood:
        return []
    names = {_of(each).client_id for each in records if getattr(_of(each), "request", None) == request}
    mine = [each for each in records if getattr(_of(each), "client_id", None) in names]
    return [_moment(each, recording.header.node, offset_ns) for each in mine]


def _of(each: Said | Chosen) -> Any:
    return each.value if isinstance(each, Chosen) else each.message


def _moment(each: Said | Chosen, node: str, offset_ns: int) -> Moment:
    what, details = describe(_kind(each), to_plain(_of(each)))
    return Moment(each.now_ns + offset_ns, node, each.sequence, what, details)


def _kind(each: Said | Chosen) -> str:
    if isinstance(each, Chosen):
        return Chose.__name__
    return f"{'Got' if each.got else 'Sent'} {each.message.KIND}"


class ClientRunner:
    """Checks one client's recording. What is found goes to `findings`."""

    def __init__(self, recording: Recording, findings: list[Finding]) -> None:
        header = recording.header
        self.run = Run(recording, Facts((header.node, header.incarnation)), is_client=True)
        self._findings = findings
        self._asked: dict[str, Asked] = {}  # by client id

    def all(self) -> Run:
        run, recording = self.run, self.run.recording
        began = decode(recording.header.about, ClientBegan)
        run.version, run.role = began.version, began.role
        run.requests = Counter()
        try:
            for each in _told(recording):
                run.records += 1
                if isinstance(each, Chosen):
                    self._chose(each)
                    continue
                run.inputs += each.got
                (self._got if each.got else self._sent)(each)
        except NotUnderstood as e:
            self._find(Kind.NOTE, f"{e}; what comes after is not checked")
            run.ended = f"followed to record {run.records}"
        self._end()
        return run

    def _chose(self, each: Chosen) -> None:
        """The same views and turn must give the same choice again."""
        made = each.value
        if made.policy not in POLICIES:
            self._find(Kind.NOTE, f"the policy {made.policy!r} is unknown to this version", each.sequence, each.now_ns)
            return
        again = choose(made.policy, made.ask, made.nodes) if made.nodes else None
        if again != made.choice:
            text = f"Chose: {made.choice.node} was chosen, now it is {again.node if again else 'none'}"
            self._find(Kind.DIVERGENCE, text, each.sequence, each.now_ns)

    def _sent(self, each: Said) -> None:
        match each.message:
            case Generate(client_id=name):
                self._asked[name] = Asked((each.link, each.header.seq))
            case Cancel(client_id=name) if name in self._asked:
                self._asked[name].left = True

    def _got(self, each: Said) -> None:
        self.run.facts.met[each.header.from_, each.header.from_inc] = None
        match each.message:
            case Token(client_id=name) if name in self._asked:
                self._token(each, self._asked[name], each.message)
            case Finished(client_id=name) if name in self._asked:
                self._finished(each, self._asked[name], each.message)
            case Cancelled(client_id=name) if name in self._asked:
                self._asked[name].over = True
            case Error():
                self._refused(each, each.message)

    def _token(self, each: Said, asked: Asked, token: Token) -> None:
        count = len(token.tokens) // 4
        asked.request = token.request
        if asked.finished and count:
            self._violation(each, f"request {token.request.hex()} is given tokens after its end")
        elif token.index > asked.tokens and not self.run.recording.gone:
            missing = f"tokens {asked.tokens} to {token.index - 1} of request {token.request.hex()} never came"
            self._violation(each, missing)
        asked.tokens = max(asked.tokens, token.index + count)

    def _finished(self, each: Said, asked: Asked, end: Finished) -> None:
        assert self.run.requests is not None
        name = f"request {end.request.hex()}"
        if asked.finished:
            self._violation(each, f"{name} ends a second time")
            return
        asked.over = asked.finished = True
        self.run.requests[end.reason] += 1
        if end.reason in ("stop", "length") and asked.tokens != end.completion_tokens:
            self._violation(each, f"{name} ends with {end.completion_tokens} tokens, of which {asked.tokens} came")
        life = each.header.from_, each.header.from_inc
        answered = Answered(life, end.reason, end.completion_tokens, each.sequence, each.now_ns)
        self.run.facts.answered[end.request] = answered

    def _refused(self, each: Said, error: Error) -> None:
        for name, asked in self._asked.items():
            if name == error.client_id or asked.sent == (each.link, each.header.cause):
                asked.over = True

    def _end(self) -> None:
        run, recording = self.run, self.run.recording
        if recording.damaged:
            self._find(Kind.DAMAGE, f"{recording.truncated}: not checked from there on")
        run.ended = run.ended or recording.truncated or "closed"
        lost = sum(not asked.over and not asked.left for asked in self._asked.values())
        if run.ended == "closed" and lost:
            self._find(Kind.NOTE, f"{lost} requests had not ended when the client gave up their node, or closed")

    def _violation(self, each: Said, text: str) -> None:
        self._find(Kind.VIOLATION, text, each.sequence, each.now_ns, RULE)

    def _find(self, kind: Kind, text: str, sequence: int = 0, at_ns: int = 0, rule: str = "") -> None:
        run = self.run
        self._findings.append(Finding(kind, text, run.facts.life, run.recording.path, sequence, at_ns, rule))


_decoders: dict[str, Decoder] = {}  # by a record's kind


def _decoder(record: RawRecord) -> Decoder:
    found = _decoders.get(record.kind)
    if found is None:
        if record.kind == Chose.__name__:
            found = _decoders[record.kind] = decoder(Chose)
            return found
        name, _, message = record.kind.partition(" ")
        type_: Any = {"Sent": Sent, "Got": Got}.get(name)
        if type_ is None or message not in MESSAGES:
            raise NotUnderstood(f"record {record.sequence}: {record.kind!r} is unknown to this version")
        found = _decoders[record.kind] = decoder(type_[MESSAGES[message]])
    return found
