"""HTTP for those alone who send `Authorization: Bearer KEY`. What tells nothing and starts nothing stays open."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pdbus.bus.errors import RequestError

from .errors import on_pd_error
from .keys import HttpKeys

OPEN = ("/health", "/health/live", "/health/ready", "/pd/info")  # probes, and what another node asks before it calls


class Bearer:
    """ASGI middleware. `more`: other paths that stay open."""

    def __init__(self, app: ASGIApp, *, keys: HttpKeys, more: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset((*OPEN, *more))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._keys.name_of(key.strip()):
            await self._app(scope, receive, send)
            return
        problem = "no API key was sent: give it as Authorization: Bearer KEY" if not key else "the API key is not known"
        refused = RequestError(problem, code="invalid_api_key", status=401)
        response = await on_pd_error(Request(scope, receive), refused)
        await response(scope, receive, send)
