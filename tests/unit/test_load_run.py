"""A load's schedule and what it counts, against nodes that are fakes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import Broken, ConfigError, DeadlineExceeded, Overloaded, RequestError
from pdbus.nodes.replay import load
from pdbus.nodes.replay.importers.mooncake import write
from pdbus.nodes.replay.load import Report, Shape, misfits, reshaped
from pdbus.nodes.replay.load_figures import figures, spread
from pdbus.nodes.replay.load_request import TOO_LONG
from pdbus.nodes.replay.load_run import LoadRun
from pdbus.nodes.replay.workload import Asked, Workload

from tests.fake_target import FakeTarget
from tests.loop import on_loop, until

MS = 1_000_000


def run_of(*requests: Asked, targets: Any = None, block: int = 0) -> LoadRun:
    return LoadRun(Workload("w", requests, block), targets or [FakeTarget()], 0)


async def played(*requests: Asked, targets: Any = None, block: int = 0) -> LoadRun:
    run = run_of(*requests, targets=targets, block=block)
    await run.play()
    return run


@on_loop
async def test_every_request_is_sent_at_its_time_and_never_before() -> None:
    run = await played(*(Asked(i * 3 * MS, 10 + i, 2) for i in range(10)))
    assert [p.index for p in run.played] == list(range(10))
    assert all(p.sent_ns >= p.scheduled_ns == 3 * p.index * MS for p in run.played)
    assert all(0 < p.sent_ns <= p.first_ns <= p.ended_ns <= run.wall_ns for p in run.played)


@on_loop
async def test_nothing_waits_for_what_is_slow() -> None:
    target = FakeTarget()
    target.gate = asyncio.Event()
    run = run_of(*(Asked(i * MS, 10, 1) for i in range(50)), targets=[target])
    playing = asyncio.create_task(run.play())
    await until(lambda: len(target.asked) == 50)
    assert run.meter.in_flight == 50
    target.gate.set()
    await playing
    assert (run.meter.in_flight, run.meter.completed) == (0, 50)


@on_loop
async def test_a_session_waits_for_the_answer_before_and_thinks() -> None:
    """Its prompt holds that answer. How late that makes it is a result."""
    first, second = Asked(0, 10, 5, session=1), Asked(0, 20, 1, session=1, think_ns=5 * MS)
    run = await played(first, second, Asked(0, 30, 1))
    a, b, other = run.played
    assert b.sent_ns >= a.ended_ns + 5 * MS
    assert other.sent_ns < b.sent_ns


@on_loop
async def test_a_session_goes_on_after_a_failure() -> None:
    target = FakeTarget()
    target.problems = {10: Broken("x")}
    run = await played(Asked(0, 10, 5, session=1), Asked(0, 20, 1, session=1), targets=[target])
    assert [p.completed for p in run.played] == [False, True]


@on_loop
async def test_nodes_take_turns_and_a_session_stays() -> None:
    targets = [FakeTarget("a"), FakeTarget("b")]
    alone = [Asked(0, 10, 1)] * 4
    run = await played(*alone, *[Asked(0, 10, 1, session=3)] * 3, targets=targets)
    assert [p.target for p in run.played] == [0, 1, 0, 1, 1, 1, 1]
    assert [row["requests"] for row in figures(run)["nodes"]] == [2, 5]


@on_loop
async def test_failures_are_counted_by_cause() -> None:
    target = FakeTarget()
    target.problems = {
        11: Overloaded("full", retry_after_ms=1),
        12: DeadlineExceeded("late"),
        13: Broken("gone"),
        14: RequestError("no such model", code="model_not_found"),
        15: Broken("gone, too"),
    }
    run = await played(*(Asked(0, n, 3) for n in range(10, 16)), Asked(0, 999, 3), targets=[target])
    result = figures(run)
    assert (result["requests"], result["completed"], result["failed"]) == (7, 1, 6)
    assert result["failures"] == [
        {"cause": "broken", "count": 2, "example": "gone"},
        {"cause": "overloaded", "count": 1, "example": "full"},
        {"cause": "deadline", "count": 1, "example": "late"},
        {"cause": "model_not_found", "count": 1, "example": "no such model"},
        {"cause": TOO_LONG, "count": 1, "example": "999 + 3 tokens, at most 1000 fit (max_model_len)"},
    ]
    assert 999 not in [len(prompt) for prompt, _ in target.asked]  # known to be too long, and not sent


@on_loop
async def test_a_node_that_is_not_there() -> None:
    target = FakeTarget()
    target.unreachable = Broken("no node answered at tcp://d:1")
    result = figures(await played(*[Asked(0, 10, 1)] * 3, targets=[target]))
    assert (result["completed"], result["lateness_ms"]["count"]) == (0, 0)
    assert result["failures"] == [{"cause": "unreachable", "count": 3, "example": "no node answered at tcp://d:1"}]


@on_loop
async def test_what_is_in_flight_at_ctrl_c_counts_as_interrupted() -> None:
    target = FakeTarget()
    target.gate = asyncio.Event()
    run = run_of(Asked(0, 10, 1), Asked(3_600_000 * MS, 10, 1), targets=[target])
    playing = asyncio.create_task(run.play())
    await until(lambda: target.asked)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    result = figures(run)
    assert (result["completed"], result["failed"], result["not_played"]) == (0, 1, 1)
    assert result["failures"][0]["cause"] == "interrupted"


@on_loop
async def test_figures_of_tokens_and_hits() -> None:
    run = await played(Asked(0, 64, 3, (1, 2)), Asked(0, 64, 5, (1, 2)), Asked(0, 64, 1, (1, 3)), block=32)
    result = figures(run)
    assert (result["prompt_tokens"], result["answer_tokens"], result["cached_tokens"]) == (192, 9, 96)
    assert result["hit_rate"] == 0.5
    assert result["best_hit_rate"] == (48 + 32) / 192  # whole blocks of 16, never the last token
    assert result["remote"] == 3
    assert result["itl_ms"]["count"] == 2 + 4
    assert sum(run.meter.tokens_by_bin.values()) == 9
    for late, early in (("ttft_from_scheduled_ms", "ttft_ms"), ("latency_from_scheduled_ms", "latency_ms")):
        assert result[late]["mean"] >= result[early]["mean"] > 0


@on_loop
async def test_the_best_possible_is_that_of_each_nodes_own_cache() -> None:
    requests = [Asked(0, 64, 1, (1, 2))] * 4
    both = figures(await played(*requests, block=32, targets=[FakeTarget("a"), FakeTarget("b")]))
    one = figures(await played(*requests, block=32))
    assert (both["best_hit_rate"], one["best_hit_rate"]) == (2 * 48 / 256, 3 * 48 / 256)


def test_spread_takes_the_value_that_so_many_lie_at_or_below() -> None:
    assert spread(range(1, 101)) == {"count": 100, "mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert spread([3.0])["p99"] == 3
    assert spread([]) == {"count": 0, "mean": 0, "p50": 0, "p90": 0, "p99": 0, "max": 0}


# ---------------------------------------------------------------- before it begins


def test_a_shape_is_taken_in_order() -> None:
    """The first requests of the ticks that were spread, then faster, then smaller."""
    workload = Workload("w", [Asked(tick * 1000 * MS, 512, 8, (i,)) for tick in range(3) for i in range(4)], 512)
    made = reshaped(workload, Shape(dequantise=True, max_requests=6, speed=10, scale_tokens=0.125, seed=1))
    assert (len(made.requests), made.block_tokens) == (6, 64)
    assert len({a.at_ns for a in made.requests}) == 6 and made.requests[-1].at_ns < 200 * MS
    assert {(a.input_tokens, a.output_tokens) for a in made.requests} == {(64, 1)}
    assert reshaped(workload, Shape()) is workload


def test_what_is_too_long_is_told_with_what_would_fit() -> None:
    requests = [Asked(0, n, 100, tuple(range(-(-n // 512)))) for n in (800, 4000)]
    run = run_of(*requests, block=512)
    (said,) = misfits(run, 1.0)
    assert said.startswith("1 of 2 requests are too long for the nodes' 1000 tokens and will count as failed;")
    factor = float(said.split("--scale-tokens ")[1].split()[0])
    assert misfits(run_of(*reshaped(run.workload, Shape(scale_tokens=factor)).requests), factor) == []
    assert factor > 0.2


def test_when_nothing_fits_it_does_not_begin() -> None:
    with pytest.raises(ConfigError, match=r"--to: 1 of 1 requests are too long .*; --scale-tokens 0\.\d+ makes all"):
        misfits(run_of(Asked(0, 5000, 1)), 1.0)
    with pytest.raises(ConfigError, match="give nodes with a larger --max-model-len"):
        misfits(run_of(Asked(0, 600_000, 1, (1,)), block=512), 1.0)


# ---------------------------------------------------------------- how it ends


def status_of(target: FakeTarget, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a load of three requests."""

    async def open_fakes(addresses: Sequence[str], stack: AsyncExitStack, keys: object) -> list[Any]:
        return [target]

    monkeypatch.setattr(load, "open_targets", open_fakes)
    write(Workload("w", [Asked(0, n, 1) for n in (10, 11, 12)]), folder / "trace.jsonl")
    return load.run_load(folder / "trace.jsonl", ["tcp://d:1"], Shape(), Report(html=folder / "page.html"))


def test_one_completed_request_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    target.problems = {10: Broken("gone"), 12: Broken("gone")}
    assert status_of(target, tmp_path, monkeypatch) == 0


def test_when_nothing_completes_the_status_is_1_and_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = FakeTarget()
    target.unreachable = Broken("nobody is there")
    assert status_of(target, tmp_path, monkeypatch) == 1
    assert "0 completed, 3 failed" in capsys.readouterr().out
    assert "nobody is there" in (tmp_path / "page.html").read_text()


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal: where a script runs the tests in its background, Ctrl-C is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_reports_what_was_and_the_status_is_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(FakeTarget):
        def generate(self, prompt: Sequence[int], tokens: int) -> Any:
            if len(prompt) == 12:
                os.kill(os.getpid(), signal.SIGINT)
                self.gate = asyncio.Event()
            return super().generate(prompt, tokens)

    assert status_of(Interrupting(), tmp_path, monkeypatch) == 130
    said = capsys.readouterr().out
    assert "2 completed, 1 failed" in said and "interrupted" in said
