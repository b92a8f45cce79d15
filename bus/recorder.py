"""What one node heard and decided, appended to a file as it happens, and read back.

A file is a header and then batches, each a little-endian u32 length and that many bytes of msgpack. Many records go
into one batch, written by a thread every 200 ms: a crash loses at most the last flush, a cut file reads to its last
whole batch. Nothing here knows what the records mean.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ConfigError, RemoteProtocolError
from .messages import Message
from .wire import Declared, decode, encode

FORMAT = "pdbus-recording"
VERSION = 1
SUFFIX = ".pdrec"
FLUSH_S = 0.2
PENDING_MAX = 200_000  # records; a disk that stalls must not eat the node's memory: what is more is counted, not kept
BATCH_RECORDS_MAX = 4096
BATCH_BYTES_MAX = 256 << 20  # a length above this is no length but damage

_LENGTH = struct.Struct("<I")
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


class Record(Declared):
    """One input or effect. `sequence` counts from 1; `cause` is the sequence of the record that led here, or 0."""

    sequence: int
    now_ns: int  # the node's monotonic clock
    kind: str
    payload: Any
    cause: int = 0


class Batch(Declared):
    records: tuple[Record, ...]
    lost: int = 0  # records before these that did not fit PENDING_MAX


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
        self._write(encode(header))
        self._file.flush()
        self._pending: deque[Record] = deque()
        self._sequence = self._lost = 0  # written by append alone
        self._lost_told = 0  # written by the writer alone
        self._some = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._writer.start()

    def append(self, kind: str, payload: Declared | dict[str, Any], now_ns: int, cause: int = 0) -> int:
        """Queues one record and returns its sequence. `payload` is encoded later and must not change; the kind of a
        message in it, which its own encoding does not tell, is added to `kind`."""
        self._sequence += 1
        message = getattr(payload, "message", None)
        kind = f"{kind} {message.KIND}" if isinstance(message, Message) else kind
        if len(self._pending) >= PENDING_MAX or self._closing.is_set():
            self._lost += 1
            return self._sequence
        self._pending.append(Record(sequence=self._sequence, now_ns=now_ns, kind=kind, payload=payload, cause=cause))
        if not self._some.is_set():
            self._some.set()
        return self._sequence

    def close(self) -> None:
        """Writes what is pending and closes the file. Idempotent."""
        self._closing.set()
        self._some.set()
        self._writer.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._some.wait()
                self._closing.wait(FLUSH_S)
                self._some.clear()
                self._flush()
            self._flush()
        except (OSError, TypeError, ValueError) as e:  # no room on the disk; a payload that msgpack cannot hold
            _log.error("recording to %s ends here: %s", self.path, e)
        finally:
            self._closing.set()  # what comes after a failure is counted, not kept
            self._file.close()

    def _flush(self) -> None:
        while self._pending:
            count = min(len(self._pending), BATCH_RECORDS_MAX)
            lost = self._lost - self._lost_told
            self._write(encode(Batch(records=tuple(self._pending.popleft() for _ in range(count)), lost=lost)))
            self._lost_told += lost
        self._file.flush()

    def _write(self, data: bytes) -> None:
        self._file.write(_LENGTH.pack(len(data)) + data)


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
    """One file, read back. Iterate once; then `truncated` says why it stopped early ('' when it did not) and `lost`
    how many records its node could not keep. A file that is still being written reads as a cut one."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file when it is no recording, or of a later version."""
        self.path = path
        self.truncated = ""
        self.lost = 0
        try:
            self._file = path.open("rb")
        except OSError as e:
            raise ConfigError(str(path), f"cannot be read: {e.strerror}") from None
        self.header = self._read_header()

    def _read_header(self) -> RecordingHeader:
        data = self._next()
        try:
            header = decode(data or b"", RecordingHeader)
        except RemoteProtocolError:
            header = None
        if header is None or header.format != FORMAT:
            self._file.close()
            raise ConfigError(str(self.path), "is no recording; give a file or folder of --record")
        if header.version > VERSION:
            self._file.close()
            problem = f"is a recording of version {header.version}; this pdbus reads up to {VERSION}"
            raise ConfigError(str(self.path), problem)
        return header

    def __iter__(self) -> Iterator[Record]:
        with self._file:
            while (data := self._next()) is not None:
                try:
                    batch = decode(data, Batch)
                except RemoteProtocolError as e:
                    self.truncated = f"damaged before byte {self._file.tell()}: {e}"
                    return
                self.lost += batch.lost
                yield from batch.records

    def _next(self) -> bytes | None:
        """The next length's bytes; None at the end, whole or not."""
        at = self._file.tell()
        prefix = self._file.read(_LENGTH.size)
        if not prefix:
            return None
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
        data = self._file.read(length) if 0 < length <= BATCH_BYTES_MAX else b""
        if not length or len(data) < length:
            self.truncated = f"cut at byte {at}"
            return None
        return data


def read(path: Path) -> Recording:
    """Opens one file: `for record in read(path)`. Raises ConfigError when it is no recording."""
    return Recording(path)
