"""Cells of the layout grid through real NIXL: four owners' movers, one reader's, and the plans' runs between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pdbus.connector.apply import Pairing, Runs, batches, direct_runs, permute, scratch_runs
from pdbus.connector.ipc import PeerAdded, ReadEnded, ReadRuns
from pdbus.connector.plan import TransferPlan
from pdbus.connector.runs import pack

from tests.kv_memory import POISON, Bytes
from tests.live.test_mover import LiveRig, open_rig
from tests.unit.test_layout_grid import can_be, outcomes, spread

pytestmark = pytest.mark.live

CELLS = 60
OWNERS = 4
SCRATCH_AT = 16 << 20  # in the reader's region, well behind any layout of the grid


class Carrier:
    """Carries plans out between mover processes: memory goes into their slabs before, and comes back after."""

    def __init__(self, rig: LiveRig) -> None:
        self.reader = rig.start()
        self.owners = [rig.start() for _ in range(OWNERS)]
        self.number = 0
        for owner in self.owners:
            owner.say(self.reader.as_peer())
            self.reader.say(owner.as_peer())
            assert self.reader.hear(PeerAdded).problem == ""

    def __call__(self, made: TransferPlan, pairing: Pairing, sources: list[Bytes], target: Bytes) -> int:
        memory, read = self.reader.memory, 0
        memory[: len(target)] = target.data
        memory[len(target) : len(target) + 4_096] = bytes([POISON]) * 4_096
        for rank in made.ranks:
            owner = self.owners[rank.rank]
            owner.memory[: len(sources[rank.rank])] = sources[rank.rank].data
            read += self._read(owner, direct_runs(rank, pairing), 0)
            for some in batches(pairing, 2) if rank.reads else ():
                read += self._read(owner, scratch_runs(rank, some), SCRATCH_AT)
                permute(made, rank, some, memory[SCRATCH_AT:], memory)
        target[:] = np.frombuffer(memory, np.uint8)[: len(target)]
        assert bytes(memory[len(target) : len(target) + 4_096]) == bytes([POISON]) * 4_096
        return read

    def _read(self, owner: Any, runs: Runs, target_at: int) -> int:
        if not len(runs.source):
            return 0
        self.number += 1
        self.reader.say(
            ReadRuns(
                read=self.number, peer=owner.agent_name, source=pack(runs.source),
                target=pack(runs.target + np.uint64(target_at)), length=pack(runs.length),
            )
        )  # fmt: skip
        ended = self.reader.hear(ReadEnded)
        assert (ended.read, ended.problem) == (self.number, "")
        return ended.bytes


@pytest.fixture(params=["default", "tcp"])
def carry(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    for rig in open_rig(request.param):
        assert isinstance(rig, LiveRig)
        yield Carrier(rig)


def test_cells_hand_over_the_code_through_nixl(carry: Carrier) -> None:
    cells = spread(CELLS)
    assert outcomes(cells, carry) == {cell: "refused" for cell in cells if not can_be(cell)}
