"""What the relay of the fault harness swallows, and of whom: a partition that cuts off nobody would prove nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.loop import on_loop
from tests.relay import Relay


class Echo:
    """Stands behind a relay, and hears all that arrives."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while line := await reader.readline():
                self.heard.put_nowait(line)
                writer.write(line)


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def say(self, line: bytes) -> None:
        self._writer.write(line)

    async def is_answered(self, line: bytes) -> bool:
        """False when the connection has ended instead."""
        self.say(line)
        with contextlib.suppress(OSError):
            return await self.reader.readline() == line
        return False


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Relay, Echo, Caller, Caller]]:
    relay, echo = Relay(), Echo()
    server = await asyncio.start_server(echo.answer, "127.0.0.1", 0)
    await relay.start(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    port = int(relay.address.rpartition(":")[2])
    callers = [Caller(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)]
    for caller, hello in zip(callers, (b"I am one\n", b"I am two\n"), strict=True):
        assert await caller.is_answered(hello)
        await echo.heard.get()
    try:
        yield relay, echo, callers[0], callers[1]
    finally:
        relay.close()
        server.close()


@on_loop
async def test_one_caller_alone_is_cut_off() -> None:
    async with relayed() as (relay, echo, one, two):
        relay.swallow(caller="one")
        one.say(b"lost\n")
        assert await two.is_answered(b"heard\n")
        assert await echo.heard.get() == b"heard\n"
        relay.mend()
        assert await one.reader.read() == b"", "what was swallowed is missing: the connection must end"
        assert await two.is_answered(b"still\n")
        assert await echo.heard.get() == b"still\n"


@on_loop
async def test_one_direction_alone_is_lost() -> None:
    async with relayed() as (relay, echo, one, two):
        relay.swallow(["out"], caller="one")
        one.say(b"heard and not answered\n")
        assert await echo.heard.get() == b"heard and not answered\n"
        for line in (b"by now\n", b"the answer\n", b"is lost\n"):
            assert await two.is_answered(line)
        relay.mend()
        assert await one.reader.read() == b""
