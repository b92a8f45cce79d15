"""How the connectors of a pair stand, run again from what they have recorded so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pdbus.connector.vllm.core import PairCore
from pdbus.nodes.replay.files import opened
from pdbus.nodes.replay.rerun import Rerun
from pdbus.nodes.replay.turns import RawTurn, began, turns_of

SETTLED_S = 90.0  # reads that stood still may end, leases expire


def core_of(folder: Path, name: str) -> PairCore:
    """Of that server's latest life. Raises Diverged when it decided otherwise than it does when run again."""
    lives = [r for r in opened([folder]).recordings if r.header.node == name]
    recording = max(lives, key=lambda r: r.header.wall_ns)
    rerun = Rerun(began(recording)[0])
    for raw in turns_of(recording):
        if isinstance(raw, RawTurn):
            rerun.turn(raw, cut=True)
    assert isinstance(rerun.core, PairCore)
    return rerun.core


def wait_clean(folder: Path, names: Sequence[str] = ("p1", "d1")) -> None:
    """Until every block of these servers' slabs is free, and no lease is held."""
    end = time.monotonic() + SETTLED_S
    while True:
        cores = [core_of(folder, name) for name in names]
        counts = [core.pool.counts() for core in cores]
        if all(c.free == c.total for c in counts) and not any(core.offers.held() for core in cores):
            return
        assert time.monotonic() < end, counts
        time.sleep(1)
