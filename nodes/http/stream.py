"""One request at what answers (a node, a cluster), its answer streamed as server-sent events or sent whole. Several
choices (`n`, several prompts) are several requests there, side by side; the first that fails ends all of them.

A refusal comes before the first token, so the status line waits for that token; what goes wrong later is an error
event, and only a good end is followed by [DONE]. A client that leaves cancels its request at the node. A client that
reads slowly is not buffered here: writing to it waits, its credit at the node runs out, and the node decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdbus.bus import wire
from pdbus.bus.errors import Closed, PdError, RequestError
from pdbus.bus.messages import Finished, Sampling, Token
from pdbus.bus.wire import replace
from pdbus.nodes.limits import SEED_MAX
from pdbus.nodes.tracing import Tracer

from .answer import Answer, usage
from .errors import JSON, error_object, good_end, renamed
from .metrics import HttpMetrics
from .schema import Asked
from .trace import Trace
from .upstream import Answering, Upstream

BODY_BYTES_MAX = 8 << 20  # half of what fits a control message, since JSON may hide longer text behind shorter escapes
DISCARD_BYTES_MAX = 64 << 20  # read and thrown away, since a client that still sends does not see our answer
COPIES_BYTES_MAX = 8 * BODY_BYTES_MAX  # each of `n` answers has its prompt sent along: all at once
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

T = TypeVar("T")
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
        deadline_ms: int,
        tracer: Tracer | None = None,
    ) -> None:
        self._upstream = upstream
        self._check_model = check_model
        self._metrics = metrics
        self._parse = parse
        self._answer = answer
        self._deadline_ms = deadline_ms
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.monotonic_ns()
        request = Request(scope, receive)
        body = await read_body(request)
        asked = self._parse(body)
        if asked.n * len(body) > COPIES_BYTES_MAX:
            problem = f"n: {asked.n} times {len(body)} bytes are more than {COPIES_BYTES_MAX}: ask for fewer at once"
            raise RequestError(problem, param="n", code="too_large", status=413)
        model = await self._check_model(asked.model)
        created_s = int(time.time())
        answers = [self._answer(asked, model, created_s, i) for i in range(len(asked.prompts) * asked.n)]
        trace = Trace(self._tracer, request.headers.get("traceparent", ""), self._answer.OPERATION, model, started_ns)
        choices: list[Choice] = []
        with trace.of(asked, choices):
            work = self._respond(asked, answers, choices, trace, scope, receive, send)
            try:
                await while_connected(receive, work)
            except RequestError as e:
                raise renamed(e, asked.named) from None

    async def _respond(
        self,
        asked: Asked,
        answers: Sequence[Answer],
        choices: list[Choice],
        trace: Trace,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        async with AsyncExitStack() as stack:
            for answer, (prompt, sampling) in zip(answers, each_choice(asked), strict=True):
                generation = await stack.enter_async_context(
                    self._upstream.generate(
                        prompt,
                        model=asked.model,
                        sampling=sampling,
                        deadline_ms=self._deadline_ms if asked.deadline_ms is None else asked.deadline_ms,
                        stream=asked.stream,
                        traceparent=trace.traceparent,
                    )
                )
                choices.append(Choice(answer, generation, self._timed(aiter(generation), trace)))
            if asked.stream:
                await _send_stream(choices, asked, send)
                return
            said = await together([choice.whole() for choice in choices])
            ends = ends_of(choices, asked)
            await JSON(answers[0].whole(said, ends, asked.n))(scope, receive, send)

    async def _timed(self, tokens: AsyncIterator[Token], trace: Trace) -> AsyncIterator[Token]:
        first = True
        try:
            async for token in tokens:
                if first:
                    self._metrics.first_token(trace.first_token())
                    first = False
                yield token
        except asyncio.CancelledError:
            raise Closed("the HTTP server was told to stop") from None  # if the client left, it will not see this


def each_choice(asked: Asked) -> list[tuple[Any, Sampling]]:
    """Prompt and sampling of every choice, `n` to a prompt. With a seed each of these has one of its own, the first the
    one that was given; without the node draws them."""
    seed = asked.sampling.seed
    return [
        (prompt, replace(asked.sampling, seed=(seed + i) % SEED_MAX or SEED_MAX) if seed and i else asked.sampling)
        for prompt in asked.prompts
        for i in range(asked.n)
    ]


class Choice(NamedTuple):
    """One answer on its way."""

    answer: Answer
    generation: Answering
    tokens: AsyncIterator[Token]

    async def whole(self) -> dict[str, Any]:
        """All of it; it may begin again elsewhere, since nothing of it has gone out."""
        said: list[Token] = []
        async for token in self.tokens:
            if token.index == 0:
                said.clear()
            said.append(token)
        return self.answer.choice(said, good_end(self.generation.finished))


def ends_of(choices: Sequence[Choice], asked: Asked) -> list[Finished]:
    """How they ended, for usage: an answer that nobody wanted has no token."""
    ends = [good_end(choice.generation.finished) for choice in choices]
    return ends if asked.answers else [replace(end, completion_tokens=0) for end in ends]


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives. The first that fails ends all, and is what is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except* PdError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Events:
    """The event stream of one response, begun with its first event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._one_at_a_time = asyncio.Lock()
        self.begun = False
        self.request = b""  # whose first token came first: all chunks bear its id

    async def say(self, *events: dict[str, Any], end: bytes = b"") -> None:
        body = b"".join(b"data: " + wire.to_json(event) + b"\n\n" for event in events)
        async with self._one_at_a_time:
            await self._send({"type": "http.response.body", "body": body + end, "more_body": True})

    async def begin(self, request: bytes) -> None:
        async with self._one_at_a_time:
            if not self.begun:
                self.begun, self.request = True, request
                await self._send(SSE_START)

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_stream(choices: Sequence[Choice], asked: Asked, send: Send) -> None:
    events = Events(send)
    try:
        await together([_send_choice(choice, events) for choice in choices])
        ends = ends_of(choices, asked)
        used = [choices[0].answer.counted(events.request, usage(ends, asked.n))] if asked.include_usage else []
        await events.say(*used, end=DONE)
    except PdError as e:
        if not events.begun:
            raise
        await events.say(error_object(e)[1])
    await events.finish()


async def _send_choice(choice: Choice, events: Events) -> None:
    answer, generation, tokens = choice
    first = await anext(tokens, None)
    if first is None:
        await events.begin(good_end(generation.finished).request)
    else:
        await events.begin(first.request)
        await events.say(*answer.opening(events.request), answer.chunk(events.request, first))
    async for token in tokens:
        await events.say(answer.chunk(events.request, token))
    await events.say(answer.closing(events.request, good_end(generation.finished)))


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
