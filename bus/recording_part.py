"""One file of a recording: an MCAP file whose messages are msgpack, and nothing but appended to.

Two channels: `recording` has one message, the header; `records` the rest, each up to 256 records, because a message
has a price of its own. One compressed chunk is written with every flush. Chunks carry a checksum of their content and
the end of the file one of everything, so a changed byte is noticed; there is no index, which a crash would lose.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from mcap.opcode import Opcode
from mcap.records import Channel, DataEnd, Footer, Header, McapRecord, Message
from mcap.stream_reader import StreamReader
from mcap.writer import MCAP0_MAGIC, CompressionType, IndexType, Writer

from .errors import ConfigError, RemoteProtocolError
from .wire import Declared, Raw, array_of, decode, decoder, encode

PROFILE = "pdbus"
VERSION = 3
SUFFIX = ".mcap"
HEADER, RECORDS = "recording", "records"
CHUNK_BYTES = 1 << 20
LENGTH_MAX = 256 << 20  # bytes; a length above this is no length but damage

_FOOTER = Footer(0, 0, zlib.crc32(struct.pack("<BQQQ", Opcode.FOOTER, 20, 0, 0)))  # of a file without a summary
_PREFIX = struct.Struct("<BQ")  # of every MCAP record: opcode, length


class RecordingHeader(Declared):
    """Whose part this is, and which. The two clocks were read together when the life began, so that files of several
    machines can be laid side by side; those of one `boot` share the monotonic clock itself."""

    version: int
    node: str
    incarnation: bytes
    monotonic_ns: int
    wall_ns: int
    boot: str = ""
    part: int = 1
    about: Raw = Raw(b"\xc0")  # what was recorded, as its program declares it; the same in every part


class Record(Declared, array_like=True):
    """One input or effect. `sequence` counts from 1 over all parts; `cause` is the sequence of the record that led
    here, or 0."""

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


class Batch(Declared, Generic[R], array_like=True):
    """What one message holds. `lost`: records before these that could not be kept."""

    lost: int
    records: tuple[R, ...]


class _Encoded(Declared, array_like=True):
    """A Batch of records that are encoded already."""

    lost: int
    records: Raw


Decode = Callable[[bytes], Batch[R]]
DECODE_PLAIN: Decode[Record] = decoder(Batch[Record])
DECODE_RAW: Decode[RawRecord] = decoder(Batch[RawRecord])


def part_name(node: str, incarnation: bytes, part: int) -> str:
    return f"{node}-{incarnation.hex()[:12]}-{part:04d}{SUFFIX}"


def _private(path: str, flags: int) -> int:
    """Who asked whom for what, and perhaps the prompts and answers: not for others on this machine."""
    return os.open(path, flags, 0o600)


class PartWriter:
    """Writes one new file. Every call may raise OSError, and is of no use afterwards."""

    def __init__(self, directory: Path, header: RecordingHeader) -> None:
        self.path = directory / part_name(header.node, header.incarnation, header.part)
        self._file: BinaryIO = open(self.path, "xb", opener=_private)  # noqa: SIM115
        self._mcap = Writer(
            self._file, chunk_size=CHUNK_BYTES, compression=CompressionType.ZSTD, index_types=IndexType.NONE,
            repeat_channels=False, repeat_schemas=False, use_statistics=False, use_summary_offsets=False,
            enable_data_crcs=True,
        )  # fmt: skip
        self._mcap.start(profile=PROFILE)
        about = self._mcap.register_channel(HEADER, "msgpack", schema_id=0)
        self._records = self._mcap.register_channel(RECORDS, "msgpack", schema_id=0)
        self._add(about, encode(header))
        self.flush()

    def write(self, records: list[bytes], lost: int) -> None:
        self._add(self._records, encode(_Encoded(lost=lost, records=Raw(array_of(records)))))

    def flush(self) -> None:
        self._mcap.flush()  # type: ignore[no-untyped-call]

    @property
    def size_bytes(self) -> int:
        """Without what the next flush will write."""
        return self._file.tell()

    def close(self) -> None:
        with self._file:
            self._mcap.finish()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """After an OSError: nothing more can be written."""
        with suppress(OSError):
            self._file.close()

    def _add(self, channel: int, data: bytes) -> None:
        now_ns = time.time_ns()
        self._mcap.add_message(channel, log_time=now_ns, data=data, publish_time=now_ns)


class Part:
    """One file, read back. After `batches` was exhausted `truncated` says why it stopped early ('' when it did not),
    and `damaged` whether that is no crash but changed bytes. A file that is still being written reads as a cut one."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file when it is no recording, or of another version."""
        self.path = path
        self.truncated = ""
        self.damaged = False
        self.header = self._header()

    def batches(self, decode_batch: Decode[R]) -> Iterator[Batch[R]]:
        for message in self._messages():
            try:
                yield decode_batch(message)
            except RemoteProtocolError as e:
                self.truncated, self.damaged = f"damaged: {e}", True
                return

    def _messages(self) -> Iterator[bytes]:
        self.truncated, self.damaged = "", False
        try:
            file = self.path.open("rb")
        except OSError as e:
            self.truncated = f"cannot be read: {e.strerror}"
            return
        with file:
            at, checked, whole, channel = 0, False, False, -1
            records = _records(file)
            while (record := self._next(file, records, at, whole)) is not None:
                at = file.tell()
                if isinstance(record, Channel) and record.topic == RECORDS:
                    channel = record.id
                elif isinstance(record, Message) and record.channel_id == channel:
                    yield record.data
                checked |= isinstance(record, DataEnd)  # with the checksum of everything before it
                whole |= checked and record == _FOOTER
            if not self.truncated and (not whole or file.read(1)):
                self.truncated, self.damaged = f"damaged at its end, before byte {file.tell()}", True

    def _next(self, file: BinaryIO, records: Iterator[McapRecord], at: int, whole: bool) -> McapRecord | None:
        try:
            return next(records, None)
        except Exception as e:  # whatever the library and its decompressors raise on bytes that nobody wrote so
            self.damaged = not _is_cut(file, at, whole)
            self.truncated = (
                f"damaged after byte {at}: {str(e) or type(e).__name__}" if self.damaged else f"cut at byte {at}"
            )
            return None

    def _header(self) -> RecordingHeader:
        try:
            with self.path.open("rb") as file:
                profile, data = _beginning(file)
        except OSError as e:
            raise ConfigError(str(self.path), f"cannot be read: {e.strerror}") from None
        if profile not in (None, PROFILE):
            raise ConfigError(str(self.path), f"is an MCAP file of another program (profile {profile!r}), no recording")
        try:
            header = decode(data, RecordingHeader)
        except RemoteProtocolError:
            raise ConfigError(str(self.path), "is no recording; give a file or folder of --record") from None
        if header.version != VERSION:
            problem = f"is a recording of version {header.version}; this pdbus reads version {VERSION}"
            raise ConfigError(str(self.path), problem)
        return header


def _records(file: BinaryIO) -> Iterator[McapRecord]:
    return StreamReader(file, validate_crcs=True, record_size_limit=LENGTH_MAX).records


def _beginning(file: BinaryIO) -> tuple[str | None, bytes]:
    """The profile of an MCAP file, None for other files, and its first message, b'' without any."""
    profile: str | None = None
    try:
        for record in _records(file):
            if isinstance(record, Header):
                profile = record.profile
            elif profile != PROFILE:
                break
            elif isinstance(record, Message):
                return profile, record.data
    except OSError:
        raise
    except Exception:
        return profile, b""
    return profile, b""


def _is_cut(file: BinaryIO, at: int, whole: bool) -> bool:
    """Whether the file just ends within what stands at `at`, as a crash leaves it: an MCAP record, or after the last
    one, when it is `whole`, the file's last bytes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(MCAP0_MAGIC)))
    if at and file.read() == MCAP0_MAGIC:
        return False
    file.seek(at)
    prefix = file.read(_PREFIX.size)
    if whole:
        return len(prefix) < len(MCAP0_MAGIC) and MCAP0_MAGIC.startswith(prefix)
    return len(prefix) < _PREFIX.size or at + _PREFIX.size + _PREFIX.unpack(prefix)[1] > size
