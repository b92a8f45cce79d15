"""What lasted how long on one node: requests, chunks, steps, reads, leases; and what went wrong when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdbus.bus.messages import Finished, Generate, LeaseReleased, PrefillDone, PrefillRequest, Token, TransferDone
from pdbus.bus.recording import Recording
from pdbus.connector.ipc import StepRow

from ... import events as ev
from ..check_messages import BETWEEN_NODES, name_of
from ..client_run import NotUnderstood, Said, said
from ..history import Follower, Subject, turns
from ..turns import Turn

GROUPS = ("answers", "requests", "reads", "copies", "leases", "chunks", "steps")  # in the order in which they are shown
NODE_EVENTS = {"node.up": "", "node.down": "fault", "node.unreachable": "fault", "node.refused": "fault"}


class Part(NamedTuple):
    """A stretch of a bar."""

    begin_ns: int
    kind: str


@dataclass
class Bar:
    """Something that lasts. `kind` is that of its first part; `end_ns` None while it does."""

    group: str
    begin_ns: int
    label: str
    parts: list[Part]
    request: bytes = b""
    details: str = ""
    end_ns: int | None = None
    ended: str = ""  # how
    failed: bool = False


class Mark(NamedTuple):
    """Something that happened. `kind`: fault, life or ''."""

    at_ns: int
    kind: str
    label: str


class Spoken(NamedTuple):
    """A message, by name, as one side knows it. `other`: whom it goes to, or comes from."""

    at_ns: int
    name: bytes
    kind: str
    request: bytes
    other: str


@dataclass
class NodeSpans:
    """All of one life, on its own clock."""

    name: str
    life: str
    begin_ns: int = 0
    end_ns: int = 0
    cut: str = ""
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    said: list[Spoken] = field(default_factory=list)
    heard: list[Spoken] = field(default_factory=list)


def spans_of_client(recording: Recording) -> NodeSpans:
    """A client's generations, from question to end."""
    spans = _spans(recording)
    open_bars: dict[str, Bar] = {}
    try:
        for each in said(recording):
            spans.begin_ns, spans.end_ns = spans.begin_ns or each.now_ns, each.now_ns
            _hear_client(each, spans, open_bars)
    except NotUnderstood as e:
        spans.cut = str(e)
    spans.cut = spans.cut or recording.truncated
    return spans


def _hear_client(each: Said, spans: NodeSpans, open_bars: dict[str, Bar]) -> None:
    match each.message:
        case Generate(client_id=name):
            bar = Bar("answers", each.now_ns, f"generation {name}", [Part(each.now_ns, "waiting")])
            open_bars[name] = bar
            spans.bars.append(bar)
        case Token(client_id=name) if name in open_bars:
            bar = open_bars[name]
            if len(bar.parts) == 1:
                bar.parts.append(Part(each.now_ns, "decode"))
            bar.request = each.message.request
        case Finished(client_id=name, reason=reason) if name in open_bars:
            bar = open_bars.pop(name)
            bar.request, bar.end_ns, bar.ended = each.message.request, each.now_ns, reason
            bar.failed = reason == "error"
            bar.details = f"{each.message.completion_tokens} tokens"


def spans_of_node(recording: Recording) -> NodeSpans:
    """A node's, as far as its recording can be read."""
    return _Reader(recording).read()


def _spans(recording: Recording) -> NodeSpans:
    header = recording.header
    return NodeSpans(header.node, header.incarnation.hex()[:12])


class _Reader:
    """Goes through one node's turns."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._spans = _spans(recording)
        self._follower = Follower()
        self._requests: dict[bytes, Bar] = {}
        self._leases: dict[tuple[Any, ...], Bar] = {}
        self._reads: dict[int, Bar] = {}
        self._copies: dict[int, Bar] = {}
        self._steps: list[Bar] = []  # of the step that is out: its own bar and those of its chunks
        self._prompts: dict[bytes, int] = {}  # tokens of this node's own requests
        self._asked: dict[bytes, int] = {}  # the last attempt
        self._whose: Mapping[int, Subject] = {}
        self._now = 0

    def read(self) -> NodeSpans:
        spans = self._spans
        for turn in turns(self._recording):
            self._now = turn.now_ns
            spans.begin_ns, spans.end_ns = spans.begin_ns or turn.now_ns, turn.now_ns
            self._turn(turn)
        spans.cut = self._recording.truncated
        return spans

    def _turn(self, turn: Turn) -> None:
        self._about = self._follower.about(turn.event)
        self._tell(turn.event)
        for effect in turn.effects:
            self._about = self._follower.about(effect)
            self._tell(effect)

    def _tell(self, value: Any) -> None:
        hear = _HEARS.get(type(value))
        if hear is not None:
            hear(self, value)

    # ------------------------------------------------------------ bars

    def _begin(self, group: str, label: str, kind: str, request: bytes = b"", details: str = "") -> Bar:
        bar = Bar(group, self._now, label, [Part(self._now, kind)], request, details)
        self._spans.bars.append(bar)
        return bar

    def _end(self, bar: Bar | None, ended: str = "", *, failed: bool = False) -> None:
        if bar is not None and bar.end_ns is None:
            bar.end_ns, bar.ended, bar.failed = self._now, ended, failed

    def _part(self, bar: Bar | None, kind: str) -> None:
        if bar is not None and bar.parts[-1].kind != kind:
            bar.parts.append(Part(self._now, kind))

    def _mark(self, kind: str, label: str) -> None:
        self._spans.marks.append(Mark(self._now, kind, label))

    # ------------------------------------------------------------ requests

    def _generate(self, event: ev.GenerateAsked) -> None:
        self._prompts[event.request] = event.prompt_tokens
        name = f"request {event.request.hex()[:8]}"
        details = f"{event.prompt_tokens} prompt tokens"
        self._requests[event.request] = self._begin("requests", name, "waiting", event.request, details)

    def _end_request(self, effect: ev.EndRequest) -> None:
        bar = self._requests.pop(effect.request, None)
        how = f"{effect.reason} {effect.code}".rstrip()
        if bar is not None:
            node = effect.timeline.prefill_node
            where = f", prefilled on {node}" if node else ", prefilled here"
            bar.details += f", {effect.completion_tokens} tokens, {effect.timeline.attempts} attempts{where}"
        self._end(bar, how, failed=effect.reason == "error")

    def _first_token(self, effect: ev.TakeFirstToken) -> None:
        bar = self._requests.get(effect.request)
        if bar is not None:
            bar.details += f", first token after {(self._now - bar.begin_ns) / 1e6:.1f} ms"

    # ------------------------------------------------------------ messages

    def _came(self, event: ev.MessageCame[Any]) -> None:
        message = event.message
        if message.KIND.startswith(BETWEEN_NODES):
            self._spans.heard.append(self._spoken(message, event.header.from_))
        if isinstance(message, LeaseReleased) and message.valid and self._asked.get(message.try_.request):
            self._part(self._requests.get(message.try_.request), "decode")

    def _sent(self, effect: ev.Send[Any]) -> None:
        message = effect.message
        if message.KIND.startswith(BETWEEN_NODES):
            self._spans.said.append(self._spoken(message, effect.to))
        match message:
            case PrefillRequest(try_=try_) if self._asked.get(try_.request) != try_.attempt:
                self._asked[try_.request] = try_.attempt
                self._part(self._requests.get(try_.request), "fetch")
            case TransferDone(try_=try_):
                self._part(self._requests.get(try_.request), "confirm")
            case PrefillDone(try_=try_):
                self._part(self._leases.get((try_.node, try_.request.hex(), try_.attempt)), "held")

    def _spoken(self, message: Any, other: str) -> Spoken:
        request = self._about[0].request if len(self._about) == 1 else b""
        return Spoken(self._now, name_of(message), message.KIND, request, other)

    # ------------------------------------------------------------ leases

    def _published(self, effect: ev.Publish) -> None:
        data: Any = effect.data
        if effect.event in NODE_EVENTS:
            why = f": {data['reason']}" if data.get("reason") else ""
            self._mark(NODE_EVENTS[effect.event], f"{data['node']} {effect.event.removeprefix('node.')}{why}")
        elif effect.event == "attempt.failed":
            bar = self._requests.get(bytes.fromhex(data["request"]))
            self._part(bar, "waiting")
            self._mark("fault", f"attempt {data['attempt']} at {data['node']} failed: {data['cause']}")
        elif effect.topic == "lease":
            self._lease(effect.event, data, (data["decode_node"], data["request"], data["attempt"]))

    def _lease(self, event: str, data: Mapping[str, Any], key: tuple[Any, ...]) -> None:
        if event == "lease.began":
            label = f"lease {data['generation']} of {key[0]}"
            request = bytes.fromhex(data["request"])
            self._leases[key] = self._begin("leases", label, "prefill", request, f"attempt {key[2]}")
        else:
            cause = str(data["cause"])
            self._end(self._leases.pop(key, None), cause, failed=cause not in ("done", "cancelled"))

    # ------------------------------------------------------------ steps and reads

    def _run_step(self, effect: ev.RunStep) -> None:
        tokens = sum(row.count for row in effect.rows)
        self._steps = [
            self._begin("steps", f"step {effect.step}", "step", details=f"{len(effect.rows)} rows, {tokens} tokens")
        ]
        for row in effect.rows:
            self._row(row)

    def _row(self, row: StepRow) -> None:
        subject = self._follower.of_seq(row.seq)
        if subject is None:
            return
        computes_prompt = subject.attempt or row.start < self._prompts.get(subject.request, 0)
        if computes_prompt:
            label = f"tokens {row.start} to {row.start + row.count - 1}"
            self._steps.append(self._begin("chunks", label, "prefill", subject.request))
        if not subject.attempt:
            self._part(self._requests.get(subject.request), "prefill" if computes_prompt else "decode")

    def _step_ended(self, event: ev.StepEnded) -> None:
        problems = {row.problem for row in event.rows if row.problem}
        for bar in self._steps:
            self._end(bar, "; ".join(problems), failed=bool(problems))
        self._steps = []

    def _start_read(self, effect: ev.StartRead) -> None:
        details = f"blocks {_ids(effect.source)} into {_ids(effect.target)}"
        name = f"read {effect.read} from {effect.peer.partition('/')[0]}"
        self._reads[effect.read] = self._begin("reads", name, "fetch", effect.request, details)

    def _read_ended(self, event: ev.ReadEnded) -> None:
        bar = self._reads.pop(event.read, None)
        if bar is not None and event.bytes:
            bar.details += f", {event.bytes:,} bytes"
        self._end(bar, event.problem, failed=bool(event.problem))

    def _start_copy(self, effect: ev.StartCopy) -> None:
        name = f"copy {effect.copy} {effect.way}"
        self._copies[effect.copy] = self._begin(
            "copies", name, "fetch", effect.request, f"blocks {_ids(effect.blocks)}"
        )

    def _copy_ended(self, event: ev.CopyEnded) -> None:
        bar = self._copies.pop(event.copy, None)
        if bar is not None:
            beside = ", ended while a step was running" if event.in_step else ""
            bar.details += f", {event.bytes:,} bytes in {event.copy_ns / 1e6:.2f} ms{beside}"
        self._end(bar)

    def _read_doubtful(self, event: ev.ReadDoubtful) -> None:
        self._mark("fault", f"read {event.read} is doubtful: {event.problem}")

    # ------------------------------------------------------------ processes

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        self._mark("fault", f"worker lost: {event.problem}")
        for bar in (*self._steps, *self._copies.values()):
            self._end(bar, "worker lost", failed=True)
        self._steps = []
        self._copies.clear()

    def _mover_lost(self, event: ev.MoverLost) -> None:
        self._mark(
            "life" if event.asked else "fault", f"mover {'replaced' if event.asked else 'lost'}: {event.problem}"
        )
        for bar in self._reads.values():
            self._end(bar, "mover lost", failed=True)
        self._reads.clear()


def _ids(blocks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, blocks[:4]))
    return f"{shown}, … ({len(blocks)})" if len(blocks) > 4 else shown


def _marks(kind: str, label: str) -> Callable[[_Reader, Any], None]:
    return lambda reader, value: reader._mark(kind, label)


_HEARS: dict[type[Any], Callable[[_Reader, Any], None]] = {
    ev.GenerateAsked: _Reader._generate,
    ev.EndRequest: _Reader._end_request,
    ev.TakeFirstToken: _Reader._first_token,
    ev.MessageCame: _Reader._came,
    ev.Send: _Reader._sent,
    ev.Publish: _Reader._published,
    ev.RunStep: _Reader._run_step,
    ev.StepEnded: _Reader._step_ended,
    ev.StartRead: _Reader._start_read,
    ev.ReadEnded: _Reader._read_ended,
    ev.ReadDoubtful: _Reader._read_doubtful,
    ev.StartCopy: _Reader._start_copy,
    ev.CopyEnded: _Reader._copy_ended,
    ev.WorkerLost: _Reader._worker_lost,
    ev.MoverLost: _Reader._mover_lost,
    ev.WorkerUp: _marks("life", "worker up"),
    ev.MoverUp: _marks("life", "mover up"),
    ev.LinkLost: _marks("fault", "link lost"),
    ev.DrainAsked: _marks("life", "drain asked"),
    ev.LeaveAsked: _marks("life", "asked to leave"),
    ev.Drained: _marks("life", "shut down"),
}
