"""Reads that go through scratch: bounded for each peer, permuted when whole, given back when terminal."""

from __future__ import annotations

import numpy as np

from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import FromMover, PeerAdd, PeerAdded, PeerRemove, Read, ReadEnded
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.loopback import Fabric, LoopbackAgent
from pdbus.connector.mover import Mover
from pdbus.connector.reading import DETOURS, PEER_DETOURS
from pdbus.nodes.engines.coded import coded_cells

from tests.kv_memory import POISON, Bytes, read_cells, write_cells

SIZE, BLOCKS = 16, 12
MODEL = geometry_for(2, 2, 8, SIZE, "float32")
THERE, HERE = replace(MODEL, layout="NHD"), replace(MODEL, layout="HND")
TOKENS = list(range(BLOCKS * SIZE))
BLOCK_BYTES = MODEL.block_bytes  # what one block takes in scratch
SCRATCH = DETOURS * BLOCK_BYTES  # one block a detour


class World:
    """Owners whose KV is NHD, and a reader's mover whose KV is HND: every run is too short to post."""

    def __init__(self, owners: int = 1) -> None:
        self.fabric = Fabric()
        self.layout = layout_of(HERE, BLOCKS)
        self.region: Bytes = np.full(self.layout.region_bytes + SCRATCH, POISON, np.uint8)
        agent = LoopbackAgent(self.fabric, "reader", self.region.data)
        self.mover = Mover(agent, self.region.data, self.layout, clock_ns=lambda: 0)
        for owner in range(owners):
            self._meet(f"owner-{owner}")
        self.fabric.held = True

    def _meet(self, name: str) -> None:
        layout = layout_of(THERE, BLOCKS)
        memory = np.zeros(layout.region_bytes, np.uint8)
        write_cells(memory, layout, range(BLOCKS), coded_cells(MODEL, TOKENS))
        metadata = LoopbackAgent(self.fabric, name, memory.data).metadata
        agent = Agent(
            epoch=1, name=name, metadata=metadata, metadata_digest=prompt_digest(metadata),
            region_bytes=layout.region_bytes, blocks=BLOCKS,
        )  # fmt: skip
        self.mover.handle(PeerAdd(peer=name, geometry=THERE, agents=(agent,)))
        assert self.mover.turn() == [PeerAdded(peer=name)]

    def read(self, number: int, owner: int, blocks: range) -> None:
        ids = pack_u32(blocks)
        begin, end = blocks[0] * SIZE, (blocks[-1] + 1) * SIZE
        self.mover.handle(Read(read=number, peer=f"owner-{owner}", begin=begin, end=end, source=ids, target=ids))

    def in_flight(self, owner: int) -> int:
        """Blocks of it that are on their way."""
        return sum(read.owner.name == f"owner-{owner}" for read in self.fabric.in_flight)

    def until_ended(self, count: int = 1) -> list[FromMover]:
        said: list[FromMover] = []
        while len(said) < count:
            self.fabric.land()
            said += self.mover.turn()
        return said

    def right(self, blocks: range) -> bool:
        wanted = coded_cells(MODEL, TOKENS)[blocks[0] * SIZE : (blocks[-1] + 1) * SIZE]
        return bool(np.array_equal(read_cells(self.region, self.layout, blocks, len(wanted)), wanted))

    def scratch_is_whole(self) -> bool:
        scratch = self.mover._scratch
        at = scratch.take(SCRATCH)
        if at is not None:
            scratch.give_back(at, SCRATCH)
        return at is not None


def test_what_is_read_is_permuted_and_scratch_given_back() -> None:
    world = World()
    world.read(1, 0, range(BLOCKS))
    (ended,) = world.until_ended()
    assert isinstance(ended, ReadEnded) and ended.problem == ""
    assert world.right(range(BLOCKS)) and world.scratch_is_whole()


def test_nothing_is_written_into_blocks_before_a_detour_is_whole() -> None:
    world = World()
    world.read(1, 0, range(4))
    world.mover.turn()
    assert (world.region[: world.layout.region_bytes] == POISON).all() and not world.scratch_is_whole()


def test_a_peer_that_answers_no_more_leaves_scratch_to_the_others() -> None:
    world = World(owners=3)
    for owner in range(2):
        world.read(owner, owner, range(6 * owner, 6 * owner + 6))
        world.read(10 + owner, owner, range(6 * owner, 6 * owner + 1))
    world.mover.turn()
    assert [world.in_flight(owner) for owner in range(2)] == [PEER_DETOURS] * 2
    frozen, world.fabric.in_flight = world.fabric.in_flight, []
    world.read(2, 2, range(BLOCKS))
    (ended,) = world.until_ended()
    assert isinstance(ended, ReadEnded) and (ended.read, ended.problem) == (2, "")
    world.fabric.in_flight = frozen
    assert len(world.until_ended(4)) == 4 and world.scratch_is_whole()


def test_scratch_of_a_failed_read_is_given_back_when_the_last_of_it_is_terminal() -> None:
    world = World()
    world.read(1, 0, range(BLOCKS))
    world.mover.turn()
    assert not world.scratch_is_whole()
    world.fabric.kill("owner-0")
    (ended,) = world.mover.turn()
    assert isinstance(ended, ReadEnded) and ended.problem == "the peer has gone"
    assert world.scratch_is_whole()
    assert (world.region[: world.layout.region_bytes] == POISON).all()


def test_reads_that_wait_for_scratch_get_it_in_turn() -> None:
    """A long one does not keep a short one of the same peer from it."""
    world = World()
    world.read(1, 0, range(2, BLOCKS))
    world.read(2, 0, range(2))
    order = [said.read for said in world.until_ended(2) if isinstance(said, ReadEnded)]
    assert order == [2, 1] and world.right(range(BLOCKS))


def test_a_read_through_scratch_outlives_the_removal_of_its_peer() -> None:
    world = World()
    world.read(1, 0, range(4))
    world.mover.turn()
    world.mover.handle(PeerRemove(peer="owner-0"))
    (ended,) = world.until_ended()
    assert isinstance(ended, ReadEnded) and ended.problem == "" and world.right(range(4))
    assert world.scratch_is_whole()


def test_blocks_too_large_for_scratch_are_read_in_short_runs() -> None:
    """Many descriptors, but a peer that can be read."""
    world = World()
    world.mover._scratch.size = BLOCK_BYTES - 1
    world.fabric.held = False
    world._meet("owner-1")
    world.fabric.held = True
    world.read(1, 1, range(3))
    assert isinstance(world.until_ended()[0], ReadEnded) and world.right(range(3))
