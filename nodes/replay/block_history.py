"""The history of one KV block of one node: who was given it, who wrote it, who could read it."""

from __future__ import annotations

from typing import Any

from pdbus.bus.recording import Recording
from pdbus.bus.wire import unpack_u32

from .. import events as ev
from .check_leases import key_of
from .history import opened
from .story import Moment


class BlockHistory:
    """Follows one node's turns for one block."""

    def __init__(self, block: int, recording: Recording, offset_ns: int) -> None:
        self.moments: list[Moment] = []
        self._block = block
        self._node = recording.header.node
        self._names: dict[int, str] = {}  # of sequences
        self._tables: dict[int, list[int]] = {}
        self._reads: dict[int, str] = {}
        self._copies: dict[int, str] = {}
        self._announced: dict[Any, None] = {}
        self._size, following = opened(recording)
        for turn in following:
            for place, value in enumerate((turn.event, *turn.effects)):
                self._at_ns, self._sequence = turn.now_ns + offset_ns, turn.sequence + place
                self._hear(value)

    def _hear(self, value: Any) -> None:
        match value:
            case ev.OpenSequence():
                self._open(value)
            case ev.CloseSequence(seq=seq) | ev.EndRequest(seq=seq):
                self._close(seq)
            case ev.RunStep():
                self._step(value)
            case ev.StartRead():
                self._read(value)
            case ev.ReadEnded(read=read) if read in self._reads:
                brought = self._reads.pop(read)
                self._tell(f"read {read} ends", value.problem or f"{brought} is there")
            case ev.StartCopy(copy=copy, way=way, blocks=blocks) if self._block in blocks:
                self._copies[copy] = f"copy {copy} {way}"
                self._tell(f"{self._copies[copy]} begins", f"request {value.request.hex()}")
            case ev.CopyEnded(copy=copy) if copy in self._copies:
                self._tell(f"{self._copies.pop(copy)} ends", f"{value.bytes:,} bytes in all")
            case ev.MoverLost() if self._reads:
                self._tell("the mover is gone", "and what it was reading with it")
                self._reads.clear()
            case ev.WorkerLost() if any(self._block in table for table in self._tables.values()):
                self._tell("the worker is gone", "and what it had computed with it")
                self._tables.clear()
            case ev.Send():
                self._sent(value.message)
            case ev.Publish():
                self._published(value)

    def _open(self, value: ev.OpenSequence) -> None:
        try_ = value.try_
        self._close(value.seq)
        name = f"request {value.request.hex()}"
        self._names[value.seq] = f"request {try_.request.hex()} attempt {try_.attempt} of {try_.node}" if try_ else name

    def _close(self, seq: int) -> None:
        if self._block in self._tables.pop(seq, ()):
            self._tell("given back", self._name(seq))

    def _step(self, step: ev.RunStep) -> None:
        size = self._size
        for row in step.rows:
            if row.reset:
                self._close(row.seq)
            table = self._tables.setdefault(row.seq, [])
            new = list(unpack_u32(row.new_blocks))
            table += new
            place = table.index(self._block) if self._block in table else -1
            if self._block in new:
                self._tell("given", f"{self._name(row.seq)}: block {place} of it")
            if place >= 0 and row.start // size <= place <= (row.start + row.count - 1) // size:
                first, last = max(row.start, place * size), min(row.start + row.count, (place + 1) * size) - 1
                self._tell(f"step {step.step} writes", f"{self._name(row.seq)}: tokens {first} to {last}")

    def _read(self, read: ev.StartRead) -> None:
        if self._block in read.target:
            place = read.begin // self._size + read.target.index(self._block)
            first, end = max(read.begin, place * self._size), min(read.end, (place + 1) * self._size)
            self._reads[read.read] = f"tokens {first} to {end - 1} of {read.peer.split('/')[0]}"
            self._tell(f"read {read.read} begins", f"request {read.request.hex()}: {self._reads[read.read]} into it")

    def _sent(self, message: Any) -> None:
        for part in (message, *getattr(message, "entries", ())):
            lease = getattr(part, "lease", None)
            blocks = getattr(part, "blocks", b"")
            if lease is None or not isinstance(blocks, bytes) or self._block not in unpack_u32(blocks):
                continue
            if lease not in self._announced:
                self._announced[lease] = None
                self._tell("announced", f"lease {lease.generation} of {part.try_.node}, {key_of(part.try_)[1]}")

    def _name(self, seq: int) -> str:
        return self._names.get(seq, f"sequence {seq}")

    def _tell(self, what: str, details: str) -> None:
        self.moments.append(Moment(self._at_ns, self._node, self._sequence, what, details))

    def _published(self, value: ev.Publish) -> None:
        data: Any = value.data
        if value.topic == "kv":
            for event in data["events"]:
                if event.get("block") == self._block:
                    self._tell("cached", f"as {event['block_hash'].hex()[:12]}")
        elif value.topic == "lease" and value.event == "lease.ended":
            ended = [lease for lease in self._announced if lease.generation == data["generation"]]
            for lease in ended:
                del self._announced[lease]
                self._tell("no longer announced", f"lease {lease.generation} ended as {data['cause']}")
