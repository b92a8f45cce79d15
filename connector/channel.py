"""The line between control and one of its children: a ZMQ PAIR over ipc:// in a directory only its owner can enter.

Control binds and reads in its event loop; the child connects and owns its end in one thread. Messages are the
tagged unions of connector/ipc.py, one frame each, in order. Neither end authenticates: the directory's mode does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from pdbus.bus import wire
from pdbus.bus.errors import Broken, Closed, ConfigError
from pdbus.bus.wire import Declared

QUEUE_MESSAGES_MAX = 65_536  # per direction; a child that is this far behind is stuck
LINGER_MS = 500  # a child's last words (failed, step done) get this long to leave
IPC_PATH_BYTES_MAX = 107  # sun_path

PR_SET_PDEATHSIG = 1

Received = TypeVar("Received", bound=Declared)


def endpoint_in(directory: Path, name: str) -> str:
    """The ipc:// endpoint of that name. Raises ConfigError when the path is too long for a unix socket."""
    path = directory / name
    if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
        raise ConfigError(
            "TMPDIR", f"{path} is longer than {IPC_PATH_BYTES_MAX} bytes, the most a unix socket may have"
        )
    return f"ipc://{path}"


def _pair(context: zmq.Context[Any], linger_ms: int) -> zmq.Socket[bytes]:
    """A blocking socket, of whatever flavour the context is."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    return socket


class ChildChannel(Generic[Received]):
    """A child's end: blocking, for the one thread that made it. Raises Closed from poll when control is gone."""

    def __init__(self, endpoint: str, receives: type[Received]) -> None:
        self._receives = receives
        self._parent = os.getppid()
        end_with_parent()
        self._context = zmq.Context(io_threads=1)
        self._socket = _pair(self._context, LINGER_MS)
        self._socket.connect(endpoint)

    def send(self, message: Declared) -> None:
        """Queue one message for control. Raises Closed when control has stopped reading."""
        try:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise Closed("control does not read its channel") from None

    def poll(self, timeout_ms: int | None = 0) -> list[Received]:
        """Everything that has arrived; waits up to `timeout_ms` for the first (None: until control speaks or dies)."""
        if not self._socket.poll(timeout_ms):
            self._check_parent()
            return []
        received = []
        while True:
            try:
                received.append(wire.decode_union(self._socket.recv(zmq.DONTWAIT), self._receives))
            except zmq.Again:
                return received

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:
            raise Closed("control has ended")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent's spawning thread ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ControlChannel(Generic[Received]):
    """Control's end, for one child: bound before the child is spawned; `on_message` is called in the event loop.

    An exception from `on_message` ends `run`, and with it whatever owns that task.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        receives: type[Received],
        on_message: Callable[[Received], None],
    ) -> None:
        self.endpoint = endpoint
        self._receives = receives
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._socket = _pair(context, 0)
        self._socket.bind(endpoint)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._drain)

    def send(self, message: Declared) -> None:
        """Queue one message for the child. Raises Broken when it has not connected yet, or reads no more."""
        if self._socket.closed:
            raise Closed("the child's channel is closed")
        try:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise Broken(f"{self.endpoint}: the child does not read its channel") from None
        self._loop.call_soon(self._drain)  # sending may swallow the edge that tells of something to read

    def _drain(self) -> None:
        try:
            while not self._socket.closed:
                self._on_message(wire.decode_union(self._socket.recv(zmq.DONTWAIT), self._receives))
        except zmq.Again:
            pass
        except Exception as e:
            self._loop.remove_reader(self._fd)
            if not self._failed.done():
                self._failed.set_exception(e)

    async def run(self) -> None:
        """Ends when closed; raises what `on_message` raised, or RemoteProtocolError for what the child mangled."""
        await self._failed

    def close(self) -> None:
        """Stop reading; what was queued for the child is dropped."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close()
        Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        if not self._failed.done():
            self._failed.set_result(None)
