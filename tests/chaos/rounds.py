"""Faults on several clusters side by side; the recordings of each are verified once it has ended."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .arena import arena
from .outcome import Outcome, Report
from .plan import Fault
from tests.live.faults import TCP

ROUND = 26  # faults to a cluster, at most: each kind once
VERIFY = "from pdbus.nodes.cli import replay_main; replay_main()"

# Over TCP the owner's mover sends, as between two machines, so that reads can be held; else UCX reads by itself.
ENVIRONMENTS: Sequence[Mapping[str, str]] = (TCP, TCP, TCP, {})
LEASES_S = (2.0, 6.0)  # shorter than what takes a node to come back, so that they expire; longer, so that it is proof
Environment = Mapping[str, str]
OnOutcome = Callable[[Outcome], None]


async def run(
    faults: Sequence[Fault],
    report: Report,
    *,
    clusters: int = 1,
    keep: Path,
    environments: Sequence[Environment] = (TCP,),
    on_outcome: OnOutcome | None = None,
) -> None:
    """So many clusters at a time, each with the next of `environments`. Logs and recordings of one where something was
    not right are left in `keep`."""
    size = min(ROUND, -(-len(faults) // clusters))
    rounds = [faults[at : at + size] for at in range(0, len(faults), size)]
    waiting = iter(enumerate(rounds))

    async def one_after_the_other() -> None:
        for number, some in waiting:
            await _round(number, some, report, keep, environments[number % len(environments)], on_outcome)

    await asyncio.gather(*(one_after_the_other() for _ in range(min(clusters, len(rounds)))))


async def _round(
    number: int,
    faults: Sequence[Fault],
    report: Report,
    keep: Path,
    environment: Environment,
    on_outcome: OnOutcome | None,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="pd"))
    outcomes: list[Outcome] = []
    try:
        async with arena(folder, environment, lease_s=LEASES_S[number % len(LEASES_S)]) as stage:
            for fault in faults:
                outcomes.append(await stage.strike(fault))
                report.outcomes.append(outcomes[-1])
                if on_outcome is not None:
                    on_outcome(outcomes[-1])
        problem = await _verified(folder / "recording")
    except Exception as e:
        problem = f"{type(e).__name__}: {e}"
    if problem:
        report.unverified.append(f"cluster {number}: {problem}")
    else:
        report.verified += 1
    if problem or not all(outcome.good for outcome in outcomes):
        shutil.copytree(folder, keep / f"cluster-{number}", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    shutil.rmtree(folder, ignore_errors=True)


async def _verified(recording: Path) -> str:
    """'' when every decision comes out the same again and no invariant is broken; else what was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", VERIFY, "verify", str(recording),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return "" if process.returncode == 0 else out.decode(errors="replace")
