"""The listening side of a bound socket: shut while this process is short of descriptors.

ZeroMQ lets everyone in, and each takes a descriptor. Once none is left it tries again and again, as fast as a core can,
and the process can neither open a file nor start a child. So whoever gets one of the last DESCRIPTORS_KEPT is hung up
on, and until there are more again the kernel drops what calls come (a filter on the listening socket, where it can be
had): TCP repeats a call that was dropped, so callers come in later by themselves. Who is in stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable

import zmq

from .errors import ConfigError

DESCRIPTORS_KEPT = 16  # for files and for children that are started again
CALLERS_KEPT = 16  # beside those, for who calls us: no link of ours takes them
REOPENED_WITH = 2 * DESCRIPTORS_KEPT  # so many must be left: else the next caller shuts it again
LOOK_S = 1.0  # between two looks whether some have been given back
EVENTS = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.ACCEPT_FAILED
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python does not name them
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: ret 0


def descriptors_left() -> int:
    """How many more this process may open."""
    limit = _limit()
    try:
        used = sum(int(number) < limit for number in os.listdir("/dev/fd"))
        return limit - used + 1  # the listing has one of its own
    except OSError:
        return 0


def check_descriptors(address: str, setting: str) -> None:
    """Raises ConfigError when too few are left for a link of ours to `address`."""
    kept = DESCRIPTORS_KEPT + CALLERS_KEPT
    if descriptors_left() < kept:
        problem = f"cannot connect to {address}: of {_limit()} descriptors fewer than {kept} are left"
        raise ConfigError(setting, f"{problem}: raise `ulimit -n`")


class Door:
    """Of one socket that is bound to a TCP address. `on_change` hears why it is shut, and '' once it is open again."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self.problem = ""
        self._on_change = on_change
        self._listener: socket.socket | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    def heard(self, event: int, value: int) -> None:
        """One of EVENTS, from the socket's monitor."""
        if self._closed:
            return
        if event == zmq.Event.LISTENING:
            self._listener = _listening(value)
        elif event == zmq.Event.ACCEPTED and value >= _limit() - DESCRIPTORS_KEPT:  # the lowest free number was given
            self._shut()
            self._hang_up(value)
        elif event == zmq.Event.ACCEPT_FAILED:
            self._shut()  # who waits comes in as others are hung up on, and is hung up on

    def close(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        if self._listener is not None:
            self._listener.close()

    def _shut(self) -> None:
        if self.problem or self._listener is None:
            return
        program = ctypes.create_string_buffer(DROP_ALL)
        filter_ = struct.pack("HL", 1, ctypes.addressof(program))  # struct sock_fprog
        with contextlib.suppress(OSError):
            self._listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)
        few = f"of {_limit()} descriptors fewer than {DESCRIPTORS_KEPT} are left"
        self.problem = f"{few}, so nobody else is let in: raise `ulimit -n`"
        self._look_later()
        self._on_change(self.problem)

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        if descriptors_left() < REOPENED_WITH:
            self._look_later()
            return
        assert self._listener is not None
        with contextlib.suppress(OSError):
            self._listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self.problem = ""
        self._on_change("")

    def _hang_up(self, descriptor: int) -> None:
        """On who has just come in, if the number is not another's by now. Takes no descriptor: there may be none."""
        with contextlib.suppress(OSError):
            caller = socket.socket(fileno=descriptor)
            try:
                if self._listener is not None and caller.getsockname()[1] == self._listener.getsockname()[1]:
                    caller.shutdown(socket.SHUT_RDWR)
            finally:
                caller.detach()  # ZeroMQ closes it


def _listening(descriptor: int) -> socket.socket | None:
    """One of our own for the same listening socket; None when the number is another's by now."""
    with contextlib.suppress(OSError):
        own = os.dup(descriptor)
        try:
            found = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            raise
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.close()
    return None


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
