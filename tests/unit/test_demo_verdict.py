"""What `pd demo` decides from two runs. That it cannot say ok wrongly is the point of the demo."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pdbus.nodes.chat_stream import Answered
from pdbus.nodes.demo import Run, timeline_line, verdict


def timeline(**changes: Any) -> dict[str, Any]:
    phases = {f"{phase}_ms": 1.5 for phase in ("queue", "prefill", "read", "confirm", "handover", "ttft", "itl")}
    return {**phases, "remote": True, "prefill_node": "p", "read_bytes": 3 << 20, "mover_ms": 2.0, **changes}


def answered(tokens: list[int], **changes: Any) -> Answered:
    return Answered(text="x", tokens=tokens, finish_reason="stop", timeline=timeline(**changes))


def judge(two: Run, one: Run, verified: bool = True) -> tuple[int, str]:
    out = io.StringIO()
    return verdict(two, one, verified, Console(file=out, width=200)), out.getvalue()


SURVIVED = answered([7, 8], remote=False, attempts=1)
GOOD = Run([answered([1, 2]), answered([3]), SURVIVED], [])


def test_equal_tokens_and_clean_ledgers_are_well() -> None:
    code, said = judge(GOOD, GOOD)
    assert code == 0
    assert "all 5 tokens of 3 answers are equal" in said
    assert "2 of 2 prompts were prefilled on the prefill node, 6 MiB read" in said


@pytest.mark.parametrize(
    ("two", "one", "complaint"),
    [
        (Run([answered([1, 9]), answered([3]), SURVIVED], []), GOOD, "answers 1 differ"),
        (Run([answered([]), SURVIVED], []), Run([answered([]), SURVIVED], []), "answers 1 differ"),
        (Run([*GOOD.answers[:2], answered([7], attempts=1)], []), GOOD, "answers 3 differ"),
        (Run(GOOD.answers, ["decode-1"]), GOOD, "left over on decode-1"),
        (GOOD, Run(GOOD.answers, ["both-1"]), "left over on both-1"),
        (Run([answered([1], remote=False), SURVIVED], []), Run([answered([1]), SURVIVED], []), "0 of 1 prompts were"),
        (
            Run([answered([1]), answered([2], remote=True, attempts=1)], []),
            GOOD._replace(answers=[answered([1]), answered([2])]),
            "FAILED  the prefill node died",
        ),
        (
            Run([answered([1]), answered([2], remote=False, attempts=0)], []),
            GOOD._replace(answers=[answered([1]), answered([2])]),
            "FAILED  the prefill node died",
        ),
    ],
)
def test_anything_else_fails_and_is_named(two: Run, one: Run, complaint: str) -> None:
    code, said = judge(two, one)
    assert code == 1
    assert complaint in said


def test_a_recording_that_does_not_verify_fails() -> None:
    code, said = judge(GOOD, GOOD, verified=False)
    assert code == 1 and "FAILED  the recording verifies" in said


def test_the_timeline_is_one_line() -> None:
    line = timeline_line(timeline()).plain
    assert line == (
        "  queue 1.5  prefill 1.5  read 1.5  confirm 1.5  handover 1.5  TTFT 1.5  ITL 1.5 ms  3 MiB at 1.57 GB/s from p"
    )
    assert "prefilled on the decode node itself" in timeline_line(timeline(remote=False)).plain
