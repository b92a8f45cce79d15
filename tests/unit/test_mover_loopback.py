"""What only a transport under our hand can show of a mover: reads that land late, fail, or prove nothing."""

from __future__ import annotations

import pytest

from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent
from pdbus.bus.wire import pack_u32
from pdbus.connector import reading
from pdbus.connector.ipc import FromMover, PeerAdd, PeerAdded, PeerRemove, Read, ReadDoubtful, ReadEnded, StopMover
from pdbus.connector.layout import layout_of
from pdbus.connector.loopback import Fabric, LoopbackAgent
from pdbus.connector.mover import WARM_UP_NS, Mover
from pdbus.connector.pace import MS
from pdbus.connector.reading import SLICE_RUNS_MAX, SLICES_POSTED_MAX
from pdbus.nodes.bench.movers import plain_blocks

BLOCK_BYTES = 8
BLOCKS = 8 * SLICE_RUNS_MAX


class World:
    """An owner's memory and a reader's mover, with a clock of their own."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.fabric = Fabric()
        self.memory = {name: memoryview(bytearray(BLOCKS * BLOCK_BYTES)) for name in ("owner", "reader")}
        self.owner = LoopbackAgent(self.fabric, "owner", self.memory["owner"])
        agent = LoopbackAgent(self.fabric, "reader", self.memory["reader"])
        layout = layout_of(plain_blocks(BLOCK_BYTES), BLOCKS)
        self.mover = Mover(agent, self.memory["reader"], layout, clock_ns=lambda: self.now_ns)
        self.memory["owner"][:] = b"K" * (BLOCKS * BLOCK_BYTES)

    def meet(self) -> list[FromMover]:
        agent = Agent(
            epoch=1, name="owner", metadata=self.owner.metadata, metadata_digest=prompt_digest(self.owner.metadata),
            region_bytes=BLOCKS * BLOCK_BYTES, blocks=BLOCKS,
        )  # fmt: skip
        self.mover.handle(PeerAdd(peer="P", geometry=plain_blocks(BLOCK_BYTES), agents=(agent,)))
        return self.mover.turn()

    def read(self, number: int, blocks: range) -> None:
        """Into the same blocks the other way round, so that no two of them are neighbours on both sides."""
        source, target = pack_u32(blocks), pack_u32(reversed(blocks))
        self.mover.handle(Read(read=number, peer="P", begin=0, end=len(blocks), source=source, target=target))

    def landed(self, block: int) -> bool:
        return bytes(self.memory["reader"][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) == b"K" * BLOCK_BYTES


def met() -> World:
    world = World()
    assert world.meet() == [PeerAdded(peer="P")]
    world.fabric.held = True
    return world


def test_read_in_progress_is_not_answered() -> None:
    world = met()
    world.read(1, range(3))
    assert world.mover.turn() == [] and not world.landed(0)
    world.fabric.land()
    assert world.mover.turn() == [ReadEnded(read=1, bytes=3 * BLOCK_BYTES, posts=1, runs=3)]
    assert world.landed(2) and not world.landed(3)


def test_read_takes_what_the_owner_holds_when_it_lands() -> None:
    """Not what it held when the read was posted: that is why a lease is confirmed after the reads."""
    world = met()
    world.read(1, range(1))
    world.mover.turn()
    world.memory["owner"][:BLOCK_BYTES] = b"reusedKV"
    world.fabric.land()
    assert bytes(world.memory["reader"][:BLOCK_BYTES]) == b"reusedKV"


def test_slices_in_flight_are_limited_and_the_rest_follows() -> None:
    world = met()
    world.read(1, range((SLICES_POSTED_MAX + 2) * SLICE_RUNS_MAX))
    world.mover.turn()
    assert len(world.fabric.in_flight) == SLICES_POSTED_MAX
    world.fabric.land()
    assert world.mover.turn() == []
    assert world.mover.wait_ns() == 0
    world.mover.turn()
    assert len(world.fabric.in_flight) == 2
    world.fabric.land()
    assert [m for m in world.mover.turn() if isinstance(m, ReadEnded)]


def test_short_read_is_not_queued_behind_a_long_one() -> None:
    world = met()
    world.read(1, range(6 * SLICE_RUNS_MAX))
    world.read(2, range(BLOCKS - 1, BLOCKS))
    world.mover.turn()
    world.fabric.land()
    assert [m.read for m in world.mover.turn() if isinstance(m, ReadEnded)] == [2]


def test_dead_owner_ends_all_slices_with_one_answer() -> None:
    world = met()
    world.read(1, range(8 * SLICE_RUNS_MAX))
    world.mover.turn()
    world.fabric.kill("owner")
    posts = SLICES_POSTED_MAX
    assert world.mover.turn() == [
        ReadEnded(read=1, problem="the peer has gone", posts=posts, runs=posts * SLICE_RUNS_MAX)
    ]
    assert world.mover.turn() == []


def test_doubt_is_said_once_and_the_end_may_follow() -> None:
    """Its handle may still write: it is asked on, and never released before it is terminal."""
    world = met()
    world.read(1, range(2))
    world.mover.turn()
    world.fabric.in_flight[0].doubt = "backend error"
    assert world.mover.turn() == [ReadDoubtful(read=1, problem="backend error")]
    assert world.mover.turn() == []
    world.fabric.land()
    assert world.mover.turn() == [ReadEnded(read=1, bytes=2 * BLOCK_BYTES, posts=1, runs=2)]


def test_read_outlives_the_removal_of_its_peer() -> None:
    world = met()
    world.read(1, range(2))
    world.mover.turn()
    world.mover.handle(PeerRemove(peer="P"))
    world.read(2, range(2))
    assert world.mover.turn() == [ReadEnded(read=2, problem="no peer P", posted=False)]
    world.fabric.land()
    assert world.mover.turn() == [ReadEnded(read=1, bytes=2 * BLOCK_BYTES, posts=1, runs=2)]


def test_a_peer_is_not_added_again_while_reads_from_it_are_open() -> None:
    """Forgetting the agent after the old reads would lose the status of the new ones."""
    world = met()
    world.read(1, range(3))
    world.mover.turn()
    world.mover.handle(PeerRemove(peer="P"))
    (refused,) = world.meet()
    assert isinstance(refused, PeerAdded) and "still" in refused.problem
    world.fabric.land()
    world.mover.turn()
    world.fabric.held = False
    assert world.meet() == [PeerAdded(peer="P")]


def test_transfer_time_runs_from_post_to_terminal_status() -> None:
    world = met()
    world.now_ns = 5 * MS
    world.read(1, range(1))
    world.mover.turn()
    world.now_ns = 9 * MS
    world.fabric.land()
    (ended,) = world.mover.turn()
    assert isinstance(ended, ReadEnded) and ended.transfer_ns == 4 * MS


def test_peer_that_does_not_warm_up_is_added_after_a_while() -> None:
    world = World()
    world.fabric.held = True
    assert world.meet() == []
    world.now_ns += WARM_UP_NS
    assert world.mover.turn() == [PeerAdded(peer="P")]
    world.fabric.land()
    assert world.mover.turn() == []


def test_peer_that_dies_in_warm_up_is_refused() -> None:
    world = World()
    world.fabric.held = True
    world.meet()
    world.fabric.kill("owner")
    assert world.mover.turn() == [PeerAdded(peer="P", problem="the peer has gone")]
    world.read(1, range(1))
    assert world.mover.turn() == [ReadEnded(read=1, problem="no peer P", posted=False)]


def test_peer_removed_in_warm_up_gets_no_answer() -> None:
    world = World()
    world.fabric.held = True
    world.meet()
    world.mover.handle(PeerRemove(peer="P"))
    world.fabric.land()
    assert world.mover.turn() == []


def test_stopping_waits_for_open_reads_and_takes_no_new_ones() -> None:
    world = met()
    world.read(1, range(1))
    world.mover.turn()
    world.mover.handle(StopMover(wait_ms=100))
    world.read(2, range(1))
    assert world.mover.turn() == [ReadEnded(read=2, problem="the mover is stopping", posted=False)]
    assert not world.mover.stopped
    world.fabric.land()
    world.mover.turn()
    assert world.mover.stopped and not world.mover.outstanding


def test_stopping_gives_up_in_the_end() -> None:
    world = met()
    world.read(1, range(1))
    world.mover.turn()
    world.mover.handle(StopMover(wait_ms=100))
    world.now_ns += 100 * MS
    assert world.mover.stopped and world.mover.outstanding


def test_a_long_read_is_made_stretch_by_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a whole long prompt at once would keep the mover from everybody else's reads."""
    monkeypatch.setattr(reading, "RUNS_AT_ONCE_MAX", 700)
    world = met()
    world.read(1, range(2_500))
    ended: list[FromMover] = []
    while not ended:
        ended = world.mover.turn()
        assert len(world.fabric.in_flight) <= SLICES_POSTED_MAX
        world.fabric.land()
    assert ended == [ReadEnded(read=1, bytes=2_500 * BLOCK_BYTES, posts=4, runs=2_500)]
    assert all(world.landed(block) for block in range(2_500)) and not world.landed(2_500)
