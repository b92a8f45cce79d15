"""python -m tests.chaos: faults by the hundred on real clusters, and one table of what came of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .outcome import Outcome, Report
from .plan import PAIRS, STEPS, faults
from .rounds import ENVIRONMENTS, run

WIDTH = 180  # of what is no terminal
EVERYWHERE = len(PAIRS) * len(STEPS)


def main(
    count: Annotated[int, typer.Option("--faults", min=1, help=f"{EVERYWHERE}: every kind at every step once.")] = 520,
    seed: Annotated[int, typer.Option(help="What is drawn.")] = 1,
    clusters: Annotated[int, typer.Option(min=1, help="Side by side.")] = 2,
    only: Annotated[int, typer.Option(min=-1, help="The number of one fault, to see it again.")] = -1,
    out: Annotated[Path, typer.Option(help="Folder for the table, and what was not right.")] = Path("build/chaos"),
) -> None:
    """Exit status 1 when a token was wrong, a request hung, a block leaked, a dead reader's blocks came
    back late, a return took more than 8 s to heal, or a recording does not verify."""
    console, report = Console(width=None if Console().is_terminal else WIDTH), Report(seed)
    drawn = faults(seed, max(count, only + 1))

    def tell(outcome: Outcome) -> None:
        fault = outcome.fault
        verdict = "ok" if outcome.good else outcome.told
        started = f" back after {outcome.started_s:.1f} s," if outcome.started_s is not None else ""
        healed = f"{started} healed in {outcome.healed_s:.1f} s" if outcome.healed_s is not None else ""
        where = fault.step if outcome.reached else f"{fault.step} (not reached)"
        print(f"{fault.number:4} {fault.kind} of {outcome.victim} at {where}:{healed} {verdict}", flush=True)

    chosen = drawn if only < 0 else [drawn[only]]
    try:
        work = run(chosen, report, clusters=clusters, keep=out, environments=ENVIRONMENTS, on_outcome=tell)
        asyncio.run(work)
    finally:
        report.outcomes.sort(key=lambda outcome: outcome.fault.number)
        report.print(console)
        report.save(out)
    raise typer.Exit(0 if report.good else 1)


if __name__ == "__main__":
    typer.run(main)
