"""Our own mover as the cores see it: its states, and what its coming and going means to peers and leases."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus import members as ms
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Agent, Hello
from pdbus.connector import events as ev
from pdbus.connector import handoff as ho
from pdbus.connector.handoff import Holder
from pdbus.connector.own_mover import MoverState, OwnMover
from pdbus.connector.peer_agents import PeerAgents
from pdbus.connector.pool import BlockPool
from pdbus.connector.readable import unreadable
from pdbus.connector.transfer import Heard, Transfers

BLOCKS = 8


class Rig:
    """A mover, and the reads that it may have."""

    def __init__(self) -> None:
        hello = Hello(role="decode", address="tcp://d:1")
        membership = Membership(ms.MembershipConfig(name="d", incarnation=b"d", hello=hello), unreadable)
        self.pool = BlockPool(BLOCKS, 4)
        self.transfers = Transfers(self.pool, ho.HandoffConfig())
        self.mover = OwnMover(PeerAgents(membership, reads=True), self.transfers, BLOCKS)

    def up(self) -> list[Any]:
        return list(self.mover.came((agent(self.mover.epoch),), 0, announce=True))

    def late_read(self, blocks: int) -> None:
        room = self.pool.reserve(4 * blocks, (), Holder.HELD)
        assert room is not None
        self.transfers.hear(self.transfers.post(b"r", 1, ("p", b"p"), room.blocks, 0), Heard.OVERDUE)


def agent(epoch: int) -> Agent:
    return Agent(epoch=epoch, name=f"d/{epoch}")


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_that_came_is_announced_and_told_how_many_leases_are_held(rig: Rig) -> None:
    came = rig.mover.came((agent(1),), 3, announce=True)
    assert came == [ms.OwnAgentChanged(agent=agent(1)), ev.AdvertiseLeases(leases=3)]


def test_one_with_nothing_behind_it_is_announced_later_and_once(rig: Rig) -> None:
    rig.mover.came((agent(1),), 0, announce=False)
    assert rig.mover.announce() == [ms.OwnAgentChanged(agent=agent(1))]
    assert rig.mover.announce() == []


@pytest.mark.parametrize("end", ["epoch", "lost"])
def test_one_that_is_over_is_not_announced(rig: Rig, end: str) -> None:
    rig.mover.came((agent(1),), 0, announce=False)
    if end == "epoch":
        rig.mover.next_epoch(pool_reset=True)
    else:
        rig.mover.lost(asked=True)
    assert rig.mover.announce() == []


def test_one_of_an_epoch_before_is_ended_again(rig: Rig) -> None:
    """Peers were told that its epoch is over while it started."""
    rig.mover.next_epoch(pool_reset=True)
    assert rig.mover.came((agent(1),), 0, announce=True) == [ev.RestartMover(epoch=2)]
    assert rig.mover.state is MoverState.DOWN


def test_a_lost_one_ends_its_epoch_and_its_reads(rig: Rig) -> None:
    rig.up()
    over = [ho.EpochBegan(epoch=2, pool_reset=False), ho.MoverReaped(), ev.RestartMover(epoch=2)]
    assert rig.mover.lost(asked=False) == over


def test_what_it_was_asked_to_end_for_has_ended_the_epoch_already(rig: Rig) -> None:
    rig.up()
    rig.mover.next_epoch(pool_reset=True)
    assert rig.mover.restart() == [ev.RestartMover(epoch=2)]
    assert rig.mover.lost(asked=True) == [ho.MoverReaped(), ev.RestartMover(epoch=2)]


def test_late_reads_in_more_than_a_quarter_of_the_pool_cost_it_its_life_once(rig: Rig) -> None:
    rig.up()
    rig.late_read(BLOCKS // 4)
    assert rig.mover.look() == [] and rig.mover.state is MoverState.UP
    rig.late_read(1)
    assert rig.mover.look() == [ho.EpochBegan(epoch=2, pool_reset=False), ev.RestartMover(epoch=2)]
    assert rig.mover.healing and rig.mover.look() == []


def test_reads_without_a_mover_are_over(rig: Rig) -> None:
    rig.late_read(1)
    assert rig.mover.look() == [ho.MoverReaped()]


def test_one_that_is_down_needs_no_end(rig: Rig) -> None:
    assert rig.mover.restart() == []
