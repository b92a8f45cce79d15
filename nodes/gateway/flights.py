"""Requests in flight, those that ended lately, and the last errors: what the live page shows. Pure.

Neither prompts nor answers are kept, nor what an error quotes of them. All is bounded: a page is for now, recordings
are for the past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from pdbus.bus.errors import PdError, RequestError

ENDED_MAX = 100  # requests that are still shown after their end
ERRORS_MAX = 50
SHOWN_MAX = 200  # requests in flight in one answer, the oldest first: more are no picture
SPANS_MAX = 32  # of a request; with more of them, as where it waits for full nodes, the early ones run together
TEXT_CHARS_MAX = 300  # of an error
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"


class Flight:
    """One request. Spans follow each other without a gap: (what, node, from when)."""

    def __init__(self, number: int, now_ns: int) -> None:
        self.number = number
        self.tokens = 0
        self.prompt_tokens = 0
        self.prefill_node = ""
        self.end = ""  # how it ended: stop, length, cancelled, error; '' in flight
        self._spans: list[tuple[str, str, int]] = [(WAITING, "", now_ns)]
        self._ended_ns = 0

    @property
    def node(self) -> str:
        return self._spans[-1][1]

    def enters(self, what: str, node: str, now_ns: int) -> None:
        if len(self._spans) == SPANS_MAX:
            del self._spans[1]
        self._spans.append((what, node, now_ns))

    def ends(self, how: str, now_ns: int) -> None:
        self.end, self._ended_ns = how, now_ns

    def waits(self) -> Iterator[tuple[int, int, str]]:
        """Each time that it had no node: from when until when, and the node that it had then; '' where it ended so."""
        follows = [*((node, begin) for _, node, begin in self._spans[1:]), ("", self._ended_ns)]
        for (what, _, begin), (node, end) in zip(self._spans, follows, strict=True):
            if what == WAITING:
                yield begin, end, node

    def said(self, now_ns: int) -> dict[str, Any]:
        """Times in milliseconds ago."""
        until = [begin for _, _, begin in self._spans[1:]] + [self._ended_ns or now_ns]
        return {
            "number": self.number,
            "end": self.end,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "prefill_node": self.prefill_node,
            "spans": [
                {"what": what, "node": node, "from_ms": _ago(begin, now_ns), "to_ms": _ago(end, now_ns)}
                for (what, node, begin), end in zip(self._spans, until, strict=True)
            ],
        }


class Flights:
    """All of one gateway."""

    def __init__(self) -> None:
        self._open: dict[int, Flight] = {}
        self._ended: deque[Flight] = deque(maxlen=ENDED_MAX)
        self._errors: deque[tuple[int, int, str, str]] = deque(maxlen=ERRORS_MAX)  # when, request, node, text

    def begins(self, number: int, now_ns: int) -> Flight:
        flight = self._open[number] = Flight(number, now_ns)
        return flight

    def ends(self, flight: Flight, how: str, now_ns: int) -> None:
        flight.ends(how, now_ns)
        self._open.pop(flight.number, None)
        self._ended.append(flight)

    def failed(self, problem: Exception | str, now_ns: int, *, number: int = 0, node: str = "") -> None:
        """`number`: 0 where it was no request that failed."""
        self._errors.append((now_ns, number, node, _told(problem)[:TEXT_CHARS_MAX]))

    def said(self, now_ns: int) -> dict[str, Any]:
        """For the page: the oldest in flight, then the latest that have ended; errors, the latest first."""
        return {
            "in_flight": len(self._open),
            "requests": [flight.said(now_ns) for flight in self._shown()],
            "errors": [
                {"ago_ms": _ago(at, now_ns), "request": number, "node": node, "text": text}
                for at, number, node, text in reversed(self._errors)
            ],
        }

    def _shown(self) -> Iterator[Flight]:
        return chain(islice(self._open.values(), SHOWN_MAX), reversed(self._ended))


def _ago(at_ns: int, now_ns: int) -> int:
    return (now_ns - at_ns) // 1_000_000


def _told(problem: Exception | str) -> str:
    """A client's own mistake may be told in its own words: only where it lies is kept."""
    if isinstance(problem, RequestError):
        return f"refused: {problem.code}{f', {problem.param}' if problem.param else ''}"
    if isinstance(problem, PdError | str):
        return str(problem)
    return type(problem).__name__
