"""Recordings as a test wants them: some records changed or missing, every checksum right."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pdbus.bus.recording import read
from pdbus.bus.recording_part import PartWriter, RawRecord, RecordingHeader
from pdbus.bus.wire import Raw, encode, pack_foreign, replace, unpack_foreign
from pdbus.nodes.replay.findings import Finding, Kind
from pdbus.nodes.replay.node_run import Runner

Batches = Sequence[tuple[Sequence[RawRecord], int]]


def write(path: Path, header: RecordingHeader, batches: Batches) -> Path:
    """One file of these records; beside each batch how many were lost before it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = PartWriter(Path(folder), header)
        for records, lost in batches:
            part.write([encode(record) for record in records], lost)
            part.flush()
        part.close()
        part.path.replace(path)
    return path


def rewrite(path: Path, change: Callable[[RawRecord], RawRecord | None], to: Path | None = None) -> Path:
    """The recording, here or in another file, with what `change` makes of each record; None leaves it out."""
    recording = read(path)
    records = [new for record in recording.raw() if (new := change(record)) is not None]
    return write(to or path, recording.header, [(records, 0)])


def rewrite_about(path: Path, **changes: object) -> None:
    """The recording with other things said at its head."""
    recording = read(path)
    about = Raw(pack_foreign({**unpack_foreign(bytes(recording.header.about)), **changes}))
    write(path, replace(recording.header, about=about), [(list(recording.raw()), 0)])


def with_payload(record: RawRecord, **changes: object) -> RawRecord:
    return replace(record, payload=Raw(pack_foreign({**unpack_foreign(bytes(record.payload)), **changes})))


def flipped(record: RawRecord, at: int, bit: int) -> RawRecord:
    """One bit of the payload is another."""
    payload = bytearray(bytes(record.payload))
    payload[at] ^= bit
    return replace(record, payload=Raw(bytes(payload)))


def failures_of(path: Path) -> list[Finding]:
    """What is wrong with one node's recording, taken alone."""
    findings: list[Finding] = []
    Runner(read(path), findings).all()
    return [finding for finding in findings if finding.kind is not Kind.NOTE]


def missed(path: Path, to: Path, chooser: random.Random, count: int) -> list[str]:
    """Of so many effects one bit is changed, one after the other: those that nobody noticed, or noticed elsewhere."""
    problems = []
    for victim in chooser.sample([record for record in read(path).raw() if record.cause], count):
        at, bit = chooser.randrange(len(bytes(victim.payload))), 1 << chooser.randrange(8)
        changed = flipped(victim, at, bit)
        rewrite(path, lambda r, new=changed: new if r.sequence == new.sequence else r, to)  # type: ignore[misc]
        found = failures_of(to)
        if not found or (found[0].kind is not Kind.DAMAGE and found[0].sequence != victim.sequence):
            problems.append(f"record {victim.sequence} ({victim.kind}), byte {at}, bit {bit}: {found[:1]}")
    return problems


def header_bytes(path: Path) -> int:
    """How long the file was before its first record: its magic, an MCAP header and one chunk."""
    data, at = path.read_bytes(), 8
    for _ in range(2):
        at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
    return at
