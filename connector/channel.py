"""The line between control and one of its children: a unix socket in a directory that only its owner can enter.

Control listens and reads in its event loop; the child connects and owns its end in one thread. Messages are the
tagged unions of connector/ipc.py, each behind its length (little-endian u32), in order. Neither end authenticates:
the directory's mode does.

A bare socket, where the bus is ZeroMQ: both ends are on one machine and start together, and a message that passes
through two I/O threads wakes three threads where this wakes one. It took 108 us there and back, and takes 18.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pdbus.bus import wire
from pdbus.bus.errors import Broken, Closed, ConfigError, RemoteProtocolError
from pdbus.bus.wire import Declared

QUEUE_BYTES_MAX = 256 << 20  # to a child; one that is this far behind is stuck
SEND_WAIT_S = 10.0  # a child waits so long for a control that does not read: it is stuck, or stopped by hand
MESSAGE_BYTES_MAX = 64 << 20  # a longer one is damage: the longest prompt has a few MiB
READ_BYTES = 1 << 18
PATH_BYTES_MAX = 107  # sun_path

PR_SET_PDEATHSIG = 1

_LENGTH = struct.Struct("<I")

Received = TypeVar("Received", bound=Declared)


def endpoint_in(directory: Path, name: str) -> str:
    """The path of that channel. Raises ConfigError when it is too long for a unix socket."""
    path = directory / name
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError("TMPDIR", f"{path} is longer than {PATH_BYTES_MAX} bytes, the most a unix socket may have")
    return str(path)


def _framed(message: Declared) -> bytes:
    body = wire.encode(message)
    return _LENGTH.pack(len(body)) + body


class _Unframed(Generic[Received]):
    """Bytes in, messages out."""

    def __init__(self, receives: type[Received]) -> None:
        self._receives = receives
        self._held = bytearray()

    def messages(self, data: bytes) -> Iterator[Received]:
        """Raises RemoteProtocolError for what is none."""
        held = self._held
        held += data
        at = 0
        try:
            while len(held) >= at + _LENGTH.size:
                (length,) = _LENGTH.unpack_from(held, at)
                if length > MESSAGE_BYTES_MAX:
                    raise RemoteProtocolError(f"a message of {length} bytes on a channel", field="length")
                end = at + _LENGTH.size + length
                if len(held) < end:
                    return
                body, at = bytes(held[at + _LENGTH.size : end]), end
                yield wire.decode_union(body, self._receives)
        finally:
            del held[:at]


class ChildChannel(Generic[Received]):
    """A child's end: blocking. The thread that made it polls, any may send. Raises Closed when control is gone."""

    def __init__(self, endpoint: str, receives: type[Received]) -> None:
        self._unframed = _Unframed(receives)
        end_with_parent()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(endpoint)
        except OSError as e:
            raise Closed(f"control has ended: {e.strerror}") from None
        self._socket.settimeout(SEND_WAIT_S)
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: Declared) -> None:
        """Say one thing. Raises Closed when control has gone, or has stopped reading."""
        try:
            with self._sending:
                self._socket.sendall(_framed(message))
        except TimeoutError:
            raise Closed("control does not read its channel") from None
        except OSError:
            raise Closed("control has ended") from None

    def poll(self, timeout_ms: int | None = 0) -> list[Received]:
        """Everything that has arrived; waits up to `timeout_ms` for the first (None: until control speaks or dies)."""
        received: list[Received] = []
        while self._poll.poll(0 if received else timeout_ms):
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data and not received:
                raise Closed("control has ended")
            received += self._unframed.messages(data)
            if len(data) < READ_BYTES:
                break
        return received

    def close(self) -> None:
        self._socket.close()


def end_with_parent(parent: int = 0) -> None:
    """Ask the kernel for SIGTERM when the parent's spawning thread ends. `parent`: its pid, for who has no other way to
    notice that it died before this; raises SystemExit then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:
        sys.exit(f"its parent, process {parent}, has ended")


class ControlChannel(Generic[Received]):
    """Control's end, for one child: bound before the child is spawned; `on_message` is called in the event loop.

    An exception from `on_message` ends `run`, and with it whatever owns that task.
    """

    def __init__(self, endpoint: str, receives: type[Received], on_message: Callable[[Received], None]) -> None:
        self.endpoint = endpoint
        self._unframed = _Unframed(receives)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._unsent = bytearray()
        self._child: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(endpoint)
        self._listener.listen(1)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        """The one child; nobody else can enter the directory."""
        with suppress(BlockingIOError):
            self._child, _ = self._listener.accept()
            self._child.setblocking(False)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.add_reader(self._child.fileno(), self._read)

    def send(self, message: Declared) -> None:
        """Queue one message for the child. Raises Broken when it has not connected yet, or reads no more."""
        if self._failed.done():
            raise Closed("the child's channel is closed")
        if self._child is None or len(self._unsent) > QUEUE_BYTES_MAX:
            raise Broken(f"{self.endpoint}: the child does not read its channel")
        waiting = bool(self._unsent)
        self._unsent += _framed(message)
        if not waiting and not self._write(self._child):
            self._loop.add_writer(self._child.fileno(), self._write_more, self._child)

    def _write(self, child: socket.socket) -> bool:
        """Whether all is written."""
        try:
            del self._unsent[: child.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # it has ended, and will be reaped
        return not self._unsent

    def _write_more(self, child: socket.socket) -> None:
        if self._write(child):
            self._loop.remove_writer(child.fileno())

    def _read(self) -> None:
        child = self._child
        while child is not None and child.fileno() >= 0:
            try:
                data = child.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(child.fileno())
                return
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        try:
            for message in self._unframed.messages(data):
                self._on_message(message)
                if self._failed.done():
                    return  # closed by what it has just heard
        except Exception as e:
            self._fail(e)

    def _fail(self, problem: Exception) -> None:
        if self._child is not None:
            self._loop.remove_reader(self._child.fileno())
        if not self._failed.done():
            self._failed.set_exception(problem)

    async def run(self) -> None:
        """Ends when closed; raises what `on_message` raised, or RemoteProtocolError for what the child mangled."""
        await self._failed

    def close(self) -> None:
        """Hear what the child has said, then stop; what was queued for it is dropped."""
        if self._listener.fileno() < 0:
            return
        if not self._failed.done():
            self._read()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._child is not None:
            self._loop.remove_reader(self._child.fileno())
            self._loop.remove_writer(self._child.fileno())
            self._child.close()
        Path(self.endpoint).unlink(missing_ok=True)
        if not self._failed.done():
            self._failed.set_result(None)
