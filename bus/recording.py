"""What one life of a node or client recorded, read back from the files that are there of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .recording_part import DECODE_PLAIN, DECODE_RAW, Decode, Part, R, RawRecord, Record, RecordingHeader


class Recording:
    """The parts of one life, in order. Iterate over it or over `raw()`, as often as you like; then `truncated` says why
    that stopped early ('' when it did not), `damaged` whether that is no crash but changed bytes, and `lost` how many
    records could not be kept. `gone`: so many parts before the first one here are not there any more."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """`parts`: at least one, of one life, each number once."""
        self.parts = sorted(parts, key=lambda part: part.header.part)
        self.truncated = ""
        self.damaged = False
        self.lost = 0

    @property
    def header(self) -> RecordingHeader:
        return self.parts[0].header

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def gone(self) -> int:
        return self.header.part - 1

    def __iter__(self) -> Iterator[Record]:
        return self._records(DECODE_PLAIN)

    def raw(self) -> Iterator[RawRecord]:
        """The records with their payloads still encoded."""
        return self._records(DECODE_RAW)

    def _records(self, decode: Decode[R]) -> Iterator[R]:
        self.truncated, self.damaged, self.lost = "", False, 0
        for part, after in zip(self.parts, [*self.parts[1:], None], strict=True):
            for batch in part.batches(decode):
                self.lost += batch.lost
                yield from batch.records
            self._ended(part, after)
            if self.truncated:
                return

    def _ended(self, part: Part, after: Part | None) -> None:
        self.truncated, self.damaged = part.truncated, part.damaged
        if after is None:
            return
        if part.truncated:  # no crash: its node went on
            self.truncated, self.damaged = f"part {part.header.part} is {part.truncated}", True
        elif after.header.part > part.header.part + 1:
            self.truncated = f"part {part.header.part + 1} is missing"


def read(path: Path) -> Recording:
    """One file. Raises ConfigError when it is no recording."""
    return Recording([Part(path)])
