"""A request whose body turns out to be damaged while the app answers it: one answer, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pdbus.nodes.http.server import Server, serve_app

DAMAGED = b"\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"


async def _ready(request: Request) -> Response:
    return PlainTextResponse("ready")


async def _streamed(request: Request) -> Response:
    async def words() -> object:
        for _ in range(50):
            yield "word "
            await asyncio.sleep(0.01)

    return StreamingResponse(words())  # type: ignore[arg-type]


APP = Starlette(routes=[Route("/ready", _ready, methods=["POST"]), Route("/stream", _streamed, methods=["POST"])])


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("asked", ["POST /ready", "POST /nowhere", "POST /stream", "HEAD /ready"])
def test_one_answer_and_no_traceback(
    asked: str, pieces: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece the damage is known before the app runs; in two the app may have begun to answer. What is said to a
    HEAD has no body, not even 400."""
    caplog.set_level(logging.WARNING)
    served: list[Server] = []

    class Known(Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            served.append(self)

    monkeypatch.setattr("pdbus.nodes.http.server.Server", Known)

    async def ask() -> bytes:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        serving = asyncio.create_task(serve_app(APP, listening, grace_s=1, signals=(signal.SIGUSR2,)))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = asked.encode() + b" HTTP/1.1" + DAMAGED
        head = whole.index(b"no length")
        writer.write(whole if pieces == 1 else whole[:head])
        begun = b""
        if pieces == 2:
            if asked == "POST /stream":
                begun = await reader.readuntil(b"word ")
            writer.write(whole[head:])
        answer = begun + await reader.read()
        writer.close()
        served[0].should_exit = True
        await serving
        return answer

    answer = asyncio.run(ask())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []
