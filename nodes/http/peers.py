"""The prefill endpoints of a decode node, added and removed by their HTTP address.

Each endpoint is asked for GET /pd/info; the bus address in it is what the node connects to.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pdbus.bus import wire
from pdbus.bus.errors import PdError, RequestError
from pdbus.bus.messages import Outcome
from pdbus.bus.wire import Declared

from .errors import JSON
from .stream import read_body

if TYPE_CHECKING:
    from pdbus.bus.client import Client

INFO_S = 5.0  # for an endpoint to answer /pd/info
INFO_BYTES_MAX = 64 << 10  # a stranger may answer anything
ENDPOINTS_MAX = 64  # each holds a thread while it is asked

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # peers are asked directly, never via a proxy


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


class PrefillEndpoints:
    """The three routes. Remembers which endpoint led to which node, since the bus does not know HTTP addresses."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._infos: dict[str, Info] = {}

    async def add(self, request: Request) -> Response:
        endpoints = await _read(request)
        return JSON({"results": await asyncio.gather(*(self._add(endpoint) for endpoint in endpoints))})

    async def remove(self, request: Request) -> Response:
        """Takes what `add` took; a node's name or bus address does too, for an endpoint that no longer answers."""
        endpoints = await _read(request)
        return JSON({"results": await asyncio.gather(*(self._remove(endpoint) for endpoint in endpoints))})

    async def list(self, _: Request) -> Response:
        status = await self._client.status()
        known = {info.name: endpoint for endpoint, info in self._infos.items()}
        peers = [peer for peer in status.get("peers", []) if peer.get("role") in ("prefill", "both")]
        return JSON({"endpoints": [{"endpoint": known.get(peer.get("name"), ""), **peer} for peer in peers]})

    async def _add(self, endpoint: str) -> Result:
        try:
            info = await fetch_info(endpoint)
            if info.role not in ("prefill", "both"):
                return Result(endpoint=endpoint, ok=False, name=info.name, detail=f"is no prefill node: {info.role}")
            outcome = _only(await self._client.connect([info.address]))
        except PdError as e:
            return Result(endpoint=endpoint, ok=False, detail=str(e))
        if outcome.ok:
            self._infos[endpoint] = info
        return Result(endpoint=endpoint, ok=outcome.ok, name=info.name, detail=outcome.detail)

    async def _remove(self, endpoint: str) -> Result:
        try:
            target = await self._target(endpoint)
            outcome = _only(await self._client.disconnect([target]))
        except PdError as e:
            return Result(endpoint=endpoint, ok=False, detail=str(e))
        if outcome.ok:
            self._infos = {known: info for known, info in self._infos.items() if target not in (known, info.name)}
        return Result(endpoint=endpoint, ok=outcome.ok, name=target, detail=outcome.detail)

    async def _target(self, endpoint: str) -> str:
        if not endpoint.startswith(("http://", "https://")):
            return endpoint
        info = self._infos.get(endpoint) or await fetch_info(endpoint)
        return info.name


async def _read(request: Request) -> list[str]:
    body = wire.decode_json(await read_body(request), EndpointsBody)
    if not 1 <= len(body.endpoints) <= ENDPOINTS_MAX:
        problem = f"endpoints: must hold 1 to {ENDPOINTS_MAX} addresses, got {len(body.endpoints)}"
        raise RequestError(problem, param="endpoints")
    return [endpoint.rstrip("/") for endpoint in body.endpoints]


def _only(outcomes: Any) -> Outcome:
    outcome = next(iter(outcomes), None)
    return outcome if isinstance(outcome, Outcome) else Outcome(target="", ok=False, detail="the node did not say")


async def fetch_info(endpoint: str) -> Info:
    """GET {endpoint}/pd/info. Raises RequestError saying why `endpoint` is no node of ours."""
    try:
        data = await asyncio.wait_for(asyncio.to_thread(_get, f"{endpoint}/pd/info"), INFO_S + 1)
        info = wire.decode_json(data, Info)
    except RequestError as e:
        raise RequestError(f"is no pdbus node: its /pd/info does not fit: {e}") from None
    except urllib.error.HTTPError as e:
        raise RequestError(f"is no pdbus node: GET /pd/info answered {e.code}") from None
    except ValueError as e:
        raise RequestError(f"must be like http://host:port: {e}") from None
    except (OSError, TimeoutError) as e:
        raise RequestError(f"cannot be reached: {getattr(e, 'reason', None) or e or 'timed out'}") from None
    if not info.address:
        raise RequestError("has no bus address that others can call")
    return info


def _get(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("it has no scheme")
    with NO_PROXY.open(url, timeout=INFO_S) as answer:
        data: bytes = answer.read(INFO_BYTES_MAX)
        return data
