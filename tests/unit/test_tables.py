"""Results as people read them: nothing is cut off, whatever the width."""

from __future__ import annotations

import pytest
from rich.console import Console

from pdbus.nodes.status_view import status_view
from pdbus.nodes.tables import show, table
from pdbus.nodes.values import show_duration

PEER = {"name": "prefill-1", "role": "prefill", "draining": False, "address": "tcp://127.0.0.1:7400", "detail": ""}


def lines(what: object, width: int = 200) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_column_that_is_empty_in_all_rows_is_left_out() -> None:
    heading, row = lines(table([PEER], tuple(PEER)))
    assert heading.split() == ["name", "role", "draining", "address"]
    assert row.split() == ["prefill-1", "prefill", "no", "tcp://127.0.0.1:7400"]


def test_what_other_nodes_say_moves_no_cursor_and_makes_no_line() -> None:
    """A node that was refused is shown by what it said of itself."""
    hostile = "x\x1b[2Jy\nprefill-2 up\u202e\x9b"
    (_, row) = lines(table([{**PEER, "detail": hostile}], tuple(PEER)))
    assert row.endswith(r"x\x1b[2Jy\nprefill-2 up\u202e\x9b")
    for line in lines(status_view({"name": hostile, "role": hostile, "ready": False, "not_ready": [hostile]})):
        assert line.isprintable()


def test_a_narrow_terminal_folds_and_cuts_nothing_off() -> None:
    """Figures that lose their last digits without a sign are worse than an ugly table."""
    rows = [{"prompt_tokens": 123_456, "cached_tokens": 98_765, "prefill_node": "a-node-with-a-long-name"}]
    text = "".join("".join(lines(table(rows), 24)).split())
    assert sum(c.isdigit() for c in text) == 11


def test_a_status_without_peers_or_requests_is_a_few_lines() -> None:
    said = {"name": "d1", "role": "decode", "ready": False, "not_ready": ["the worker is not up"], "peers": []}
    assert lines(status_view(said)) == ["d1 (decode) not ready: the worker is not up"]


@pytest.mark.parametrize(
    ("value", "name", "shown"),
    [(True, "", "yes"), (1536, "read_bytes", "1.5 KiB"), (0.123456, "", "0.1235"), (12345.6, "", "12,346")],
)
def test_values_are_shown_for_people(value: object, name: str, shown: str) -> None:
    assert show(value, name) == shown


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (30 * 10**9, "30s"),
        (90 * 10**9, "90s"),
        (3600 * 10**9, "1h"),
        (10**8, "100ms"),
        (250_000, "250us"),
        (15_199_999_998, "15.2s"),
    ],
)
def test_durations_are_shown_as_a_user_would_write_them(ns: int, shown: str) -> None:
    assert show_duration(ns) == shown
