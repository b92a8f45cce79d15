"""From a recording to a simulation: its times, its settings, what came of it; and back: what is simulated verifies."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.load import Shape
from pdbus.nodes.replay.simulate.cluster import SimCluster
from pdbus.nodes.replay.simulate.command import Report, run_simulate
from pdbus.nodes.replay.simulate.figures import figures, outcome
from pdbus.nodes.replay.simulate.fit import Read, Step, lines_of, link_of
from pdbus.nodes.replay.simulate.plan import Options, plan_of
from pdbus.nodes.replay.simulate.recorded import RecordedCluster
from pdbus.nodes.replay.verify import verify
from pdbus.nodes.replay.workload import Asked, Workload

from tests.simulated import MS, PROFILE, plan, workload

TIMES = ("ttft_ms", "itl_ms", "latency_ms")


def varied() -> Workload:
    random = Random(1)
    requests = [
        Asked(i * 120 * MS, random.choice((100, 400, 900, 1700)), random.randint(5, 80), (i % 7, 100 + i))
        for i in range(60)
    ]
    return workload(*requests, block_tokens=1000)


def recorded(folder: Path, wanted: Workload, **options: object) -> SimCluster:
    cluster = SimCluster(plan(wanted, **options), folder)
    cluster.play(wanted)
    return cluster


FAULTS = ["kill:p0@1s+2s", "worker:p1@1s", "freeze:d0@1s+9s", "drop:*@0s=0.1", "duplicate:*@0s=0.5", "mover:d0@1s"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_simulated_verifies(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The machines decide the same again, and every invariant holds: a simulated mover, worker and bus do nothing that
    real ones could not."""
    recorded(tmp_path, varied(), prefill=2, decode=2, faults=(fault,))
    assert verify([tmp_path]) == 0
    assert "no divergence, no violation" in capsys.readouterr().out


def test_times_are_found_again_in_a_recording(tmp_path: Path) -> None:
    recorded(tmp_path, varied(), prefill=2, decode=2)
    found = RecordedCluster(tmp_path).profile("again")
    for name in ("prefill", "decode"):
        for size, ms, slope in getattr(found, name):
            (s0, a0, c0), (s1, a1, c1) = getattr(PROFILE, name)
            part = (size - s0) / (s1 - s0)
            assert ms == pytest.approx(a0 + part * (a1 - a0), rel=0.05)
            assert slope == pytest.approx(c0 + part * (c1 - c0), abs=0.4)
    assert found.link_gb_per_s == pytest.approx(1.0, rel=0.05) and found.read_ms == pytest.approx(1.0, abs=0.1)
    assert found.message_ms == pytest.approx(0.5, abs=0.01)
    assert (found.prefill_chunk, found.max_batch_tokens, found.max_running) == (400, 400, 64)
    assert (found.kv_bytes_per_token, found.prefill_kv_tokens) == (1000, 100_000)


def test_a_recording_simulated_as_it_was_comes_to_what_was_recorded(tmp_path: Path) -> None:
    first = recorded(tmp_path, varied(), prefill=2, decode=3)
    cluster = RecordedCluster(tmp_path)
    was = outcome(cluster.asks, 60, 1)
    assert was["completed"] == 60
    options = cluster.filled(Options())
    assert (options.prefill, options.decode) == (2, 3)
    assert [f"d{n}" for n in options.sent_to] == [ask.node for ask in first.asks]
    again = import_workload(tmp_path)
    second = SimCluster(plan_of(options, cluster.profile("again"), again))
    second.play(again)
    now = figures(second, again, 0.0)
    assert now["hit_rate"] == was["hit_rate"] and now["remote"] == was["remote"]
    for name in TIMES:
        assert now[name]["p50"] == pytest.approx(was[name]["p50"], rel=0.05)


def test_other_settings_stand_beside_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, varied(), prefill=2, decode=2)
    assert run_simulate(tmp_path, Shape(), "", Options(), Report()) == 0
    same = capsys.readouterr().out
    assert "recorded" in same and "as it was" not in same
    assert run_simulate(tmp_path, Shape(speed=2), "", Options(prefill=1), Report()) == 0
    other = capsys.readouterr().out
    assert "simulated as it was" in other and "1 prefill and 2 decode nodes" in other


def test_the_recording_of_one_side_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, varied(), prefill=1, decode=1)
    next(tmp_path.glob("p0-*")).unlink()
    with pytest.raises(ConfigError, match="holds no prefill node: give the folder of all nodes"):
        run_simulate(tmp_path, Shape(), "", Options(), Report())
    assert run_simulate(tmp_path, Shape(), "estimate-8b-80gb", Options(), Report()) == 0
    assert "nothing to compare with" in capsys.readouterr().err


def test_one_file_for_each_of_too_many_nodes_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, varied(), prefill=1, decode=1)
    with pytest.raises(ConfigError, match="--record"):
        run_simulate(tmp_path, Shape(), "", Options(prefill=999), Report(record=tmp_path / "new"))


# ---------------------------------------------------------------- lines


def test_lines_are_found_among_outliers() -> None:
    """A busy machine lengthens some steps manyfold; none is ever shorter."""
    random = Random(2)
    steps = [
        Step(size, context, int((5 + 0.1 * size + size * context / 1e5) * MS * (1 if random.random() < 0.8 else 4)))
        for size in (16, 256)
        for context in range(0, 2000, 25)
    ]
    (_, small, small_slope), (_, large, large_slope) = lines_of(steps)
    assert small == pytest.approx(6.6, rel=0.05) and large == pytest.approx(30.6, rel=0.05)
    assert large_slope == pytest.approx(2.56, rel=0.1) and small_slope == pytest.approx(0.16, abs=0.1)


def test_what_contexts_cost_is_taken_from_sizes_that_tell_it() -> None:
    steps = [Step(10, c, int((5 + 0.1 * c) * MS)) for c in range(0, 1000, 10)] + [Step(50, 0.0, 9 * MS)] * 9
    assert lines_of(steps)[1] == pytest.approx((50, 9, 500), rel=0.01)


def test_thin_sizes_count_only_where_there_is_no_other() -> None:
    few = [Step(10, 0.0, MS), Step(100, 0.0, 9 * MS)]
    assert [line[0] for line in lines_of(few)] == [10, 100]
    assert [line[0] for line in lines_of([*few, *[Step(10, 0.0, MS)] * 9])] == [10]
    assert lines_of([]) == ()


def test_a_link_is_told_by_reads_of_unlike_sizes_else_by_the_mover() -> None:
    reads = [Read(size, 2 * MS + size) for size in (1000, 4000, 16_000_000)]
    assert link_of(reads, []) == pytest.approx((1.0, 2.0), rel=0.01)
    same = [Read(1000, 2_000_500)] * 5
    assert link_of(same, [Read(1000, 500)] * 5) == pytest.approx((2.0, 2.0), rel=0.01)
    assert link_of([], []) == (0.0, 0.0)
