"""One HTTP request's span, and what the answer's tokens tell of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdbus.nodes.tracing import Tracer, Value, passed

from .schema import UNTIL_FULL, Asked

if TYPE_CHECKING:
    from .stream import Choice


class Trace:
    """`traceparent` is what the node is told: of a span here, or what the client sent where no traces are made."""

    def __init__(self, tracer: Tracer | None, traceparent: str, operation: str, model: str, started_ns: int) -> None:
        self._tracer = tracer
        self._operation, self._model = operation, model
        self._name = f"{operation} {model}"
        self._started_ns, self._first_ns = started_ns, 0
        self._context = tracer.begin(traceparent, self._name) if tracer is not None else None
        self.traceparent = self._context.traceparent if self._context is not None else passed(traceparent)

    def first_token(self) -> float:
        """One has come. Returns the seconds since the request did."""
        now = time.monotonic_ns()
        self._first_ns = self._first_ns or now
        return (now - self._started_ns) / 1e9

    @contextmanager
    def of(self, asked: Asked, choices: Sequence[Choice]) -> Iterator[None]:
        """The span is over when this is left."""
        problem = ""
        try:
            yield
        except BaseException as e:
            problem = type(e).__name__
            raise
        finally:
            if self._tracer is not None and self._context is not None and self._context.sampled:
                ended = {**self._asked(asked), **self._answered(choices)}
                problem = problem or self._failed(choices)
                if problem:
                    ended["error.type"] = problem
                now = time.monotonic_ns()
                self._tracer.over(self._context, self._name, self._started_ns, now, ended, serves=True, problem=problem)

    def _asked(self, asked: Asked) -> dict[str, Value]:
        s = asked.sampling
        limit: dict[str, Value] = {"gen_ai.request.max_tokens": s.max_tokens} if s.max_tokens < UNTIL_FULL else {}
        count: dict[str, Value] = {"gen_ai.request.choice.count": asked.n} if asked.n > 1 else {}
        return {
            **limit,
            **count,
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "pdbus",
            "gen_ai.request.model": asked.model or self._model,
            "gen_ai.request.stream": asked.stream,
            "gen_ai.request.temperature": s.temperature,
            "gen_ai.request.top_p": s.top_p,
            "gen_ai.response.model": self._model,
        }

    def _answered(self, choices: Sequence[Choice]) -> dict[str, Value]:
        ends = [end for choice in choices if (end := choice.generation.finished) is not None]
        said: dict[str, Value] = {}
        if self._first_ns:
            said["gen_ai.response.time_to_first_chunk"] = (self._first_ns - self._started_ns) / 1e9
        if ends:
            said["gen_ai.response.id"] = ends[0].request.hex()
            said["gen_ai.response.finish_reasons"] = tuple(end.reason for end in ends)
            said["gen_ai.usage.input_tokens"] = sum(end.prompt_tokens for end in ends)
            said["gen_ai.usage.output_tokens"] = sum(end.completion_tokens for end in ends)
        return said

    def _failed(self, choices: Sequence[Choice]) -> str:
        """Of a stream that had begun, and of a client that left."""
        ends = [choice.generation.finished for choice in choices]
        if all(end is not None and end.reason in ("stop", "length") for end in ends):
            return ""
        return next((end.error.code for end in ends if end is not None and end.error is not None), "cut")
