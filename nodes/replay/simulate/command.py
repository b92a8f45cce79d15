"""`pd-replay simulate`: what a workload, or what was recorded, would do on another cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from pdbus.bus.errors import ConfigError
from pdbus.bus.recording_part import SUFFIX

from ...tables import print_json
from ..importers import AUTO, import_workload
from ..load import Shape, reshaped
from ..workload import Workload
from .cluster import SimCluster
from .figures import figures, outcome
from .plan import Options, Plan, plan_of
from .profile import DEFAULT, Profile, load_profile
from .recorded import RecordedCluster
from .search import NODES_MAX, Search, Target, Tried
from .view import show, show_search

RECORDED_MAX = 256  # nodes: each has a file and a thread that writes it
EXIT_NOT_DONE = 1  # nothing completed, or no cluster meets the targets


class Wanted(NamedTuple):
    """A search: none without targets."""

    targets: tuple[Target, ...] = ()
    chunks: tuple[int, ...] = ()  # of prompts, to be tried
    decode_cost: float = 1.0


class Case(NamedTuple):
    """What is to be simulated, and what was recorded of it, if it was."""

    workload: Workload
    profile: Profile
    options: Options
    recorded: RecordedCluster | None
    was: Workload  # before it was reshaped

    def plan(self, options: Options | None = None) -> Plan:
        return plan_of(options or self.options, self.profile, self.workload)


class Report(NamedTuple):
    """Where the result goes; `record`: a folder for what every node heard and decided."""

    as_json: bool = False
    record: Path | None = None


def run_simulate(path: Path, shape: Shape, profile: str, options: Options, report: Report, format: str = AUTO) -> int:
    """Plays it and reports. 0, also when some requests failed; 1 when none completed. Raises ConfigError."""
    case = _case(path, shape, profile, options, format)
    plan = case.plan()
    if report.record is not None and plan.prefill + plan.decode > RECORDED_MAX:
        raise ConfigError(
            "--record", f"one file for each of {plan.prefill + plan.decode} nodes; at most {RECORDED_MAX}"
        )
    result = simulated(plan, case.workload, report.record)
    result |= {"shape": shape._asdict(), "notes": [*case.workload.notes, case.profile.source]}
    if case.recorded is not None:
        result |= _beside(case, plan)
    print_json(result) if report.as_json else show(result)
    return 0 if result["completed"] else EXIT_NOT_DONE


def _case(path: Path, shape: Shape, profile: str, options: Options, format: str) -> Case:
    was = import_workload(path, format)
    workload = reshaped(was, shape)
    for note in workload.notes:
        print(f"pd-replay: note: {note}", file=sys.stderr)
    recorded = _recorded(path, bool(profile))
    if recorded is None:
        return Case(workload, load_profile(profile or DEFAULT), options, None, was)
    known = load_profile(profile) if profile else recorded.profile(path.name or str(path.resolve().name))
    return Case(workload, known, recorded.filled(options), recorded, was)


def _recorded(path: Path, has_profile: bool) -> RecordedCluster | None:
    """None for what is no recording, and for the recording of a part of a cluster if it need not tell the times."""
    if not (path.name.endswith(SUFFIX) or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))):
        return None
    try:
        return RecordedCluster(path)
    except ConfigError as e:
        if not has_profile:
            raise
        print(f"pd-replay: note: {e}: nothing to compare with", file=sys.stderr)
        return None


def _beside(case: Case, plan: Plan) -> dict[str, Any]:
    """What was recorded; and what comes out for the settings and requests of then, when those of now are others."""
    assert case.recorded is not None
    asks = case.recorded.asks
    span_ns = max(ask.ended_ns for ask in asks) - min(ask.sent_ns for ask in asks)
    before = case._replace(workload=case.was, options=case.recorded.filled(Options()))
    then = before.plan()
    beside: dict[str, Any] = {"recorded": outcome(asks, len(asks), span_ns)}
    if (then, case.was.requests) != (plan, case.workload.requests):
        beside["as_it_was"] = simulated(then, case.was)
    return beside


def simulated(plan: Plan, workload: Workload, record: Path | None = None) -> dict[str, Any]:
    """The figures of one play, with a bar meanwhile if anyone sees it."""
    cluster = SimCluster(plan, record)
    began = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{plan.prefill} prefill, {plan.decode} decode", total=len(workload.requests))
        cluster.on_end = lambda: bar.advance(task)
        cluster.play(workload)
    return figures(cluster, workload, time.perf_counter() - began)


# ---------------------------------------------------------------- searching


def run_search(
    path: Path, shape: Shape, profile: str, options: Options, wanted: Wanted, *, as_json: bool, format: str = AUTO
) -> int:
    """The cheapest cluster that meets the targets, `options` naming the largest. 0: found. Raises ConfigError."""
    case = _case(path, shape, profile, options, format)
    most = (options.prefill or NODES_MAX, options.decode or NODES_MAX)
    chunks = wanted.chunks or (case.plan().prefill_chunk,)
    rows: list[dict[str, Any]] = []
    best: tuple[float, int, Tried] | None = None
    for chunk in chunks:
        search = Search(_player(case, chunk), wanted.targets, most, wanted.decode_cost)
        found = search.cheapest()
        rows += [_row(search, chunk, tried) for tried in search.tried.values()]
        if found is not None and (best is None or search.cost(found.prefill, found.decode) < best[0]):
            best = search.cost(found.prefill, found.decode), chunk, found
    result: dict[str, Any] = {**best[2].figures, "prefill_chunk": best[1], "cost": best[0]} if best else {}
    result |= {"targets": [str(target) for target in wanted.targets], "found": best is not None, "tried": rows}
    result |= {"shape": shape._asdict(), "notes": [*case.workload.notes, case.profile.source]}
    print_json(result) if as_json else show_search(result)
    return 0 if best else EXIT_NOT_DONE


def _player(case: Case, chunk: int) -> Any:
    options = case.options._replace(prefill_chunk=chunk)

    def play(prefill: int, decode: int) -> dict[str, Any]:
        return simulated(case.plan(options._replace(prefill=prefill, decode=decode)), case.workload)

    return play


def _row(search: Search, chunk: int, tried: Tried) -> dict[str, Any]:
    f = tried.figures
    return {
        "prefill": tried.prefill,
        "decode": tried.decode,
        "prefill_chunk": chunk,
        "cost": search.cost(tried.prefill, tried.decode),
        "meets": tried.meets,
        "completed": f["completed"],
        "ttft_p50_ms": f["ttft_ms"]["p50"],
        "ttft_p90_ms": f["ttft_ms"]["p90"],
        "ttft_p99_ms": f["ttft_ms"]["p99"],
        "itl_p50_ms": f["itl_ms"]["p50"],
        "itl_p99_ms": f["itl_ms"]["p99"],
    }


def chunks_of(text: str) -> tuple[int, ...]:
    """`512,2048` as numbers. Raises ConfigError (`--prefill-chunk`)."""
    parts: Sequence[str] = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 0 < int(part) < 1 << 24 for part in parts):
        raise ConfigError("--prefill-chunk", f"{text!r} will not do; give tokens, for a search several: 512,2048")
    return tuple(int(part) for part in parts)
