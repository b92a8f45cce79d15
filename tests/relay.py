"""A relay of bytes that stands before the bus of a node: it can cut, swallow or hold back what goes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection
from dataclasses import dataclass

READ_BYTES = 1 << 16
HELLO_BYTES_MAX = 1 << 13  # where a caller has named itself
WAYS = ("in", "out")  # to the bus behind the relay, and from it


@dataclass(slots=True, eq=False)
class _Call:
    """One connection through the relay. A node names itself in its first message, which is its hello."""

    near: asyncio.StreamWriter  # to who called
    far: asyncio.StreamWriter
    heard: bytes = b""  # all that has come from the caller, as long as it may hold the name
    lost: bool = False  # something of it has been swallowed


class Relay:
    """What has been swallowed on a connection is missing there, so a cut must end it: `mend` does.
    `delay_s`: each piece waits so long, in order."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._swallowed: Collection[str] = ()
        self._caller = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: set[_Call] = set()

    async def start(self, target: str) -> None:
        """`target`: the address of the bus behind it; nobody needs to listen there yet."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = await asyncio.start_server(self._accept, sock=self._listening)

    def swallow(self, ways: Collection[str] = WAYS, caller: str = "") -> None:
        """From now on takes everything that goes these ways, and passes nothing on; of one caller alone, if named,
        once it has said who it is."""
        self._swallowed, self._caller = ways, caller.encode()

    def cut(self) -> None:
        for call in tuple(self._open):
            call.near.transport.abort()
            call.far.transport.abort()

    def mend(self) -> None:
        """Goes on as at the start."""
        self._swallowed, self.delay_s = (), 0.0
        for call in tuple(self._open):
            if call.lost:
                call.near.transport.abort()
                call.far.transport.abort()

    def close(self) -> None:
        self._server.close()
        self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        call = _Call(writer, far_writer)
        self._open.add(call)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, call, "in"), self._pass_on(far_reader, call, "out"))
        self._open.discard(call)

    async def _pass_on(self, reader: asyncio.StreamReader, call: _Call, way: str) -> None:
        writer = call.far if way == "in" else call.near
        with contextlib.closing(writer):
            while data := await reader.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if way == "in" and len(call.heard) < HELLO_BYTES_MAX:
                    call.heard += data
                if way in self._swallowed and self._caller in call.heard:
                    call.lost = True
                else:
                    writer.write(data)
