"""A file of lines, packed with gzip or not, as importers read it. What is wrong with it is said with file and line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from pdbus.bus.errors import ConfigError

from ..workload import Workload

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20  # a prompt of a million tokens is a line of some hundred KiB; what is longer is no line
HEAD_BYTES = 64 << 10  # enough to tell formats apart

T = TypeVar("T")


class BadLine(ValueError):
    """What is wrong with a line, and what would be right."""


class CutLine(BadLine):
    """It stops in the middle, as the last line of a cut file does."""


class Line(NamedTuple):
    number: int  # from 1
    text: str


class Source:
    """One file. Read it once; then `notes` says what was left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def error(self, problem: str, line: int = 0) -> ConfigError:
        return ConfigError(f"{self.path}:{line}" if line else str(self.path), problem)

    def head(self) -> bytes:
        """How it begins, unpacked. Raises ConfigError when it cannot be read."""
        return next(self.chunks(HEAD_BYTES), b"")

    def is_packed(self) -> bool:
        """Raises ConfigError when it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        except OSError as e:
            raise self.error(f"cannot be read: {e.strerror}") from None

    def all(self) -> bytes:
        """The whole file, unpacked. Raises ConfigError, also for one that is cut in its packing."""
        data = b"".join(self.chunks())
        if self.notes:
            raise self.error("is cut: its gzip stream ends early; give the whole file")
        return data

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Its bytes, unpacked; those of a cut gzip stream as far as they come, with a note. Raises ConfigError."""
        packed = self.is_packed()
        try:
            with self.path.open("rb") as raw:
                file = gzip.GzipFile(fileobj=raw) if packed else raw
                while chunk := file.read1(size):
                    yield chunk
        except EOFError:
            self.notes.append(f"{self.path}: its gzip stream is cut; what came before is used")
        except (zlib.error, gzip.BadGzipFile) as e:
            raise self.error(f"is no whole gzip file ({e}): pack it again") from None
        except OSError as e:
            raise self.error(f"cannot be read: {e.strerror}") from None

    def parsed(self, parse: Callable[[Line], T | None]) -> Iterator[T]:
        """What `parse` makes of each line; None and blank lines are passed over. A last line that is cut is left out
        with a note. Raises ConfigError naming file and line for a BadLine."""
        for number, data, ended in self._lines():
            try:
                found = parse(Line(number, _text(data))) if data.strip() else None
            except BadLine as e:
                if isinstance(e, CutLine) and not ended:
                    self.notes.append(f"{self.path}:{number}: the last line is cut and left out")
                    return
                raise self.error(str(e), number) from None
            if found is not None:
                yield found

    def _lines(self) -> Iterator[tuple[int, bytes, bool]]:
        """Number, bytes, and whether a line end followed."""
        number, rest = 0, b""
        for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += 1
                yield number, line, True
            if len(rest) > LINE_BYTES_MAX:
                raise self.error(f"is longer than {LINE_BYTES_MAX >> 20} MiB: that is no line of a trace", number + 1)
        if rest:
            yield number + 1, rest, False


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise BadLine("is no text in UTF-8: another program's file? Give a trace as text or gzip") from None


class Importer(NamedTuple):
    """One format. `matches` tells it by how a file begins; `read` raises ConfigError naming file and line."""

    name: str
    what: str  # in words
    matches: Callable[[str], bool]
    read: Callable[[Source], Workload]
