"""Faults at named steps of a hand-off, on real processes: `make chaos` in small. What is counted: outcome.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from .outcome import Report
from .plan import faults
from .rounds import ENVIRONMENTS, run

pytestmark = pytest.mark.live


@pytest.mark.timeout(240)
def test_a_spread_of_faults(tmp_path: Path) -> None:
    """No wrong token, no request that hangs, no block that leaks, and every decision comes out the same again."""
    strike(20, 1, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_faults(tmp_path: Path) -> None:
    strike(100, 2, tmp_path)


def strike(count: int, seed: int, folder: Path) -> None:
    report = Report(seed)
    asyncio.run(run(faults(seed, count), report, clusters=2, keep=folder, environments=ENVIRONMENTS))
    report.print(Console(width=180))
    assert report.good, "\n".join(report.problems)
    assert len(report.outcomes) == count
    reached = [outcome for outcome in report.outcomes if outcome.reached]
    assert len(reached) > count // 2
