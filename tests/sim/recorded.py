"""Simulated clusters that are recorded, and may go wrong: whoever looks on knows everything, and says nothing here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdbus.nodes import events as ev
from pdbus.nodes.core import NodeCore
from pdbus.nodes.recording import NodeRecorder
from pdbus.nodes.replay.explore.search import Violation

from . import cluster_sim
from .cluster_node import SimNode
from .cluster_sim import Plan
from .cluster_world import World


class Unjudged(World):
    """What is impossible does not end the run."""

    def step(self) -> None:
        try:
            super().step()
        except (Violation, KeyError, IndexError, AssertionError):
            self.counters["impossible"] += 1


class Hears:
    """The core's own `handle`, beside the one that records."""

    def __init__(self, core: NodeCore) -> None:
        self.handle = core.handle


def record(seed: int, folder: Path, patch: pytest.MonkeyPatch, plan: Plan | None = None) -> None:
    """Play one seed, every node recorded into `folder`."""
    recorders: list[NodeRecorder] = []

    class Recorded(SimNode):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            recorder = NodeRecorder(folder, self._core_config(), self._membership_config())
            hears = Hears(self.core)
            self.core.handle = lambda event, now: recorder.turn(hears, event, now)  # type: ignore
            recorders.append(recorder)

        def _turn(self, event: ev.NodeEvent) -> None:
            try:
                super()._turn(event)
            except Violation as e:
                if isinstance(e.__cause__, Exception) and not self.over:
                    self.cluster._crash(self)  # as control does when its core raises
                raise

    with patch.context() as p:
        p.setattr(cluster_sim, "SimNode", Recorded)
        p.setattr(cluster_sim, "World", Unjudged)
        cluster = cluster_sim.Cluster(seed, plan or cluster_sim.plan_of(seed))
        try:
            cluster.play()
        except Violation:
            pass
        finally:
            for recorder in recorders:
                recorder.close()
