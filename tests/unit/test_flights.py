"""Requests in flight as the live page tells of them: when what began, how it ended, and nothing of what was said."""

from __future__ import annotations

from pdbus.bus.errors import Broken, RequestError
from pdbus.nodes.gateway.flights import DECODE, ENDED_MAX, ERRORS_MAX, PREFILL, SHOWN_MAX, SPANS_MAX, WAITING, Flights

MS = 1_000_000


def test_a_request_is_told_as_spans_that_follow_each_other() -> None:
    flights = Flights()
    flight = flights.begins(7, 0)
    flight.enters(PREFILL, "d1", 10 * MS)
    flight.enters(DECODE, "d1", 30 * MS)
    flight.tokens = 5
    (said,) = flights.said(100 * MS)["requests"]
    assert [(s["what"], s["node"], s["from_ms"], s["to_ms"]) for s in said["spans"]] == [
        (WAITING, "", 100, 90),
        (PREFILL, "d1", 90, 70),
        (DECODE, "d1", 70, 0),
    ]
    assert (said["number"], said["end"], said["tokens"]) == (7, "", 5)


def test_an_ended_request_grows_no_more_and_comes_after_those_in_flight() -> None:
    flights = Flights()
    first, second = flights.begins(1, 0), flights.begins(2, 0)
    flights.ends(first, "length", 40 * MS)
    said = flights.said(100 * MS)
    assert said["in_flight"] == 1
    assert [(r["number"], r["end"]) for r in said["requests"]] == [(2, ""), (1, "length")]
    assert said["requests"][1]["spans"][-1]["to_ms"] == 60
    flights.ends(second, "error", 50 * MS)
    assert [r["number"] for r in flights.said(100 * MS)["requests"]] == [2, 1]


def test_errors_are_told_the_latest_first_without_a_clients_words() -> None:
    """A client's mistake quotes what it sent: that may be a prompt."""
    flights = Flights()
    flights.failed(RequestError("messages: 'my secret' is no role", param="messages"), 0, number=1, node="d1")
    flights.failed(Broken("the connection to d1 was cut"), 5 * MS, number=2, node="d1")
    flights.failed(KeyError("my secret"), 6 * MS)
    errors = flights.said(10 * MS)["errors"]
    assert [e["text"] for e in errors] == [
        "KeyError", "the connection to d1 was cut", "refused: invalid_request, messages",
    ]  # fmt: skip
    assert errors[1] == {"ago_ms": 5, "request": 2, "node": "d1", "text": "the connection to d1 was cut"}


def test_all_is_bounded() -> None:
    flights = Flights()
    for number in range(SHOWN_MAX + 10):
        flights.begins(number, 0)
    for number in range(1000, 1000 + 3 * ENDED_MAX):
        flights.ends(flights.begins(number, 0), "stop", 0)
        flights.failed("x" * 10_000, 0)
    restless = flights.begins(0, 0)
    for i in range(10 * SPANS_MAX):
        restless.enters(WAITING, "", i)
    said = flights.said(0)
    assert len(said["requests"]) == SHOWN_MAX + ENDED_MAX
    assert len(said["errors"]) == ERRORS_MAX and len(said["errors"][0]["text"]) < 1000
    assert len(restless.said(0)["spans"]) == SPANS_MAX
    assert restless.said(0)["spans"][0]["from_ms"] == 0
