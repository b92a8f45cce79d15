"""Traces for OpenTelemetry: off unless its standard environment asks for them. Needs the extra `pdbus[otel]`.

A span is made when it is over, out of times that are known anyway. Before, there is nothing but the ids under which
others hang theirs; these travel in W3C's `traceparent`, as a header over HTTP and as a key of generate and
prefill.request over the bus. Where traces are off, a traceparent passes unchanged.

This module alone knows OpenTelemetry, and loads it only when traces are on. It knows nothing of requests.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

from pdbus.bus.errors import ConfigError

EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
ENDPOINT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_S = 2.0  # for the last spans to leave; a collector that is gone keeps nobody longer
SAMPLED = 0x01
FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
OWN_VERSION = "00"

Value = str | bool | int | float | Sequence[str]


class Context(NamedTuple):
    """A span's ids. `parent_id` 0: it is the first of its trace."""

    trace_id: int
    span_id: int
    parent_id: int = 0
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"{OWN_VERSION}-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED if self.sampled else 0:02x}"

    def child(self) -> Self:
        """One below it."""
        return self._replace(span_id=_new_id(8), parent_id=self.span_id)


def parse(traceparent: str) -> Context | None:
    """Somebody's span. None for what W3C does not allow: it is passed over, as W3C asks."""
    match = FORM.fullmatch(traceparent) if len(traceparent) <= 512 else None
    if match is None or (traceparent.startswith(OWN_VERSION) and match[4]):
        return None
    return Context(int(match[1], 16), int(match[2], 16), sampled=bool(int(match[3], 16) & SAMPLED))


def passed(traceparent: str) -> str:
    """What goes on where no span is made: the same, if it is one."""
    context = parse(traceparent)
    return context.traceparent if context is not None else ""


class Tracer:
    """Makes spans and sends them, from a thread of its own and in batches. What does not leave in time is dropped."""

    def __init__(self, processor: Any, resource: Any, sampler: Any) -> None:
        """Of opentelemetry.sdk: a SpanProcessor, a Resource and a Sampler."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from pdbus import __version__

        self._processor, self._resource, self._sampler = processor, resource, sampler
        self._trace, self._span = trace, ReadableSpan
        self._scope = InstrumentationScope("pdbus", __version__)

    def begin(self, traceparent: str, name: str) -> Context:
        """The ids of a span that begins now, under somebody's or as the first of a new trace. OTEL_TRACES_SAMPLER
        decides whether it, and all below it, will be sent."""
        above = parse(traceparent)
        context = above.child() if above is not None else Context(_new_id(16), _new_id(8))
        around = None
        if above is not None:
            around = self._trace.set_span_in_context(self._trace.NonRecordingSpan(self._ids(above, above.span_id)))
        sampled = self._sampler.should_sample(around, context.trace_id, name).decision.is_sampled()
        return context._replace(sampled=sampled)

    def over(
        self,
        context: Context,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value],
        *,
        serves: bool = False,
        problem: str = "",
    ) -> None:
        """The span from one reading of time.monotonic_ns to another. `serves`: a request from elsewhere. `problem`: why
        it failed."""
        if not context.sampled:
            return
        trace = self._trace
        wall_ns = time.time_ns() - time.monotonic_ns()
        status = trace.Status(trace.StatusCode.ERROR, problem) if problem else trace.Status()
        span = self._span(
            name,
            context=self._ids(context, context.span_id),
            parent=self._ids(context, context.parent_id) if context.parent_id else None,
            resource=self._resource,
            attributes=dict(attributes),
            kind=trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL,
            status=status,
            start_time=wall_ns + begin_ns,
            end_time=wall_ns + max(begin_ns, end_ns),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _ids(self, context: Context, span_id: int) -> Any:
        flags = self._trace.TraceFlags(SAMPLED if context.sampled else 0)
        return self._trace.SpanContext(context.trace_id, span_id, is_remote=False, trace_flags=flags)


def tracer_of(name: str, environ: Mapping[str, str] = os.environ) -> Tracer | None:
    """Of the node or gateway of this name; None where the environment asks for no traces. Raises ConfigError."""
    asked_by = asks(environ)
    if not asked_by:
        return None
    if not all(map(_is_installed, PACKAGES)):
        problem = "asks for traces, which need more: pip install 'pdbus[otel]', or set OTEL_SDK_DISABLED=true"
        raise ConfigError(asked_by, problem)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    known = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.instance.id": name} if known else {"service.name": "pdbus", "service.instance.id": name}
    resource = Resource.create(own)
    sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler  # as the environment wishes
    return Tracer(BatchSpanProcessor(OTLPSpanExporter()), resource, sampler)


def asks(environ: Mapping[str, str]) -> str:
    """The variable that asks for traces; '' for none. Raises ConfigError for one that asks for what is not there."""
    said = {name: environ.get(name, "").strip() for name in (EXPORTER, *PROTOCOL, *ENDPOINT)}
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or said[EXPORTER] == "none":
        return ""
    asked_by = next((name for name in (EXPORTER, *ENDPOINT) if said[name]), "")
    if not asked_by:
        return ""
    if said[EXPORTER] not in ("", "otlp"):
        raise ConfigError(EXPORTER, f"must be otlp or none, got {said[EXPORTER]!r:.80}")
    protocol = next((name for name in PROTOCOL if said[name]), "")
    if protocol and said[protocol] != "http/protobuf":
        raise ConfigError(protocol, f"must be http/protobuf, got {said[protocol]!r:.80}")
    for name in ENDPOINT:
        if said[name] and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", said[name]):
            raise ConfigError(name, f"must be like http://127.0.0.1:4318, got {said[name]!r:.80}")
    return asked_by


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a folder above it
        return False


def _new_id(size: int) -> int:
    return int.from_bytes(secrets.token_bytes(size), "big") or 1
