"""/metrics: what this process counts about HTTP, and the node's own numbers as its status gives them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .node_metrics import PREFIX, NodeMetrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # up to a request's deadline

__all__ = ["CONTENT_TYPE", "HttpMetrics", "Measured"]


class HttpMetrics:
    """The counters and histograms of one app, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._node = NodeMetrics()
        self.registry.register(self._node)
        ProcessCollector(namespace="pdbus_http", registry=self.registry)
        self._up = Gauge(PREFIX + "node_up", "Whether the node answered.", registry=self.registry)
        self._requests = Counter(
            PREFIX + "http_requests", "Requests answered.", ("path", "method", "status"), registry=self.registry
        )
        self._in_flight = Gauge(PREFIX + "http_in_flight", "Requests not yet answered.", registry=self.registry)
        self._seconds = Histogram(
            PREFIX + "http_request_seconds", "To the answer's end.", ("path",), buckets=SECONDS, registry=self.registry
        )
        self._first_token = Histogram(
            PREFIX + "http_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def began(self) -> None:
        self._in_flight.inc()

    def ended(self, path: str, method: str, status: str, seconds: float) -> None:
        self._in_flight.dec()
        self._requests.labels(path, method, status).inc()
        self._seconds.labels(path).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def text(self, node: Mapping[str, Any] | None) -> bytes:
        """All of it in Prometheus' text format; `node` is its status, None when it did not answer."""
        self._up.set(node is not None)
        self._node.status = node or {}
        return generate_latest(self.registry)


class Measured:
    """Middleware that counts and times every request. Paths that do not exist share one label."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: tuple[str, ...]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = "gone"  # the client left before an answer began

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        path = scope["path"] if scope["path"] in self._paths else "other"
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
        began_s = time.monotonic()
        self._metrics.began()
        try:
            await self._app(scope, receive, sending)
        finally:
            self._metrics.ended(path, method, status, time.monotonic() - began_s)
