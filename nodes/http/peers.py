"""The prefill endpoints of a decode node, added and removed by their HTTP address.

Each endpoint is asked for GET /pd/info; the bus address in it is what the node connects to.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from pdbus.bus import wire
from pdbus.bus.compatibility import PREFILL_ROLES
from pdbus.bus.errors import PdError, RequestError
from pdbus.bus.messages import Outcome
from pdbus.bus.ports import may_be_host
from pdbus.bus.wire import Declared, replace

from .body import decode_body
from .errors import JSON
from .stream import read_body
from .upstream import Upstream

INFO_S = 5.0  # for an endpoint to answer /pd/info
INFO_BYTES_MAX = 64 << 10  # a stranger may answer anything
ENDPOINTS_MAX = 256  # all are asked at once
GIVE_HTTP = "give the node's HTTP address, or join it over the bus with pd connect"
HTTP = b"HTTP/"
BUS_PORT = "bus_port"  # RequestError.code for a port that speaks ZeroMQ
ZMTP_GREETING = re.compile(rb"\xff.{8}\x7f", re.DOTALL)
CONTROL = re.compile(r"[\s\x00-\x1f\x7f]")  # would end the request line


class EndpointsBody(Declared, forbid_unknown_fields=True):
    endpoints: list[str]


class Info(Declared):
    """What GET /pd/info says of a node: enough to call it over the bus."""

    name: str
    address: str
    incarnation: str = ""
    role: str = ""
    model: str = ""
    public_key: str = ""
    http: str = ""


class Result(Declared):
    endpoint: str
    ok: bool
    name: str = ""
    detail: str = ""


Asking = Callable[[], Awaitable[Result]]


class PrefillEndpoints:
    """The three routes. Remembers which endpoint led to which node, since the bus does not know every HTTP address."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._infos: dict[str, Info] = {}
        self._turn = asyncio.Lock()  # hands out turns in the order in which they were asked for

    async def add(self, request: Request) -> Response:
        return await self._carry_out(request, self._find_to_add)

    async def remove(self, request: Request) -> Response:
        """Takes what `add` took; a node's name or bus address does too, for an endpoint that no longer answers."""
        return await self._carry_out(request, self._find_to_remove)

    async def _carry_out(self, request: Request, find: Callable[[str], Awaitable[Asking]]) -> Response:
        """Finding out who is meant may take seconds: what is asked meanwhile waits, so that the last word holds. No web
        page may say who reads prompts, and browsers send to 127.0.0.1 what any page asks."""
        if "origin" in request.headers:
            raise RequestError("this is not for web pages: it came with an Origin header", code="forbidden", status=403)
        endpoints = await _read(request)
        async with self._turn:
            found = await asyncio.gather(*(find(endpoint) for endpoint in endpoints))
            asked = asyncio.gather(*(ask() for ask in found))
        return JSON({"results": [replace(result, detail="") if result.ok else result for result in await asked]})

    async def list(self, _: Request) -> Response:
        """With their state. One without a role is called, but has not said what it is; or it refused us."""
        status = await self._upstream.status()
        peers = [peer for peer in status.get("peers", []) if peer.get("role") in (*PREFILL_ROLES, "")]
        return JSON({"endpoints": [{"endpoint": self._endpoint(peer), **peer} for peer in peers]})

    def _endpoint(self, peer: dict[str, Any]) -> str:
        """As it was added; else the HTTP address that it told itself."""
        same = (e for e, info in self._infos.items() if peer["name"] == info.name or peer["address"] == info.address)
        return next(same, peer.get("http", ""))

    async def _find_to_add(self, endpoint: str) -> Asking:
        try:
            info = await fetch_info(endpoint)
            peers = (await self._upstream.status()).get("peers", [])
        except PdError as e:
            return partial(_failed, endpoint, str(e))
        if info.role not in PREFILL_ROLES and not _was_removed(peers, info.name):
            return partial(_failed, endpoint, f"is no prefill node: {info.role}", info.name)
        there = next((peer["name"] for peer in peers if peer["address"] == info.address), "")
        if there not in ("", info.name):
            return partial(_failed, endpoint, _another(info, there), info.name)
        return partial(self._join, endpoint, info)

    async def _join(self, endpoint: str, info: Info) -> Result:
        """The endpoint is remembered also for one that refuses: it is called again, and listed."""
        result = await _ask(endpoint, info.name, self._upstream.connect, info.address)
        if result.ok and result.detail not in ("", info.name):
            return await _failed(endpoint, _another(info, result.detail), info.name)
        self._infos[endpoint] = info
        return result

    async def _find_to_remove(self, endpoint: str) -> Asking:
        try:
            name, target = await self._target(endpoint)
        except PdError as e:
            return partial(_failed, endpoint, str(e))
        return partial(_ask, endpoint, name, self._upstream.disconnect, target)

    async def _target(self, endpoint: str) -> tuple[str, str]:
        """Name and bus address of whom an endpoint leads to, even if it no longer answers; or what was given, twice."""
        if not endpoint.startswith(("http://", "https://")):
            return endpoint, endpoint
        info = self._infos.get(endpoint)
        if info is None:
            peers = (await self._upstream.status()).get("peers", [])
            told = next((peer for peer in peers if peer.get("http") == endpoint), None)
            if told is not None:
                return told["name"], told["address"]
            info = await fetch_info(endpoint)
        return info.name, info.address


async def _read(request: Request) -> list[str]:
    body = decode_body(await read_body(request), EndpointsBody)
    if not 1 <= len(body.endpoints) <= ENDPOINTS_MAX:
        problem = f"endpoints: must hold 1 to {ENDPOINTS_MAX} addresses, got {len(body.endpoints)}"
        raise RequestError(problem, param="endpoints")
    return [_without_slash(endpoint) for endpoint in body.endpoints]


def _was_removed(peers: Sequence[dict[str, Any]], name: str) -> bool:
    """A decode node could be, and so must be able to come back."""
    return any(peer["name"] == name and peer["state"] in ("removing", "removed") for peer in peers)


def _another(info: Info, found: str) -> str:
    return f"says that it is {info.name} at {info.address}, but that is {found}"


def _without_slash(endpoint: str) -> str:
    """http://host:port/ is http://host:port; what is no address stays as it was given."""
    short = endpoint.rstrip("/")
    return short if "://" in short else endpoint


async def _failed(endpoint: str, detail: str, name: str = "") -> Result:
    return Result(endpoint=endpoint, ok=False, name=name, detail=detail)


async def _ask(
    endpoint: str, name: str, ask: Callable[[Sequence[str]], Awaitable[tuple[Outcome, ...]]], target: str
) -> Result:
    try:
        outcome = _only(await ask([target]))
    except PdError as e:
        return Result(endpoint=endpoint, ok=False, name=name, detail=str(e))
    return Result(endpoint=endpoint, ok=outcome.ok, name=name, detail=outcome.detail)


def _only(outcomes: Any) -> Outcome:
    outcome = next(iter(outcomes), None)
    return outcome if isinstance(outcome, Outcome) else Outcome(target="", ok=False, detail="the node did not say")


async def fetch_info(endpoint: str) -> Info:
    """GET {endpoint}/pd/info. Raises RequestError saying why `endpoint` is no node of ours."""
    url = _split(endpoint)
    try:
        async with asyncio.timeout(INFO_S):
            answer = await _get(url)
    except TimeoutError:
        raise RequestError(f"did not answer GET /pd/info within {INFO_S:.0f} s") from None
    except OSError as e:
        raise RequestError(f"cannot be reached: {_reason(e)}") from None
    info = _info(answer)
    if not info.address:
        raise RequestError("has no bus address that others can call")
    return info


def _reason(error: OSError) -> str:
    """asyncio puts the address into `strerror`; the number tells more. TLS counts its errors otherwise."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS there; give http:// if it speaks plain HTTP"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _split(endpoint: str) -> SplitResult:
    if endpoint.startswith("tcp://"):
        raise RequestError(f"is a bus address; {GIVE_HTTP}")
    try:
        url = urlsplit(endpoint)
        host, fits = url.hostname or "", url.scheme in ("http", "https") and url.port != 0
        if fits and host and may_be_host(host) and not CONTROL.search(endpoint):
            return url
    except ValueError:
        pass
    raise RequestError("must be like http://host:port")


async def _get(url: SplitResult) -> bytes:
    """The whole answer as it came. HTTP/1.0, so that it ends with the connection and is never in chunks."""
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    answer = bytearray()
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure or None)
    with closing(writer), suppress(ConnectionError):  # a stranger that hangs up has answered too
        writer.write(f"GET {url.path}/pd/info HTTP/1.0\r\nHost: {url.netloc}\r\n\r\n".encode())
        while len(answer) < INFO_BYTES_MAX and (data := await reader.read(INFO_BYTES_MAX)):
            answer += data
            if not answer.startswith(HTTP[: len(answer)]):
                break  # a ZeroMQ port, for one, says what it is and then waits for ever
    return bytes(answer)


def _info(answer: bytes) -> Info:
    head, _, body = answer.partition(b"\r\n\r\n")
    _, _, status = head.partition(b"\r\n")[0].decode(errors="replace").partition(" ")
    if ZMTP_GREETING.match(answer):
        raise RequestError(f"is a bus port; {GIVE_HTTP}", code=BUS_PORT)
    if not answer.startswith(HTTP):
        raise RequestError(f"is no pdbus node: it does not speak HTTP there; {GIVE_HTTP}")
    if not status.startswith("200"):
        raise RequestError(f"is no pdbus node: GET /pd/info answered {status[:80]}")
    try:
        return wire.decode_json(body, Info)
    except RequestError as e:
        raise RequestError(f"is no pdbus node: its /pd/info does not fit: {e}") from None
