"""A load played against fakes, for what is made of it."""

from __future__ import annotations

import asyncio
from typing import Any

from pdbus.bus.errors import Broken, Overloaded
from pdbus.nodes.replay.load import Shape
from pdbus.nodes.replay.load_figures import figures
from pdbus.nodes.replay.load_run import LoadRun
from pdbus.nodes.replay.workload import Asked, Workload

from tests.fake_target import FakeTarget

MS = 1_000_000


def load_made(name: str = "a <b> trace.jsonl", *, failing: bool = True) -> tuple[LoadRun, dict[str, Any]]:
    """A hundred requests to two nodes, some of which fail, and the figures."""
    targets: list[Any] = [FakeTarget("d1"), FakeTarget("d2")]
    if failing:
        targets[1].problems = {21: Broken("<gone>"), 31: Overloaded("full", retry_after_ms=1)}
    requests = [Asked(i * MS, 10 + i % 30, 1 + i % 5, (i % 7,)) for i in range(100)]
    run = LoadRun(Workload(name, requests, 64), targets, 0)
    asyncio.run(run.play())
    return run, {**figures(run), "shape": Shape()._asdict(), "notes": ["something to know"]}
