"""One request at what answers (a node, a cluster), its answer streamed as server-sent events or sent whole.

A refusal comes before the first token, so the status line waits for that token; what goes wrong later is an error
event, and only a good end is followed by [DONE]. A client that leaves cancels its request at the node. A client that
reads slowly is not buffered here: writing to it waits, its credit at the node runs out, and the node decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdbus.bus import wire
from pdbus.bus.errors import Closed, PdError, RequestError
from pdbus.bus.messages import Token

from .answer import Answer
from .errors import JSON, error_object, good_end
from .metrics import HttpMetrics
from .schema import Asked
from .upstream import Answering, Upstream

BODY_BYTES_MAX = 8 << 20  # half of what fits a control message, since JSON may hide longer text behind shorter escapes
DISCARD_BYTES_MAX = 64 << 20  # read and thrown away, since a client that still sends does not see our answer
BODY_S = 60.0  # for a body to arrive
DISCARD_S = 10.0  # for one that is too large anyway

SSE_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy that buffers would undo the streaming
    ],
}
DONE = b"data: [DONE]\n\n"

CheckModel = Callable[[str], Awaitable[str]]


class Generate:
    """The ASGI endpoint of one of the two APIs."""

    def __init__(
        self,
        upstream: Upstream,
        check_model: CheckModel,
        metrics: HttpMetrics,
        parse: Callable[[bytes], Asked],
        answer: type[Answer],
    ) -> None:
        self._upstream = upstream
        self._check_model = check_model
        self._metrics = metrics
        self._parse = parse
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        asked = self._parse(await read_body(Request(scope, receive)))
        model = await self._check_model(asked.model)
        answer = self._answer(asked, model, int(time.time()))
        await while_connected(receive, self._respond(asked, answer, started_s, scope, receive, send))

    async def _respond(
        self, asked: Asked, answer: Answer, started_s: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with self._upstream.generate(
            asked.prompt,
            model=asked.model,
            sampling=asked.sampling,
            deadline_ms=asked.deadline_ms,
            stream=asked.stream,
        ) as generation:
            tokens = self._timed(aiter(generation), started_s)
            if asked.stream:
                await _send_stream(answer, generation, tokens, send)
            else:
                said = await _whole(tokens)
                await JSON(answer.whole(said, good_end(generation.finished)))(scope, receive, send)

    async def _timed(self, tokens: AsyncIterator[Token], started_s: float) -> AsyncIterator[Token]:
        first = True
        try:
            async for token in tokens:
                if first:
                    self._metrics.first_token(time.monotonic() - started_s)
                    first = False
                yield token
        except asyncio.CancelledError:
            raise Closed("the HTTP server was told to stop") from None  # if the client left, it will not see this


async def _whole(tokens: AsyncIterator[Token]) -> list[Token]:
    """All of an answer, which may begin again elsewhere, since nothing of it has gone out."""
    said: list[Token] = []
    async for token in tokens:
        if token.index == 0:
            said.clear()
        said.append(token)
    return said


async def _send_stream(answer: Answer, generation: Answering, tokens: AsyncIterator[Token], send: Send) -> None:
    first = await anext(tokens, None)
    if first is None:
        good_end(generation.finished)
    await send(SSE_START)
    try:
        if first is not None:
            await _send_events(send, *answer.opening(first.request), answer.chunk(first))
        async for token in tokens:
            await _send_events(send, answer.chunk(token))
        await _send_events(send, *answer.closing(good_end(generation.finished)), end=DONE)
    except PdError as e:
        await _send_events(send, error_object(e)[1])
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(send: Send, *events: dict[str, Any], end: bytes = b"") -> None:
    body = b"".join(b"data: " + wire.to_json(event) + b"\n\n" for event in events)
    await send({"type": "http.response.body", "body": body + end, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; cancel it when the client has gone, or when uvicorn cancels us because the server ends.
    Call once the body has been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    with suppress(asyncio.CancelledError):
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    gone = leaving.done()
    leaving.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
        if gone and (working.cancelled() or isinstance(working.exception(), PdError)):
            return  # nobody reads what became of it
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError when it is too large or too slow."""
    body, size, declared = bytearray(), 0, _declared(request)
    if declared > DISCARD_BYTES_MAX or (declared > BODY_BYTES_MAX and "expect" in request.headers):
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_S if declared <= BODY_BYTES_MAX else DISCARD_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= BODY_BYTES_MAX:
                    body += chunk
                elif size > DISCARD_BYTES_MAX:
                    break
    except TimeoutError:
        if max(size, declared) > BODY_BYTES_MAX:
            raise _too_large() from None
        raise RequestError(f"the body did not arrive within {BODY_S:.0f} s", code="timeout", status=408) from None
    if size > BODY_BYTES_MAX:
        raise _too_large()
    return bytes(body)


def _declared(request: Request) -> int:
    """Bytes of body that the client has announced; 0 when it did not say."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _too_large() -> RequestError:
    problem = f"the body is larger than {BODY_BYTES_MAX} bytes ({BODY_BYTES_MAX >> 20} MiB)"
    return RequestError(problem, code="body_too_large", status=413)
