"""Moments of several nodes in one order, though their clocks are apart."""

from __future__ import annotations

from pdbus.nodes.replay.story import Moment, in_order, merged


def moment(node: str, at_ms: int, what: str, said: bytes = b"", heard: bytes = b"") -> Moment:
    return Moment(at_ms * 1_000_000, node, at_ms, what, said=said, heard=heard)


def whats(moments: list[Moment]) -> list[str]:
    return [m.what for m in moments]


def test_the_clock_orders_what_has_no_cause() -> None:
    p = [moment("p", 1, "a"), moment("p", 3, "c")]
    d = [moment("d", 2, "b")]
    assert whats(in_order([p, d])) == ["a", "b", "c"]


def test_nothing_is_heard_before_it_is_said() -> None:
    """P's clock is half a second ahead of D's."""
    d = [moment("d", 10, "ask", said=b"1"), moment("d", 14, "answered", heard=b"2"), moment("d", 15, "go on")]
    p = [moment("p", 511, "asked", heard=b"1"), moment("p", 512, "answer", said=b"2")]
    assert whats(in_order([d, p])) == ["ask", "asked", "answer", "answered", "go on"]


def test_what_was_said_outside_the_recordings_holds_nothing_up() -> None:
    assert whats(in_order([[moment("d", 1, "heard", heard=b"x")], []])) == ["heard"]


def test_contradictions_end_all_the_same() -> None:
    a = [moment("a", 1, "a hears", heard=b"2"), moment("a", 2, "a says", said=b"1")]
    b = [moment("b", 1, "b hears", heard=b"1"), moment("b", 2, "b says", said=b"2")]
    assert sorted(whats(in_order([a, b]))) == ["a hears", "a says", "b hears", "b says"]


def test_the_tokens_of_an_answer_become_one_line() -> None:
    tokens = [moment("d", n, "EmitToken") for n in range(3)]
    assert whats(merged([*tokens, moment("d", 4, "EndRequest"), moment("d", 5, "EmitToken")])) == [
        "EmitToken x 3",
        "EndRequest",
        "EmitToken",
    ]
