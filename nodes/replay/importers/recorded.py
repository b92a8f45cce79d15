"""Our own recordings: what clients asked of the decode nodes of a cluster that ran with --record.

The lengths of answers are those that were given; of a request that failed or had not ended, what it asked for. The
hashes of full blocks stand in a recording, so prefixes are known without tokens; equal prompts are known by their
digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mcap.writer import MCAP0_MAGIC

from pdbus.bus.client_recorder import ClientBegan
from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import SUFFIX

from ... import events as ev
from ..files import clock_offsets, opened
from ..turns import Unreadable, effect_of, event_of, node_began, tag_of
from ..workload import Asked, Workload
from .prefixes import Prefixes
from .rows import Row, workload
from .source import Importer, Source

ANSWERED = ("stop", "length", "cancelled")
MAGIC = MCAP0_MAGIC.decode(errors="replace")
PATTERNS = (f"*{SUFFIX}", f"*{SUFFIX}.gz")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def matches(head: str) -> bool:
    return head.startswith(MAGIC)


def read(source: Source) -> Workload:
    """Raises ConfigError naming the file."""
    path = source.path
    with tempfile.TemporaryDirectory() as folder:
        files = [_unpacked(file, Path(folder), source) for file in (files_in(path) if path.is_dir() else [path])]
        recordings, problems, _ = opened(files)
        source.notes += [f"{problem}; left out" for problem in problems]
        offsets = clock_offsets([recording.header for recording in recordings])
        nodes = [_node(recording, offset, source) for recording, offset in zip(recordings, offsets, strict=True)]
    sizes = {node.block_tokens: node.name for node in nodes if node.asked}
    if len(sizes) > 1:
        told = ", ".join(f"{size} tokens on {name}" for size, name in sizes.items())
        raise source.error(f"holds nodes with blocks of different sizes ({told}): give those of one cluster")
    prefixes = Prefixes()
    rows = [row for node in nodes for row in node.rows(prefixes)]
    if not rows and all(tag_of(recording) == ClientBegan.__name__ for recording in recordings):
        raise source.error("holds recordings of clients alone; give those of the decode nodes")
    return workload(path.name, sorted(rows, key=lambda row: row.at), source, next(iter(sizes), 0))


RECORDED = Importer("recording", "a folder of --record", matches, read)


class _Node(NamedTuple):
    """What one life of a node was asked, at which time on the common clock, and how that ended."""

    name: str
    block_tokens: int = 0
    asked: tuple[tuple[int, ev.GenerateAsked], ...] = ()
    ended: dict[bytes, ev.EndRequest] = {}

    def rows(self, prefixes: Prefixes) -> Iterator[Row]:
        for at, asked in self.asked:
            end = self.ended.get(asked.request)
            answer = end.completion_tokens if end and end.reason in ANSWERED else asked.sampling.max_tokens
            length, whole = asked.prompt_tokens, asked.prompt_digest
            ids = prefixes.ids(asked.block_hashes, length, self.block_tokens, whole)
            yield Row(0, at, Asked(0, length, answer, ids))


def _node(recording: Recording, offset_ns: int, source: Source) -> _Node:
    name = recording.header.node
    asked: list[tuple[int, ev.GenerateAsked]] = []
    ended: dict[bytes, ev.EndRequest] = {}
    unknown = 0
    if tag_of(recording) == ClientBegan.__name__:
        return _Node(name)  # the nodes tell more
    try:
        core = node_began(recording).core
    except Unreadable as e:
        source.notes.append(f"{recording.path.name}: {e}; left out")
        return _Node(name)
    if not core.decodes:
        return _Node(name)
    for record in recording.raw():
        try:
            if record.kind == ev.GenerateAsked.__name__:
                event = event_of(record)
                assert isinstance(event, ev.GenerateAsked)
                asked.append((record.now_ns + offset_ns, event))
            elif record.kind == ev.EndRequest.__name__:
                effect = effect_of(record)
                assert isinstance(effect, ev.EndRequest)
                ended[effect.request] = effect
        except Unreadable:
            unknown += 1
    _tell(recording, unknown, source)
    return _Node(name, core.block_size, tuple(asked), ended)


def _tell(recording: Recording, unknown: int, source: Source) -> None:
    if recording.gone:
        source.notes.append(
            f"{recording.path.name}: the {recording.gone} parts before it are gone, with what was asked"
        )
    if recording.truncated:
        source.notes.append(f"{recording.path.name}: {recording.truncated}; used up to there")
    if recording.lost:
        source.notes.append(f"{recording.path.name}: {recording.lost} records were lost while recording")
    if unknown:
        source.notes.append(f"{recording.path.name}: {unknown} requests of another version cannot be read; left out")


def _unpacked(file: Path, folder: Path, source: Source) -> Path:
    packed = Source(file)
    if not packed.is_packed():
        return file
    whole = folder / file.name.removesuffix(".gz")
    whole.write_bytes(b"".join(packed.chunks()))
    source.notes += packed.notes
    return whole
