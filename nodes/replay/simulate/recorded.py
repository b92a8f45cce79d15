"""A recorded cluster as a simulation needs it: its settings, what its steps, reads and messages took, and what came of
its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pdbus.bus.client_recorder import ClientBegan
from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import (
    LeaseReleased,
    Message,
    PrefillAccepted,
    PrefillDone,
    PrefillRequest,
    TransferDone,
)
from pdbus.bus.recording import Recording

from ... import events as ev
from ...core import CoreConfig
from ..files import clock_offsets, opened
from ..turns import Hole, Unreadable, effect_of, event_of, node_began, tag_of, turns_of
from ..workload import Asked
from .asks import Ask
from .fit import Read, Step, lines_of, link_of
from .plan import Options
from .profile import NS_PER_MS, Profile
from .shapes import shape_of

HANDOFF = (PrefillRequest, PrefillAccepted, PrefillDone, TransferDone, LeaseReleased)  # said once for each try
WORK = (
    ev.GenerateAsked, ev.StepEnded, ev.ReadEnded, ev.RunStep, ev.StartRead, ev.TakeFirstToken, ev.EmitToken,
    ev.EndRequest,
)  # fmt: skip
NEEDED = {kind.__name__ for kind in WORK} | {
    f"{carrier.__name__} {message.KIND}" for carrier in (ev.MessageCame, ev.Send) for message in HANDOFF
}
Said = tuple[str, str, bytes, int]  # kind of a message, and its try: node, request, attempt


@dataclass
class Node:
    """What one life of a node tells."""

    core: CoreConfig
    role: str
    prefill: list[Step] = field(default_factory=list)
    decode: list[Step] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    moved: list[Read] = field(default_factory=list)
    said: dict[Said, int] = field(default_factory=dict)  # when first, on the common clock
    heard: dict[Said, int] = field(default_factory=dict)
    asks: dict[bytes, Ask] = field(default_factory=dict)


class RecordedCluster:
    """Reads all of it. Raises ConfigError for what holds no node that could be simulated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        recordings, _, _ = opened([path])
        offsets = clock_offsets([recording.header for recording in recordings])
        found = [_Reader(recording, offset) for recording, offset in zip(recordings, offsets, strict=True)]
        self.nodes = [reader.node for reader in found if reader.node is not None]
        self.prefill = self._of("prefill")
        self.decode = self._of("decode")
        if not self.prefill or not self.decode:
            missing = "prefill" if not self.prefill else "decode"
            raise ConfigError(str(path), f"holds no {missing} node: give the folder of all nodes of a cluster")

    def _of(self, role: str) -> list[Node]:
        """One for each name: of several lives the last."""
        return list({node.core.name: node for node in self.nodes if node.role == role}.values())

    def filled(self, options: Options) -> Options:
        """The same, with what the user left open as it was here. With as many decode nodes, each request goes to the
        one that it went to."""
        handoff = self.prefill[0].core.handoff
        filled = options._replace(
            prefill=len(self.prefill) if options.prefill is None else options.prefill,
            decode=len(self.decode) if options.decode is None else options.decode,
            lease_ns=options.lease_ns or handoff.lease_ns,
            renew_ns=options.renew_ns or (0 if options.lease_ns else handoff.renew_ns),
            claim_ns=options.claim_ns or (0 if options.lease_ns else handoff.claim_ns),
            prefill_policy=options.prefill_policy or self.decode[0].core.prefill_policy,
        )
        names = {node.core.name: number for number, node in enumerate(self.decode)}
        if options.policy or filled.decode != len(names):
            return filled
        return filled._replace(sent_to=tuple(names[ask.node] for ask in self.asks))

    @property
    def asks(self) -> list[Ask]:
        """What was asked, in the order of arrival."""
        return sorted((ask for node in self.nodes for ask in node.asks.values()), key=lambda ask: ask.sent_ns)

    def profile(self, name: str) -> Profile:
        """What it took here. Raises ConfigError when nothing was computed or read."""
        prefill = lines_of(step for node in self.nodes for step in node.prefill)
        decode = lines_of(step for node in self.nodes for step in node.decode)
        if not prefill or not decode:
            raise ConfigError(str(self.path), "holds too few steps to learn their times from; give --profile")
        p, d = self.prefill[0].core, self.decode[0].core
        reads, moved = ([r for node in self.nodes for r in getattr(node, what)] for what in ("reads", "moved"))
        rate, read_ms = link_of(reads, moved)
        return Profile(
            name=name,
            source=f"measured: {sum(len(n.prefill) + len(n.decode) for n in self.nodes)} steps and {len(reads)} reads",
            prefill=prefill,
            decode=decode,
            kv_bytes_per_token=max(1, d.block_bytes // d.block_size),
            prefill_kv_tokens=p.blocks * p.block_size,
            decode_kv_tokens=d.blocks * d.block_size,
            link_gb_per_s=rate or 1.0,
            read_ms=read_ms,
            message_ms=self._message_ms(),
            max_model_len=min(p.max_model_len, d.max_model_len),
            prefill_chunk=p.limits.prefill_chunk,
            max_batch_tokens=p.limits.max_batch_tokens,
            max_running=d.running_max,
            skip_sampling=p.skip_sampling,
        )

    def _message_ms(self) -> float:
        """Half of there and back: clocks of several machines may differ."""
        there, back = [], []
        for one in self.prefill:
            for other in self.decode:
                there += [at - other.said[key] for key, at in one.heard.items() if key in other.said]
                back += [at - one.said[key] for key, at in other.heard.items() if key in one.said]
        return max(0.0, (median(there) + median(back)) / 2 / NS_PER_MS) if there and back else 0.0


class _Reader:
    """One recording, read once."""

    def __init__(self, recording: Recording, offset_ns: int) -> None:
        self.node: Node | None = None
        self._offset_ns = offset_ns
        self._step: tuple[int, int, ev.RunStep] | None = None  # number, when, what
        self._started: dict[int, int] = {}  # reads
        self._sampled: dict[int, int] = {}  # tokens of the step that ended, by sequence, where they were not one
        self._took_ns = 0  # that step
        if tag_of(recording) == ClientBegan.__name__:
            return
        try:
            made = node_began(recording)
        except Unreadable as e:
            raise ConfigError(str(recording.path), str(e)) from None
        self.node = Node(made.core, made.membership.hello.role)
        for turn in turns_of(recording):
            if isinstance(turn, Hole):
                return
            for record in (turn.heard, *turn.decided):
                if record.kind in NEEDED:
                    is_input = record is turn.heard
                    self._take(event_of(record) if is_input else effect_of(record), record.now_ns + offset_ns)

    def _take(self, value: Any, now: int) -> None:
        node = self.node
        assert node is not None
        match value:
            case ev.RunStep():
                self._step = value.step, now, value
            case ev.StepEnded():
                self._step_ended(node, value, now)
            case ev.StartRead(read=read):
                self._started[read] = now
            case ev.ReadEnded(read=read, problem="", bytes=size) if size and read in self._started:
                node.reads.append(Read(size, now - self._started.pop(read)))
                node.moved.append(Read(size, value.transfer_ns))
            case ev.Send(message=message):
                node.said.setdefault(_said(message), now)
            case ev.MessageCame(message=message):
                node.heard.setdefault(_said(message), now)
            case ev.GenerateAsked():
                node.asks[value.request] = _ask(len(node.asks), value, now, node.core.name)
            case ev.TakeFirstToken(request=request) if request in node.asks:
                node.asks[request].sampled(1, 0, now)
            case ev.EmitToken(request=request, seq=seq) if request in node.asks:
                tokens = self._sampled.get(seq, 1)
                node.asks[request].sampled(tokens, self._took_ns // tokens, now)
            case ev.EndRequest(request=request) if request in node.asks:
                ask = node.asks[request]
                ask.end, ask.ended_ns = value, now
                ask.cause = value.code if value.reason == "error" else ""

    def _step_ended(self, node: Node, ended: ev.StepEnded, now: int) -> None:
        self._sampled = {row.seq: row.tokens for row in ended.rows if row.tokens != 1}
        if self._step is None or self._step[0] != ended.step:
            return
        shape = shape_of(self._step[2].rows)
        took = self._took_ns = now - self._step[1]
        counts = {row.tokens for row in ended.rows}
        if shape.tokens and not shape.rows:
            node.prefill.append(Step(shape.tokens, shape.context, took))
        elif shape.rows and not shape.tokens and len(counts) == 1:  # several tokens a row were as many passes
            tokens = counts.pop()
            node.decode.append(Step(shape.rows, shape.row_context + (tokens - 1) / 2, took // tokens))


def _said(message: Message) -> Said:
    try_ = message.try_  # type: ignore[attr-defined]
    return message.KIND, try_.node, try_.request, try_.attempt


def _ask(number: int, asked: ev.GenerateAsked, now: int, node: str) -> Ask:
    return Ask(
        number=number,
        asked=Asked(now, asked.prompt_tokens, asked.sampling.max_tokens),
        request=asked.request,
        client=asked.client,
        prompt_tokens=asked.prompt_tokens,
        block_hashes=asked.block_hashes,
        sampling=asked.sampling,
        node=node,
        sent_ns=now,
    )
