"""A fake vLLM server: its HTTP alone, over a real socket. What KV really does stands in tests/vllm."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], Response]


def whole(_: dict[str, Any]) -> Response:
    return JSONResponse({"choices": [{"text": "sea"}]})


def streamed(_: dict[str, Any]) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for text in ("the", "sea"):
            yield b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


def broken_off(_: dict[str, Any]) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"text": "the"}]}\n\n'
        await asyncio.sleep(0)
        raise ConnectionResetError

    return StreamingResponse(parts(), media_type="text/event-stream")


def failing(status: int) -> Answer:
    return lambda _: JSONResponse({"error": {"message": "no"}}, status)


class _Server(uvicorn.Server):
    """It leaves signals to the tests."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FakeVllm:
    """`asked`: the bodies it got, `headers` theirs. `answer` says what it answers; `hold` keeps answers back."""

    def __init__(self, answer: Answer = whole) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.came: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # the same bodies, to wait for
        self.left = asyncio.Event()  # somebody who asked went before the answer
        self.hold: asyncio.Event | None = None
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        routes = [
            Route("/v1/completions", self._generate, methods=["POST"]),
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "m"}]})),
            Route("/health", lambda _: Response()),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        self._server = _Server(config)

    async def __aenter__(self) -> FakeVllm:
        self._task = asyncio.ensure_future(self._server.serve([self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task
        self._socket.close()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.came.put_nowait(body)
        self.headers.append(dict(request.headers))
        if self.hold is not None:
            gone = asyncio.ensure_future(request.receive())
            held = asyncio.ensure_future(self.hold.wait())
            await asyncio.wait((gone, held), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.set()
            gone.cancel()
            held.cancel()
        return self.answer(body)
