"""`pd-replay load`: a workload against live nodes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from pdbus.bus.errors import ConfigError
from pdbus.bus.keyring import Keyring

from ..tables import print_json
from .importers import AUTO, import_workload
from .load_figures import figures
from .load_html import page
from .load_run import LoadRun
from .load_target import TO, open_targets
from .load_view import live_view, show
from .reshape import dequantised, faster, first, scaled
from .workload import Workload

EXIT_NOTHING_COMPLETED = 1
EXIT_INTERRUPTED = 130


class Shape(NamedTuple):
    """How a workload is changed before it is played, in this order."""

    dequantise: bool = False
    max_requests: int = 0  # 0: all
    speed: float = 1.0
    scale_tokens: float = 1.0
    seed: int = 0  # of ticks that are spread, and of prompts


class Report(NamedTuple):
    """Where the result goes."""

    as_json: bool = False
    html: Path | None = None


def reshaped(workload: Workload, shape: Shape) -> Workload:
    if shape.dequantise:
        workload = dequantised(workload, shape.seed)
    if shape.max_requests:
        workload = first(workload, shape.max_requests)
    if shape.speed != 1:
        workload = faster(workload, shape.speed)
    return scaled(workload, shape.scale_tokens) if shape.scale_tokens != 1 else workload


def run_load(
    path: Path, addresses: Sequence[str], shape: Shape, report: Report, format: str = AUTO, keys: Keyring | None = None
) -> int:
    """Plays it and reports. 0, also when some requests failed; 1 when none completed; 130 after Ctrl-C, with a report
    of what was. Raises ConfigError for what cannot be played, Broken and DeadlineExceeded when a node is not there."""
    workload = reshaped(import_workload(path, format), shape)
    if report.html is not None:
        _write(report.html, "", "a")  # an hour later would be late to learn that it cannot be written
    run, interrupted = uvloop.run(_play(workload, addresses, shape, keys))
    result = {**figures(run), "shape": shape._asdict(), "notes": list(workload.notes)}
    if report.html is not None:
        _write(report.html, page(run, result))
    print_json(result) if report.as_json else show(result)
    return EXIT_INTERRUPTED if interrupted else 0 if result["completed"] else EXIT_NOTHING_COMPLETED


async def _play(
    workload: Workload, addresses: Sequence[str], shape: Shape, keys: Keyring | None
) -> tuple[LoadRun, bool]:
    """The run, and whether Ctrl-C ended it."""
    async with AsyncExitStack() as stack:
        targets = await open_targets(addresses, stack, keys)
        run = LoadRun(workload, targets, shape.seed)
        for note in (*workload.notes, *misfits(run, shape.scale_tokens)):
            print(f"pd-replay: note: {note}", file=sys.stderr)
        try:
            async with live_view(run):
                await run.play()
        except asyncio.CancelledError:
            return run, True
    return run, False


def misfits(run: LoadRun, scale: float) -> list[str]:
    """What is to be said of requests that are too long for the nodes, having been scaled by `scale`. Raises ConfigError
    when all are."""
    requests = run.workload.requests
    fitting = sum(run.fits(index) for index in range(len(requests)))
    if fitting == len(requests):
        return []
    limit = min(target.max_model_len for target in run.targets)
    longest = max(asked.input_tokens + asked.output_tokens for asked in requests)
    factor = scale * _fitting_factor(limit, longest, run.workload.block_tokens)
    advice = f"--scale-tokens {factor:.4g} makes all fit" if factor else "give nodes with a larger --max-model-len"
    problem = f"{len(requests) - fitting} of {len(requests)} requests are too long for the nodes' {limit} tokens"
    if not fitting:
        raise ConfigError(TO, f"{problem}; {advice}")
    return [f"{problem} and will count as failed; {advice}"]


def _fitting_factor(limit: int, longest: int, block_tokens: int) -> float:
    """0 when there is none. Two tokens are left for rounding."""
    factor = 0.999 * max(0, limit - 2) / longest  # shown with four digits
    return math.floor(factor * block_tokens) / block_tokens if block_tokens else factor


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise ConfigError("--html", f"{path} cannot be written: {e.strerror}") from None


def run_export(path: Path, to: Path, format: str = AUTO) -> int:
    """Writes the Mooncake form of a workload or recording."""
    from .importers.mooncake import write

    workload = import_workload(path, format)
    for note in workload.notes:
        print(f"pd-replay: note: {note}", file=sys.stderr)
    write(workload, to)
    print(f"{to}: {len(workload.requests)} requests", file=sys.stderr)
    return 0
