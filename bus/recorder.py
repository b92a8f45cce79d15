"""What one node heard and decided, appended to a file as it happens, and read back.

A file is a sequence of frames: length, CRC-32 and a count, each a little-endian u32, then so many bytes of msgpack.
The first frame is the header, every other one an array of records. Records are encoded as they come, which costs less
than to keep them, and written by a thread, many to a frame, every 200 ms: a crash loses at most the last flush, a cut
file reads to its last whole frame, and a changed byte anywhere is noticed. Nothing here knows what the records mean.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .errors import ConfigError, RemoteProtocolError
from .wire import Declared, Raw, array_of, decode, decode_many, encode

FORMAT = "pdbus-recording"
VERSION = 2
SUFFIX = ".pdrec"
FLUSH_S = 0.2
PENDING_MAX = 200_000  # records; a disk that stalls must not eat the node's memory: what is more is counted, not kept
BATCH_RECORDS_MAX = 4096
FRAME_BYTES_MAX = 256 << 20  # a length above this is no length but damage

_FRAME = struct.Struct("<III")  # bytes, their CRC-32 begun with the third, records lost before these
_log = logging.getLogger("pdbus.recorder")


class RecordingHeader(Declared):
    """Whose file this is. The two clocks were read together, so that files of several machines can be laid side by
    side; those of one `boot` share the monotonic clock itself."""

    format: str
    version: int
    node: str
    incarnation: bytes
    monotonic_ns: int
    wall_ns: int
    boot: str = ""


class Record(Declared, array_like=True):
    """One input or effect. `sequence` counts from 1; `cause` is the sequence of the record that led here, or 0."""

    sequence: int
    now_ns: int  # the node's monotonic clock
    kind: str
    payload: Any
    cause: int = 0


class RawRecord(Declared, array_like=True):
    """A record whose payload is still encoded."""

    sequence: int
    now_ns: int
    kind: str
    payload: Raw
    cause: int = 0


R = TypeVar("R", Record, RawRecord)


class Recorder:
    """Appends records to one new file in `directory`. Used by one thread. A failing disk ends the recording, with one
    line in the log, and never the node."""

    def __init__(self, directory: Path, node: str, incarnation: bytes) -> None:
        """Raises ConfigError (`--record`) when the file cannot be made."""
        self.path = Path(directory) / f"{node}-{incarnation.hex()[:12]}{SUFFIX}"
        self._file = _create(self.path)
        header = RecordingHeader(
            format=FORMAT, version=VERSION, node=node, incarnation=incarnation,
            monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns(), boot=_boot(),
        )  # fmt: skip
        self._write(encode(header), lost=0)
        self._file.flush()
        self._pending: deque[bytes] = deque()
        self._sequence = self._lost = 0  # written by append alone
        self._lost_told = 0  # written by the writer alone
        self._some = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._writer.start()

    def append(self, kind: str, payload: Declared | dict[str, Any], now_ns: int, cause: int = 0) -> int:
        """Appends one record and returns its sequence."""
        self._sequence += 1
        if len(self._pending) >= PENDING_MAX or self._closing.is_set():
            self._lost += 1
            return self._sequence
        record = Record(sequence=self._sequence, now_ns=now_ns, kind=kind, payload=payload, cause=cause)
        try:
            self._pending.append(encode(record))
        except (TypeError, ValueError, OverflowError) as e:  # what msgpack cannot hold
            self._end(e)
        if not self._some.is_set():
            self._some.set()
        return self._sequence

    def close(self) -> None:
        """Writes what is pending and closes the file. Idempotent."""
        self._closing.set()
        self._some.set()
        self._writer.join()

    def _end(self, problem: Exception) -> None:
        """Ends the recording: what comes from now on is counted, not kept."""
        _log.error("recording to %s ends here: %s", self.path, problem)
        self._closing.set()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._some.wait()
                self._closing.wait(FLUSH_S)
                self._some.clear()
                self._flush()
            self._flush()
        except OSError as e:
            self._end(e)
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._pending:
            count = min(len(self._pending), BATCH_RECORDS_MAX)
            lost = self._lost - self._lost_told
            self._write(array_of([self._pending.popleft() for _ in range(count)]), lost)
            self._lost_told += lost
        self._file.flush()

    def _write(self, data: bytes, lost: int) -> None:
        self._file.write(frame(data, lost))


def frame(data: bytes, lost: int = 0) -> bytes:
    """One frame of a file. `lost`: records before these that could not be kept."""
    return _FRAME.pack(len(data), zlib.crc32(data, lost), lost) + data


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")
    except OSError as e:
        raise ConfigError("--record", f"cannot write {path}: {e.strerror}") from None


class Recording:
    """One file, read back. Iterate once, over it or over `raw()`; then `truncated` says why it stopped early ('' when
    it did not), `damaged` whether that is no crash but changed bytes, and `lost` how many records its node could not
    keep. A file that is still being written reads as a cut one."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file when it is no recording, or of another version."""
        self.path = path
        self.truncated = ""
        self.damaged = False
        self.lost = 0
        try:
            self._file = path.open("rb")
        except OSError as e:
            raise ConfigError(str(path), f"cannot be read: {e.strerror}") from None
        self.header = self._read_header()

    def _read_header(self) -> RecordingHeader:
        try:
            header = decode(self._next() or b"", RecordingHeader)
        except RemoteProtocolError:
            header = None
        if header is None or header.format != FORMAT:
            self._file.close()
            raise ConfigError(str(self.path), "is no recording; give a file or folder of --record")
        if header.version != VERSION:
            self._file.close()
            problem = f"is a recording of version {header.version}; this pdbus reads version {VERSION}"
            raise ConfigError(str(self.path), problem)
        return header

    def close(self) -> None:
        """For who wanted its header alone: iterating closes it."""
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        return self._records(Record)

    def raw(self) -> Iterator[RawRecord]:
        """The records with their payloads still encoded."""
        return self._records(RawRecord)

    def _records(self, kind: type[R]) -> Iterator[R]:
        with self._file:
            while (data := self._next()) is not None:
                try:
                    records = decode_many(data, kind)
                except RemoteProtocolError as e:
                    self._damage(f"before byte {self._file.tell()}: {e}")
                    return
                yield from records

    def _next(self) -> bytes | None:
        """The next frame; None at the end, whole or not."""
        at = self._file.tell()
        prefix = self._file.read(_FRAME.size)
        if not prefix:
            return None
        length, checksum, lost = _FRAME.unpack(prefix) if len(prefix) == _FRAME.size else (0, 0, 0)
        data = self._file.read(length) if length <= FRAME_BYTES_MAX else b""
        if not length or len(data) < length <= FRAME_BYTES_MAX:
            self.truncated = f"cut at byte {at}"
            return None
        if zlib.crc32(data, lost) != checksum:
            self._damage(f"between bytes {at} and {self._file.tell()}")
            return None
        self.lost += lost
        return data

    def _damage(self, where: str) -> None:
        self.truncated, self.damaged = f"damaged {where}", True


def read(path: Path) -> Recording:
    """Opens one file: `for record in read(path)`. Raises ConfigError when it is no recording."""
    return Recording(path)
