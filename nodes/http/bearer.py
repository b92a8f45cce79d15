"""HTTP for those alone who send `Authorization: Bearer KEY`, within what that key may ask for. What tells nothing and
starts nothing stays open."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pdbus.bus.errors import PdError, RequestError

from .errors import on_pd_error
from .keys import HttpKeys, Owner
from .quotas import Quota, RateLimited

OPERATE = ("/add_remote_prefill_eps", "/remove_remote_prefill_eps")  # who says what computes prompts reads them
OPEN = ("/health", "/health/live", "/health/ready", "/pd/info")  # probes, and what another node asks before it calls


class Bearer:
    """ASGI middleware. `more`: other paths that stay open. Limits are of the names in the file: two keys of one name
    share them. Only what is posted counts."""

    def __init__(self, app: ASGIApp, *, keys: HttpKeys, more: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset((*OPEN, *more))
        self._quotas: defaultdict[str, Quota] = defaultdict(Quota)  # by name, of which the file has so many

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        owner = self._keys.owner_of(key.strip()) if scheme.lower() == "bearer" else None
        if owner is not None and scope["method"] == "POST" and scope["path"] in OPERATE and not owner.operates:
            problem = f"the key of {owner.name} may not change which nodes are used: that takes an operator's"
            await _refuse(RequestError(problem, code="forbidden", status=403), scope, receive, send)
            return
        if owner is not None:
            await self._within_limits(owner, scope, receive, send)
            return
        problem = "no API key was sent: give it as Authorization: Bearer KEY" if not key else "the API key is not known"
        refused = RequestError(problem, code="invalid_api_key", status=401)
        await _refuse(refused, scope, receive, send)

    async def _within_limits(self, owner: Owner, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        quota = self._quotas[owner.name]
        try:
            quota.begin(owner.limits, time.monotonic())
        except RateLimited as e:
            await _refuse(e, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            quota.end()


async def _refuse(error: PdError, scope: Scope, receive: Receive, send: Send) -> None:
    """Its body has not been read: what follows on the connection is no request."""
    response = await on_pd_error(Request(scope, receive), error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
