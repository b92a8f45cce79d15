"""What one node or client heard and decided, appended to files as it happens.

Records are encoded as they come, which costs less than to keep them, and written by a thread every 200 ms: a crash
loses at most the last flush. A file that is full is closed and the next one begun; the oldest ones go when all of a
node's files together are too large. Nothing here knows what the records mean.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .recording_part import SUFFIX, VERSION, PartWriter, Record, RecordingHeader
from .wire import Declared, Raw, encode, replace

FLUSH_S = 0.2
PENDING_MAX = 200_000  # records; a disk that stalls must not eat the node's memory: what is more is counted, not kept
BATCH_RECORDS_MAX = 256  # more to a message make reading no faster
TOTAL_BYTES_MAX = 4 << 30
TOTAL_BYTES_LEAST = 1 << 20  # below it a file is not worth its header
PARTS_MIN = 8  # of the whole: what goes with the oldest file is no more than an eighth
PART_BYTES_MAX = 256 << 20

_log = logging.getLogger("pdbus.recorder")


class Recorder:
    """Appends records to new files in `directory`. Used by one thread. A failing disk ends the recording, with one
    line in the log, and never the node."""

    def __init__(
        self,
        directory: Path,
        node: str,
        incarnation: bytes,
        about: Declared | None = None,
        *,
        total_bytes_max: int = TOTAL_BYTES_MAX,
        setting: str = "--record",
    ) -> None:
        """`about` stands at the head of every file. `total_bytes_max`: of all files of `node` in the folder, earlier
        lives included. Raises ConfigError naming `setting` when the first file cannot be made."""
        self._directory, self._total_bytes_max = Path(directory), total_bytes_max
        self._header = RecordingHeader(
            version=VERSION, node=node, incarnation=incarnation, monotonic_ns=time.monotonic_ns(),
            wall_ns=time.time_ns(), boot=_boot(), about=Raw(encode(about) if about else b"\xc0"),
        )  # fmt: skip
        self._part = self._create(setting)
        self._pending: deque[bytes] = deque()
        self._sequence = self._lost = 0  # written by append alone
        self._lost_told = 0  # written by the writer alone
        self._some = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._writer.start()

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._part.path

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

    # ------------------------------------------------------------ the writer

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._some.wait()
                self._closing.wait(FLUSH_S)
                self._some.clear()
                self._flush()
            self._flush()
            self._part.close()
        except OSError as e:
            self._end(e)
            self._part.abandon()

    def _flush(self) -> None:
        while self._pending:
            count = min(len(self._pending), BATCH_RECORDS_MAX)
            lost = self._lost - self._lost_told
            self._part.write([self._pending.popleft() for _ in range(count)], lost)
            self._lost_told += lost
            if self._part.size_bytes > self._part_bytes_max:
                self._rotate()
        self._part.flush()

    @property
    def _part_bytes_max(self) -> int:
        return min(self._total_bytes_max // PARTS_MIN, PART_BYTES_MAX)

    def _rotate(self) -> None:
        self._part.close()
        self._make_room()
        self._header = replace(self._header, part=self._header.part + 1)
        self._part = PartWriter(self._directory, self._header)

    def _make_room(self) -> None:
        """Removes the oldest files of this node, so that one more fits."""
        files = sorted(self._files())
        left = sum(size for *_, size in files)
        while files and left + self._part_bytes_max > self._total_bytes_max:
            _, path, size = files.pop(0)
            path.unlink(missing_ok=True)
            left -= size

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """This node's files of all its lives: when written, path, bytes."""
        own = re.compile(rf"{re.escape(self._header.node)}-[0-9a-f]{{12}}-\d{{4,}}{re.escape(SUFFIX)}")
        for path in self._directory.iterdir():
            if own.fullmatch(path.name):
                with suppress(FileNotFoundError):  # somebody tidies up
                    stat = path.stat()
                    yield stat.st_mtime_ns, path, stat.st_size

    def _create(self, setting: str) -> PartWriter:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room()
            return PartWriter(self._directory, self._header)
        except OSError as e:
            raise ConfigError(setting, f"cannot write to {self._directory}: {e.strerror}") from None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
