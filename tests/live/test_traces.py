"""One request through gateway, decode and prefill node is one trace at a collector, sent by four processes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pdbus.bus.client import Client
from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import PORTS_FROM, PORTS_TO, Cluster

from .faults import OPTIONS, prompt
from tests.loop import until

pytestmark = [pytest.mark.live, pytest.mark.long]

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OF_TWO = {"route", "generate", "queue", "load", "decode", "offer", "prefill"}


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # with the node that sent it

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            said = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += ((said["service.instance.id"], span) for span in scope.spans)

    def of_trace(self, trace: str) -> dict[str, tuple[str, Any]]:
        return {span.name: (node, span) for node, span in self.spans if span.trace_id.hex() == trace}


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


def test_a_request_is_one_trace_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        port = free_port("127.0.0.1", random.randrange(PORTS_FROM, PORTS_TO))
        async with Cluster(1, 1, options=OPTIONS, gateway_port=port) as cluster, httpx.AsyncClient() as web:
            body = {"prompt": list(prompt(200, 1)), "max_tokens": 8, "ignore_eos": True}
            answer = await web.post(
                f"{cluster.gateway[0].http}/v1/completions", json=body, headers={"traceparent": CLIENTS}
            )
            assert answer.status_code == 200, answer.text
            async with Client(cluster.decode[0].address) as client:
                await client.generate(prompt(100, 2), max_tokens=2).whole()
            trace = CLIENTS[3:35]
            await until(lambda: len(collector.of_trace(trace)) == len(OF_TWO) + 1)
            check(collector.of_trace(trace), answer.json())
            await until(lambda: sum(span.name == "generate" for _, span in collector.spans) == 2)

    with collecting(monkeypatch) as collector:
        asyncio.run(asyncio.wait_for(run(), 90))


def check(spans: dict[str, tuple[str, Any]], answer: dict[str, Any]) -> None:
    http = next(name for name in spans if name.startswith("text_completion "))
    assert set(spans) == OF_TWO | {http}
    node = {name: node for name, (node, _) in spans.items()}
    assert node["generate"] == node["queue"] == node["load"] == node["decode"] == "decode-1"
    assert node["offer"] == node["prefill"] == "prefill-1" and node[http] == node["route"]
    above = {"route": http, "generate": http, "queue": "generate", "load": "generate", "decode": "generate",
             "offer": "load", "prefill": "offer"}  # fmt: skip
    for name, over in above.items():
        assert spans[name][1].parent_span_id == spans[over][1].span_id, name
    assert spans[http][1].parent_span_id.hex() == CLIENTS[36:52]
    assert answer["id"].endswith(attributes(spans["generate"][1])["gen_ai.response.id"])
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans.values())


def attributes(span: Any) -> dict[str, str]:
    return {a.key: a.value.string_value for a in span.attributes}
