"""The paths of the HTTP side, over whatever answers behind it: one node, or the gateway's cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdbus.bus.errors import Broken, DeadlineExceeded, PdError, RequestError
from pdbus.bus.generation import DEADLINE_MS
from pdbus.nodes.tracing import Tracer

from .answer import Chat, Completion
from .bearer import Bearer
from .errors import HANDLERS, JSON
from .keys import HttpKeys
from .metrics import CONTENT_TYPE, HttpMetrics, Measured
from .peers import Info, PrefillEndpoints
from .schema import parse_chat, parse_completion
from .stream import Generate
from .tokens import Tokens
from .upstream import Upstream

STATUS_S = 5.0  # for the node to say how it is; longer than its own probes of worker and mover


class Node:
    """What the node, or the gateway, says of itself, and the routes that pass it on."""

    def __init__(self, upstream: Upstream, metrics: HttpMetrics, http: str) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._http = http
        self._model = ""  # a node's model never changes in its life, so it is asked once
        self._created_s = int(time.time())

    async def status(self) -> dict[str, Any]:
        """Raises DeadlineExceeded or Broken when the node does not answer."""
        try:
            async with asyncio.timeout(STATUS_S):
                return await self._upstream.status()
        except TimeoutError:
            raise DeadlineExceeded(f"the node did not answer within {STATUS_S:.0f} s") from None

    async def check_model(self, asked: str) -> str:
        """The served model's id. Raises RequestError when another one is asked for."""
        if not self._model:
            self._model = _model_of(await self.status())
        if asked and asked != self._model:
            problem = f"model: {asked!r:.200} is not served here, {self._model!r} is"
            raise RequestError(problem, param="model", code="model_not_found", status=404)
        return self._model

    async def models(self, _: Request) -> Response:
        return JSON({"object": "list", "data": [await self._described()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its id. Raises RequestError for another."""
        name = request.path_params["model"]
        if not name:
            raise HTTPException(404)
        await self.check_model(name)
        return JSON(await self._described())

    async def _described(self) -> dict[str, Any]:
        status = await self.status()
        return {
            "id": _model_of(status),
            "object": "model",
            "created": self._created_s,
            "owned_by": "pdbus",
            "max_model_len": status.get("max_model_len", 0),
        }

    async def live(self, _: Request) -> Response:
        """This process works; says nothing of the node behind it."""
        return JSON({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        """Whether a request would be served: the node's status is a round trip through its worker and mover."""
        try:
            status = await self.status()
        except PdError as e:
            status = {"not_ready": [str(e)]}
        if status.get("ready"):
            return JSON({"status": "ready", "name": status.get("name", "")})
        return JSON({"status": "not ready", "reasons": status.get("not_ready") or ["the node is not ready"]}, 503)

    async def metrics(self, _: Request) -> Response:
        try:
            status: dict[str, Any] | None = await self.status()
        except PdError:
            status = None
        return Response(self._metrics.text(status), media_type=CONTENT_TYPE)

    async def info(self, _: Request) -> Response:
        """What another node needs to call this one over the bus."""
        status = await self.status()
        if not status.get("name"):
            raise Broken("the node does not know its name yet")
        said = {key: str(status.get(key, "")) for key in ("name", "incarnation", "role", "address", "model")}
        return JSON(Info(**said, http=self._http))


def _model_of(status: dict[str, Any]) -> str:
    """Raises Broken where none is known: a gateway without nodes has none."""
    model = str(status.get("model", ""))
    if not model:
        raise Broken("; ".join(status.get("not_ready") or ["the node does not know its model yet"]))
    return model


def create_app(
    upstream: Upstream,
    *,
    http: str = "",
    keys: HttpKeys | None = None,
    more: Sequence[Route] = (),
    open_paths: Sequence[str] = (),
    tracer: Tracer | None = None,
    deadline_ms: int = DEADLINE_MS,
) -> Starlette:
    """The app over what answers. `http` is this server's own address as others reach it (http://host:port). With `keys`
    it serves only who sends one, but for what tells nothing; of `more` routes these are `open_paths`. `deadline_ms`: of
    requests that give none."""
    metrics = HttpMetrics()
    node = Node(upstream, metrics, http)
    peers = PrefillEndpoints(upstream)
    tokens = Tokens(upstream, node.check_model, node.status)
    completions = Generate(upstream, node.check_model, metrics, parse_completion, Completion, deadline_ms, tracer)
    chat = Generate(upstream, node.check_model, metrics, parse_chat, Chat, deadline_ms, tracer)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", node.models),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models/{model:path}", node.model),
        Route("/health/live", node.live),
        Route("/health/ready", node.ready),
        Route("/health", node.ready),
        Route("/metrics", node.metrics),
        Route("/pd/info", node.info),
        Route("/add_remote_prefill_eps", peers.add, methods=["POST"]),
        Route("/add_remote_prefill_eps", peers.list),
        Route("/remove_remote_prefill_eps", peers.remove, methods=["POST"]),
        Route("/remote_prefill_eps", peers.list),
        *more,
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Measured, metrics=metrics, paths=tuple(route.path for route in routes)),
            *([Middleware(Bearer, keys=keys, more=open_paths)] if keys is not None else []),
        ],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False  # to an address of the caller's making
    return app
