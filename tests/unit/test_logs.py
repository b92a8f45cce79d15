"""A node's log lines."""

from __future__ import annotations

import json
import logging

from pdbus.nodes.logs import BURST, CHARS_MAX, WINDOW_S, JsonLines, Repeats, TextLines


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("pdbus", logging.WARNING, "", 0, message, args, None)
    made.__dict__.update(fields)
    return made


def test_a_line_for_people_ends_with_its_fields() -> None:
    said = TextLines("p1").format(record("attempt failed: %s", "no_room", request="4f", attempt=2, peer="p2"))
    assert said.partition(" ")[2] == "p1 attempt failed: no_room (request=4f attempt=2 peer=p2)"
    assert TextLines("p%d").format(record("drained")).endswith("p%d drained")


def test_what_others_say_begins_no_line_and_fills_no_disk() -> None:
    """A node's goodbye, say, holds whatever it likes."""
    bye = "bye\n12:00:00 p1 is ready\x1b[2J\u2028"
    said = TextLines("p1").format(record("is gone: %s", bye, peer="p\n2"))
    assert said.isprintable() and said.endswith(r"is gone: bye\n12:00:00 p1 is ready\x1b[2J\u2028 (peer=p\n2)")
    for lines in (TextLines("p1"), JsonLines("p1")):
        assert len(lines.format(record("is gone: %s", "x" * 10**6))) < CHARS_MAX + 300


def test_a_line_of_json_holds_everything_and_stays_one_line() -> None:
    said = JsonLines("p1").format(record("two\nlines of %s", "ä", peer="p2"))
    assert "\n" not in said
    line = json.loads(said)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning", "node": "p1", "logger": "pdbus", "message": "two\nlines of ä", "peer": "p2",
    }  # fmt: skip


def test_what_repeats_is_counted_and_other_lines_are_not_lost() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    said = [repeats.filter(record("failed: %s", i)) for i in range(BURST + 7)]
    assert said == [True] * BURST + [False] * 7
    assert repeats.filter(record("something else"))
    now = WINDOW_S
    next_one = record("failed: %s", "x")
    assert repeats.filter(next_one)
    assert next_one.getMessage() == "failed: x [7 like it were left out]"
