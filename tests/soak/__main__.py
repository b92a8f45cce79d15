"""python -m tests.soak: mixed load with cancels and restarts for as long as asked, and what has grown meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .shift import Shift
from .summary import WIDTH, Summary
from tests.chaos.arena import arena

RECORD_MAX = "64MiB"  # of each node: a night's would fill the disk


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 5.0,
    every_s: Annotated[float, typer.Option("--every", min=3, help="Seconds between restarts, under load.")] = 12.0,
    seed: Annotated[int, typer.Option(help="What is drawn.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the table, and for logs if it was not good.")] = Path(
        "build/soak"
    ),
) -> None:
    """Exit status 1 when a token was wrong, a request hung or failed without need, or blocks, descriptors or threads
    leaked."""
    summary = Summary(seed)
    try:
        asyncio.run(run(summary, minutes * 60, every_s, out))
    finally:
        summary.print(Console(width=None if Console().is_terminal else WIDTH))
        summary.save(out)
    raise typer.Exit(0 if summary.good else 1)


async def run(summary: Summary, seconds: float, every_s: float, out: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="pd"))
    until_s = time.monotonic() + seconds
    try:
        async with arena(folder, options={"record_max": RECORD_MAX}) as stage:
            shift = Shift(stage, every_s)
            summary.samples = shift.samples
            while time.monotonic() < until_s:
                outcome = await shift.turn(summary.seed, len(summary.outcomes))
                summary.outcomes.append(outcome)
                _tell(summary)
    finally:
        if not summary.good:
            shutil.copytree(folder, out / "cluster", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
        shutil.rmtree(folder, ignore_errors=True)


def _tell(summary: Summary) -> None:
    outcome, sample = summary.outcomes[-1], summary.samples[-1] if summary.samples else None
    healed = f"healed in {outcome.healed_s:.1f} s" if outcome.healed_s is not None else "not healed"
    latency = f", {sample.latency_ms:.1f} ms a request" if sample else ""
    problems = "".join(f"; {problem}" for problem in outcome.problems)
    print(f"{outcome.fault.number:4} {outcome.fault.kind} of {outcome.victim}: {healed}{latency}{problems}", flush=True)


if __name__ == "__main__":
    typer.run(main)
