"""One `pd-node` as a child process: started, listened to, ended. Knows neither its settings' meaning nor its health."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pdbus.bus.errors import Broken

LINE_BYTES_MAX = 1 << 20  # a longer line is dropped, not split: logs are for people
TAIL_LINES = 50
LAST_WORDS_S = 1.0  # for the last lines to come through after the end; a stray grandchild may hold the pipe open

OnLine = Callable[["NodeProcess", str], None]


class NodeProcess:
    """A node on this machine. `address` and `http` ('' for none) are where it listens once it is ready. Its pid is
    control's; that one's own children end with it."""

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        *,
        address: str,
        http: str = "",
        joined: Sequence[str] = (),
        keys: str = "",
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        self.http = http
        self.keys = keys  # the folder of its clients' keys; '' for none
        self.joined = tuple(joined)  # names of those it was told to join
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.command = tuple(command)
        self._environment = dict(environment or {})
        self._on_line = on_line
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0 before the first start; the last one's after its end."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Spawns it, in a session of its own so that a terminal's Ctrl-C reaches the parent alone. Raises Broken."""
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=write_end, stderr=write_end,
                env={**os.environ, **self._environment}, start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            os.close(read_end)
            raise Broken(f"cannot start {self.command[0]}: {e.strerror}") from None
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read(os.fdopen(read_end, "rb", 0)))

    async def wait(self) -> int:
        """Waits for its end and its last words. Returns the exit status, negative for a signal."""
        if self._process is None:
            return 0
        status = await self._process.wait()
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reader), LAST_WORDS_S)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to control, if it still runs."""
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill_all(self) -> None:
        """Kills control and every process below it."""
        if self.running:
            for pid in (*descendants(self.pid), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stops listening to it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, pipe: BinaryIO) -> None:
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with contextlib.closing(transport), self._log.open("ab") if self._log else contextlib.nullcontext() as log:
            while line := await _line(reader):
                if log is not None:
                    log.write(line)
                    log.flush()
                self._heard(line.decode(errors="replace").rstrip())

    def _heard(self, text: str) -> None:
        self.tail.append(text)
        if self._on_line is not None:
            self._on_line(self, text)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        return b"(a line of more than 1 MiB)\n"


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid` now, the deepest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found[::-1]
