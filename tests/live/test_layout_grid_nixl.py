"""Cells of the layout grid through real NIXL: four owners' mover processes, and a reader's mover in this one. Staged,
NIXL sees but mirrors of the memory that the KV comes from and goes to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdbus.connector.ipc import Advertise, PeerAdd, PeerAdded, PeerRemove, ReadEnded
from pdbus.connector.mover import Mover
from pdbus.connector.nixl_agent import NixlAgent
from pdbus.connector.slab import Slab
from pdbus.nodes.copier import runs_of
from pdbus.nodes.engines.device import GARBAGE, FakeDevice
from pdbus.nodes.kv_view import Bytes, view_of

from tests.live.test_mover import SLAB_BYTES, LiveRig, open_rig
from tests.unit.test_layout_grid import SCRATCH, HandOff, agent_of, can_be, layouts, outcomes, spread

pytestmark = pytest.mark.live

CELLS = 60
OWNERS = 4


class Carrier:
    """Carries hand-offs out: memory goes into slabs before, and comes back after. One NIXL agent reads for all, with
    a mover for each hand-off."""

    def __init__(self, rig: LiveRig) -> None:
        self.owners = [rig.start() for _ in range(OWNERS)]
        for owner in self.owners:
            owner.say(Advertise(leases=1))  # so that they are awake, though they know no peer
        self.slab = Slab.create(SLAB_BYTES)
        self.agent = NixlAgent(f"grid-{os.getpid()}-{id(self)}", self.slab.address, SLAB_BYTES)
        self.device = FakeDevice(late_s=0.0005)
        self.number = 0

    def plain(self, it: HandOff) -> ReadEnded:
        memory = self.slab.memory[: len(it.region)]
        memory[:] = it.region
        for owner, there in zip(self.owners, it.memory, strict=False):
            owner.memory[: len(there)] = there.data
        ended = self.read(it, memory)
        it.region[:] = memory
        return ended

    def staged(self, it: HandOff) -> ReadEnded:
        """What is not copied down is garbage there, and what is not copied up stays poison here."""
        mirror = self.slab.memory[: len(it.region)]
        mirror[:] = bytes([GARBAGE]) * len(mirror)
        for owner, there, layout in zip(self.owners, it.memory, layouts(it.geometry), strict=False):
            owner.memory[: len(there)] = bytes([GARBAGE]) * len(there)
            self.copy(view_of(there, layout), view_of(owner.memory, layout), it.source)
        ended = self.read(it, mirror)
        brought = it.table[it.begin // it.target.block_size :] if it.begin < it.end else ()
        self.copy(view_of(mirror, it.target), view_of(it.region, it.target), brought)
        return ended

    def copy(self, source: Bytes, target: Bytes, blocks: tuple[int, ...]) -> None:
        for begin, end in runs_of(blocks):
            self.device.copy(source[begin:end], target[begin:end])
        self.device.fence()

    def read(self, it: HandOff, memory: memoryview) -> ReadEnded:
        mover = Mover(self.agent, memory, it.target, it.reader)
        agents = tuple(self.agent_of(rank, len(there)) for rank, there in enumerate(it.memory))
        mover.handle(PeerAdd(peer="owner", geometry=it.geometry, agents=agents))
        assert self.hear(mover, PeerAdded).problem == ""
        self.number += 1
        mover.handle(it.message(self.number))
        ended = self.hear(mover, ReadEnded)
        mover.handle(PeerRemove(peer="owner"))
        mover.turn()
        return ended

    def agent_of(self, rank: int, size: int) -> object:
        ready = self.owners[rank].mover.ready
        return agent_of(ready.agent_name, ready.metadata, rank, size, ready.base_address)

    def hear(self, mover: Mover, kind: type) -> object:
        while True:
            for said in mover.turn():
                if isinstance(said, kind):
                    return said


@pytest.fixture(scope="module", params=["default", "tcp"])
def carry(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    for rig in open_rig(request.param):
        assert isinstance(rig, LiveRig)
        carrier = Carrier(rig)
        yield carrier
        carrier.agent.close()
        carrier.slab.close()


@pytest.mark.parametrize("staging", ["plain", "staged"])
@pytest.mark.parametrize("scratch", [0, SCRATCH])
def test_cells_hand_over_the_code_through_nixl(carry: Carrier, scratch: int, staging: str) -> None:
    cells, through = spread(CELLS), {"plain": carry.plain, "staged": carry.staged}[staging]
    assert outcomes(cells, through, (scratch,)) == {cell: "refused" for cell in cells if not can_be(cell)}
