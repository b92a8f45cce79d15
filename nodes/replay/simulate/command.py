"""`pd-replay simulate`: what a workload would do on another cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ...tables import print_json
from ..importers import AUTO, import_workload
from ..load import Shape, reshaped
from ..workload import Workload
from .cluster import SimCluster
from .figures import figures
from .plan import Options, Plan, plan_of
from .profile import load_profile
from .view import show

EXIT_NOTHING_COMPLETED = 1


def run_simulate(path: Path, shape: Shape, profile: str, options: Options, *, as_json: bool, format: str = AUTO) -> int:
    """Plays it and reports. 0, also when some requests failed; 1 when none completed. Raises ConfigError."""
    chosen = load_profile(profile)
    workload = reshaped(import_workload(path, format), shape)
    plan = plan_of(options, chosen, workload)
    for note in workload.notes:
        print(f"pd-replay: note: {note}", file=sys.stderr)
    result = {**simulated(plan, workload), "shape": shape._asdict(), "notes": [*workload.notes, chosen.source]}
    print_json(result) if as_json else show(result)
    return 0 if result["completed"] else EXIT_NOTHING_COMPLETED


def simulated(plan: Plan, workload: Workload) -> dict[str, Any]:
    """The figures of one play, with a bar meanwhile if anyone sees it."""
    cluster = SimCluster(plan)
    began = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(workload.requests))
        cluster.on_end = lambda: bar.advance(task)
        cluster.play(workload)
    return figures(cluster, workload, time.perf_counter() - began)
