"""The wall clock jumps: someone sets it, or a daemon does. So it only ever says when something was, to people; whatever
waits, expires or is measured goes by the monotonic clock."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {
    ("time", "time"), ("time", "time_ns"), ("time", "ctime"), ("time", "localtime"), ("time", "gmtime"),
    ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
    ("time", "clock_gettime"), ("time", "clock_gettime_ns"),
}  # fmt: skip
ALLOWED = {
    "bus/recording_part.py": 1,  # when a part of a recording began, and
    "bus/recorder.py": 1,  # when a recording did: lays recordings of several machines side by side
    "nodes/chat_template.py": 1,  # templates may print today's date
    "nodes/http/app.py": 1,  # `created` of the OpenAI API
    "nodes/http/stream.py": 1,
    "nodes/logs.py": 1,  # of a time that stands in a line
    "nodes/tracing.py": 1,  # spans of several machines lie side by side
}


def reads_of_the_wall_clock(source: str) -> int:
    """`from time import time` would hide one: no module does that."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    attributes = (f for f in calls if isinstance(f, ast.Attribute))
    return sum((f.value.id if isinstance(f.value, ast.Name) else "", f.attr) in WALL for f in attributes)


def names_of_the_wall_clock(source: str) -> list[str]:
    imports = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module == "time"
    )
    return [alias.name for node in imports for alias in node.names if ("time", alias.name) in WALL]


def test_only_what_tells_people_the_time_reads_the_wall_clock() -> None:
    found: dict[str, int] = {}
    for folder in ("bus", "connector", "nodes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            assert not names_of_the_wall_clock(source), path
            if count := reads_of_the_wall_clock(source):
                found[path.relative_to(ROOT).as_posix()] = count
    assert found == ALLOWED


def test_a_read_would_be_seen() -> None:
    assert reads_of_the_wall_clock("import time\nx = time.time() + time.monotonic()") == 1
    assert names_of_the_wall_clock("from time import monotonic, time_ns") == ["time_ns"]
