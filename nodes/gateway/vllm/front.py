"""The gateway in front of vLLM servers: each request goes to a prefill and to a decode server at once.

Until the first byte of an answer has been sent, another server is tried: another prefill server, then none (the decode
server computes the prompt itself), and another decode server. After it a broken answer ends with an error, and never
as if it were whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pdbus.bus import wire
from pdbus.bus.errors import Broken
from pdbus.nodes.http.bearer import Bearer
from pdbus.nodes.http.body import check_keys
from pdbus.nodes.http.errors import HANDLERS, JSON, error_object
from pdbus.nodes.http.keys import HttpKeys
from pdbus.nodes.http.stream import read_body

from .legs import alone, legs, new_pair
from .servers import Server, Turns

CONNECT_S = 5.0
PASSED_ON = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate")  # of a request's headers
GIVEN_BACK = ("content-type", "retry-after", "x-request-id")  # of an answer's

Headers = Mapping[bytes, bytes]

log = logging.getLogger("pdbus.gateway")


class PrefillFailed(Exception):
    """The prefill server could not be reached, or could not do it. `str()` says how."""


class Begun(NamedTuple):
    """An answer whose first bytes are there."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]


class Front:
    """What answers for the servers."""

    def __init__(self, http: httpx.AsyncClient, prefillers: Turns, decoders: Turns, *, keyed: bool = False) -> None:
        """`keyed`: who may ask is the gateway's affair, so that keys of clients go no further."""
        self._http = http
        self._prefillers = prefillers
        self._decoders = decoders
        self._passed_on = tuple(name for name in PASSED_ON if not keyed or name != "authorization")

    async def generate(self, request: Request) -> Response:
        """A completion or a chat completion, from both."""
        body = _parsed(await read_body(request))
        headers = self._headers(request)
        answering = asyncio.ensure_future(self._begin(request.scope["path"], body, headers))
        left = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((answering, left), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ClientDisconnect
            begun = answering.result()
        finally:
            answering.cancel()
            left.cancel()
        return StreamingResponse(_bytes(begun), begun.response.status_code, _given_back(begun.response))

    async def pass_on(self, request: Request) -> Response:
        """Whatever needs no prefill: to a decode server, as it is."""
        content = await read_body(request)
        tried: set[Server] = set()
        while (decoder := self._decoders.next(time.monotonic_ns(), tried)) is not None:
            tried.add(decoder)
            url = httpx.URL(decoder.url + request.scope["path"], query=request.scope["query_string"])
            try:
                answer = await self._http.request(request.method, url, content=content, headers=self._headers(request))
            except httpx.HTTPError as e:
                self._unreachable(self._decoders, decoder, e)
                continue
            return Response(answer.content, answer.status_code, _given_back(answer))
        raise Broken("no decode server can be reached")

    async def ready(self, _: Request) -> Response:
        """Whether a request would be served: one decode server is enough."""
        reasons = []
        for decoder in self._decoders.servers:
            try:
                if (await self._http.get(f"{decoder.url}/health")).status_code == 200:
                    return JSON({"status": "ready"})
                reasons.append(f"{decoder.url} is not well")
            except httpx.HTTPError as e:
                reasons.append(f"{decoder.url}: {_said(e)}")
        return JSON({"status": "not ready", "reasons": reasons}, 503)

    async def live(self, _: Request) -> Response:
        return JSON({"status": "alive"})

    # ------------------------------------------------------------ both legs

    async def _begin(self, path: str, body: Mapping[str, Any], headers: Headers) -> Begun:
        """The beginning of an answer, from whom it can be had. Raises Broken when nobody answers."""
        tried_prefill: set[Server] = set()
        tried_decode: set[Server] = set()
        decoder: Server | None = None
        while True:
            decoder = decoder or self._decoders.next(time.monotonic_ns(), tried_decode)
            if decoder is None:
                raise Broken("no decode server can be reached")
            prefiller = self._prefillers.next(time.monotonic_ns(), tried_prefill)
            try:
                return await self._ask(path, body, headers, prefiller, decoder)
            except PrefillFailed as e:
                assert prefiller is not None
                tried_prefill.add(prefiller)
                self._prefillers.down(prefiller, time.monotonic_ns())
                log.info("prefill server %s: %s", prefiller.url, e)
            except httpx.HTTPError as e:
                tried_decode.add(decoder)
                self._unreachable(self._decoders, decoder, e)
                decoder = None

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Headers,
        prefiller: Server | None,
        decoder: Server,
    ) -> Begun:
        """Raises PrefillFailed before the answer has begun, and what httpx does of the decode server."""
        if prefiller is None:
            return await self._decode(decoder.url + path, alone(body), headers)
        both = legs(body, new_pair(prefiller.name))
        prefill = asyncio.ensure_future(self._prefill(prefiller.url + path, both.prefill, headers))
        decode = asyncio.ensure_future(self._decode(decoder.url + path, both.decode, headers))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()  # raises PrefillFailed: the decode server would wait in vain
            return await decode
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _prefill(self, url: str, body: Mapping[str, Any], headers: Headers) -> None:
        """What is wrong with the request itself the decode server says as well."""
        try:
            answer = await self._http.post(url, json=body, headers=headers)
        except httpx.HTTPError as e:
            raise PrefillFailed(_said(e)) from None
        if answer.status_code == 429 or answer.status_code >= 500:
            raise PrefillFailed(f"answers {answer.status_code}")

    async def _decode(self, url: str, body: Mapping[str, Any], headers: Headers) -> Begun:
        """A stream with its first bytes, anything else as a whole."""
        response = await self._http.send(self._http.build_request("POST", url, json=body, headers=headers), stream=True)
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                return Begun(response, await response.aread(), _nothing())
            rest = response.aiter_bytes()
            return Begun(response, await anext(rest, b""), rest)
        except BaseException:
            await response.aclose()
            raise

    # ------------------------------------------------------------ one request

    def _headers(self, request: Request) -> Headers:
        """As bytes: they may be in any encoding."""
        return {name: value for name, value in request.headers.raw if name.decode("latin-1") in self._passed_on}

    def _unreachable(self, turns: Turns, server: Server, error: httpx.HTTPError) -> None:
        turns.down(server, time.monotonic_ns())
        log.info("decode server %s: %s", server.url, _said(error))


def app_of(front: Front, keys: HttpKeys | None = None) -> Starlette:
    app = Starlette(
        routes=[
            Route("/v1/completions", front.generate, methods=["POST"]),
            Route("/v1/chat/completions", front.generate, methods=["POST"]),
            Route("/v1/models", front.pass_on),
            Route("/tokenize", front.pass_on, methods=["POST"]),
            Route("/detokenize", front.pass_on, methods=["POST"]),
            Route("/version", front.pass_on),
            Route("/health/live", front.live),
            Route("/health/ready", front.ready),
            Route("/health", front.ready),
        ],
        middleware=[Middleware(Bearer, keys=keys)] if keys is not None else [],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False  # to an address of the caller's making
    return app


def client() -> httpx.AsyncClient:
    """Answers take as long as they take; their servers watch over that."""
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)


def _parsed(body: bytes) -> dict[str, Any]:
    """Raises RequestError for what is no JSON object; what is in it is the servers' to judge."""
    found = wire.plain_json(body)
    check_keys(body)
    return found


async def _bytes(begun: Begun) -> AsyncIterator[bytes]:
    """The answer. One that breaks off ends with an error event: a client must not take it for whole."""
    try:
        yield begun.first
        async for some in begun.rest:
            yield some
    except httpx.HTTPError as e:
        _, problem = error_object(Broken(f"the decode server broke off: {_said(e)}"))
        yield b"data: " + json.dumps(problem).encode() + b"\n\n"
    finally:
        await begun.response.aclose()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _gone(request: Request) -> None:
    """Until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _given_back(answer: httpx.Response) -> dict[str, str]:
    raw = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in answer.headers.raw]
    return {name: value for name, value in raw if name in GIVEN_BACK}


def _said(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
