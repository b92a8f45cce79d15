"""Traces: what turns them on, whose span hangs under whose, and that they leave nothing out of reach when off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from pdbus.bus.errors import Broken, ConfigError
from pdbus.bus.messages import PrefillDone, PrefillFailed, Timeline, TryId
from pdbus.nodes import events as ev
from pdbus.nodes import tracing
from pdbus.nodes.http.app import create_app
from pdbus.nodes.spans import NodeSpans, phases
from pdbus.nodes.tracing import Context, Tracer, asks, parse, passed, tracer_of

from tests.fake_client import FakeClient, token

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = CLIENTS[:-1] + "0"
NEWER = "cc" + CLIENTS[2:] + "-what-the-future-brings"
S = 1_000_000_000


class Collected:
    """A tracer and what it has sent."""

    def __init__(self, sampler: Any = None) -> None:
        self._memory = InMemorySpanExporter()
        sampler = sampler or TracerProvider().sampler
        self.tracer = Tracer(SimpleSpanProcessor(self._memory), Resource({}), sampler)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._memory.get_finished_spans()}


def parent(span: ReadableSpan) -> int:
    return span.parent.span_id if span.parent is not None else 0


# ---------------------------------------------------------------- traceparent


def test_a_traceparent_is_read_and_written() -> None:
    context = parse(CLIENTS)
    assert context is not None and context.sampled and context.traceparent == CLIENTS
    assert passed(UNSAMPLED) == UNSAMPLED
    assert passed(NEWER) == CLIENTS, "of a newer version what is known of it"


@pytest.mark.parametrize(
    "damaged",
    ["", "no", CLIENTS.upper(), CLIENTS + "-more", CLIENTS[:-1], "ff" + CLIENTS[2:], CLIENTS.replace("4bf9", "4bg9"),
     "00-" + "0" * 32 + CLIENTS[35:], CLIENTS[:36] + "0" * 16 + "-01", CLIENTS + "\r\nx: y", "x" * 100_000],
)  # fmt: skip
def test_what_is_no_traceparent_is_passed_over(damaged: str) -> None:
    assert parse(damaged) is None and passed(damaged) == ""


# ---------------------------------------------------------------- on and off

AT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environ", "asked_by"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "mine"}, ""),
        (AT, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://[::1]:4318/v1/traces"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "OTEL_TRACES_EXPORTER"),
        ({**AT, "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({**AT, "OTEL_SDK_DISABLED": "TRUE"}, ""),
    ],
)
def test_the_standard_environment_turns_them_on(environ: Mapping[str, str], asked_by: str) -> None:
    assert asks(environ) == asked_by


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: must be otlp or none, got 'zipkin'"),
        (
            {**AT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: must be http/protobuf, got 'grpc'",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: must be like http://"),
    ],
)
def test_what_is_asked_for_and_is_not_there_is_named(environ: Mapping[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tracer_of("n", environ)


def test_a_missing_extra_is_named_with_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.sdk", "nowhere.at_all"))
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT: .*pip install 'pdbus\[otel\]'"):
        tracer_of("n", AT)
    assert tracer_of("n", {}) is None


# ---------------------------------------------------------------- over HTTP


def answered(client: FakeClient, collected: Collected | None, **headers: str) -> httpx.Response:
    async def post() -> httpx.Response:
        app = create_app(client, tracer=collected.tracer if collected else None)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as web:
            return await web.post("/v1/completions", json={"prompt": "hi", "temperature": 0.5}, headers=headers)

    return asyncio.run(post())


def test_a_traceparent_passes_where_traces_are_off() -> None:
    client = FakeClient()
    answered(client, None, traceparent=CLIENTS)
    answered(client, None, traceparent="nonsense")
    assert client.traceparents == [CLIENTS, ""]


def test_an_http_request_is_a_span_under_the_clients_and_over_the_nodes() -> None:
    client, collected = FakeClient(), Collected()
    assert answered(client, collected, traceparent=CLIENTS).status_code == 200
    (span,) = collected.spans().values()
    (told,) = map(parse, client.traceparents)
    assert told is not None and span.context is not None
    assert f"{told.trace_id:032x}" == CLIENTS[3:35] and told.span_id == span.context.span_id
    assert parent(span) == int(CLIENTS[36:52], 16)
    said = dict(span.attributes or {})
    assert said["gen_ai.operation.name"] == "text_completion" and said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.usage.output_tokens"] and said["gen_ai.response.finish_reasons"]
    assert "error.type" not in said and "hi" not in map(str, said.values())


def test_an_answer_that_fails_says_so_in_its_span() -> None:
    collected = Collected()
    assert answered(FakeClient([token(0, "a"), Broken("gone")]), collected).status_code == 503
    (span,) = collected.spans().values()
    assert dict(span.attributes or {})["error.type"] == "Broken" and not span.status.is_ok


def test_a_client_that_samples_nothing_gets_no_spans_and_nobody_below_makes_any() -> None:
    client, collected = FakeClient(), Collected()
    answered(client, collected, traceparent=UNSAMPLED)
    assert collected.spans() == {}
    (told,) = map(parse, client.traceparents)
    assert told is not None and not told.sampled


def test_the_sampler_decides_where_a_trace_begins() -> None:
    collected = Collected(ParentBased(ALWAYS_OFF))
    answered(FakeClient(), collected)
    answered(FakeClient(), collected, traceparent=CLIENTS)
    assert len(collected.spans()) == 1


# ---------------------------------------------------------------- of a node

REMOTE = Timeline(
    remote=True, prefill_node="p1", attempts=1, queue_ns=1 * S, prefill_ns=4 * S, ttft_ns=5 * S, handover_ns=3 * S,
    first_step_ns=1 * S, total_ns=20 * S, read_bytes=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("timeline", "expected"),
    [
        (REMOTE, [("queue", 0, 1), ("load", 1, 7), ("decode", 7, 20)]),
        (Timeline(queue_ns=1 * S, ttft_ns=5 * S, total_ns=9 * S), [("queue", 0, 1), ("load", 1, 5), ("decode", 5, 9)]),
        (Timeline(total_ns=9 * S), [("queue", 0, 9)]),
        (Timeline(attempts=2, queue_ns=1 * S, total_ns=9 * S), [("queue", 0, 1), ("load", 1, 9)]),
    ],
    ids=["remote", "here", "never admitted", "never a token"],
)
def test_phases_follow_each_other_without_a_gap(timeline: Timeline, expected: list[tuple[str, int, int]]) -> None:
    assert phases(timeline) == [(name, begin * S, end * S) for name, begin, end in expected]


def end(request: bytes, reason: str = "stop", timeline: Timeline = REMOTE, problem: str = "") -> ev.EndRequest:
    return ev.EndRequest(
        request=request, seq=1, reason=reason, prompt_tokens=30, cached_tokens=16, completion_tokens=7,
        timeline=timeline, problem=problem,
    )  # fmt: skip


def test_decode_and_prefill_node_hang_their_spans_into_one_trace() -> None:
    d, p = Collected(), Collected()
    decode, prefill = NodeSpans(d.tracer, "d1", "tiny"), NodeSpans(p.tracer, "p1", "tiny")
    try_ = TryId(node="d1", incarnation=b"d", request=b"r", attempt=1)
    prefill.asked(try_, decode.began(b"r", CLIENTS))
    prefill.asked(try_, "00-" + "1" * 32 + "-" + "1" * 16 + "-01")  # said again: one try has one span
    done: Any = ev.Send(link="l", to="d1", to_inc=b"d", message=_done(try_))
    leased = {"request": b"r".hex(), "attempt": 1, "decode_node": "d1", "cause": "done", "held_ns": 4 * S}
    prefill.decided([done, ev.Publish(topic="lease", event="lease.ended", data=leased)])
    decode.decided([end(b"r")])
    assert set(d.spans()) == {"generate", "queue", "load", "decode"} and set(p.spans()) == {"offer", "prefill"}
    spans = {**d.spans(), **p.spans()}
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    ids = {name: span.context.span_id for name, span in spans.items() if span.context}
    assert {name: parent(span) for name, span in spans.items()} == {
        "generate": int(CLIENTS[36:52], 16), "queue": ids["generate"], "load": ids["generate"],
        "decode": ids["generate"], "offer": ids["load"], "prefill": ids["offer"],
    }  # fmt: skip
    assert dict(spans["load"].attributes or {})["pdbus.read.bytes"] == 4096
    assert spans["offer"].status.is_ok and spans["generate"].status.is_ok


def _done(try_: TryId) -> PrefillDone:
    from pdbus.bus.messages import LeaseId

    lease = LeaseId(node="p1", incarnation=b"p", epoch=1, generation=1)
    return PrefillDone(try_=try_, lease=lease, ready=30, blocks=b"", prefill_ns=3 * S)


def test_what_went_wrong_stands_with_the_span() -> None:
    d = Collected()
    spans = NodeSpans(d.tracer, "d1", "tiny")
    spans.began(b"r", "")
    spans.decided([end(b"r", "error", Timeline(total_ns=S), "no room")])
    assert d.spans()["generate"].status.description == "no room"
    assert set(d.spans()) == {"generate", "queue"}


def test_tries_that_are_refused_leave_nothing_behind() -> None:
    p = Collected()
    spans = NodeSpans(p.tracer, "p1", "tiny")
    try_ = TryId(node="d1", incarnation=b"d", request=b"r", attempt=1)
    spans.asked(try_, CLIENTS)
    refused: Any = ev.Send(link="l", to="d1", to_inc=b"d", message=PrefillFailed(try_=try_, cause="no_room"))
    spans.decided([refused])
    assert not spans._asked and p.spans() == {}


def test_a_collector_that_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits CLOSE_S at most."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.01)

    class Stuck:
        def shutdown(self) -> None:
            import threading

            threading.Event().wait(30)

    Tracer(Stuck(), Resource({}), TracerProvider().sampler).close()


def test_ids_are_never_zero_and_children_keep_the_trace() -> None:
    context = Context(1, 2)
    below = context.child()
    assert (below.trace_id, below.parent_id) == (1, 2) and below.span_id not in (0, 2)
