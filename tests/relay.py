"""A relay of bytes that stands before the bus of a node: it can cut, swallow or hold back what goes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

READ_BYTES = 1 << 16


class Relay:
    """`silent`: takes everything and passes nothing on; what was swallowed is missing, so a cut must end it.
    `delay_s`: each piece waits so long, in order."""

    def __init__(self) -> None:
        self.silent = False
        self.delay_s = 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, target: str) -> None:
        """`target`: the address of the bus behind it; nobody needs to listen there yet."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = await asyncio.start_server(self._accept, sock=self._listening)

    def cut(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    def mend(self) -> None:
        """Goes on as at the start."""
        if self.silent:
            self.cut()
        self.silent, self.delay_s = False, 0.0

    def close(self) -> None:
        self._server.close()
        self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._open |= both
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        self._open -= both

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not self.silent:
                    writer.write(data)
