"""Our own mover, as the decisions see it: whether it runs, and the epoch that it and all leases belong to.

Theory of operation. What an agent lends ends with the mover's process, so a mover that is lost, or has to go, ends an
epoch. Only its reaped process proves that its reads write no more (R7), so one whose reads hold too much of the pool
has to go.

    | state   | hears                    | becomes | and                                              |
    |---------|--------------------------|---------|--------------------------------------------------|
    | down    | came, of this epoch      | up      | it is told of peers and leases, peers of it      |
    | down    | came, of an epoch before | down    | restart                                          |
    | down    | reads were posted        | down    | they are over: nobody would ever report them     |
    | up      | late reads hold too much | healing | next epoch; restart                              |
    | up      | lost                     | down    | next epoch; its reads are over; restart          |
    | up,     | lost, as asked for       | down    | its reads are over; restart                      |
    | healing |                          |         |                                                  |

A node asks for its end, too, when the memory behind it is lost (`next_epoch`, `restart`).
"""

from __future__ import annotations

from enum import StrEnum

from pdbus.bus import members as ms
from pdbus.bus.messages import Agent

from . import events as ev
from . import handoff as ho
from .peer_agents import PeerAgents
from .transfer import Transfers

Told = ev.NodeEffect | ho.FetchEvent | ho.OfferEvent | ms.MembershipEvent


class MoverState(StrEnum):
    DOWN = "down"
    UP = "up"
    HEALING = "healing"


class OwnMover:
    """Returns what is to be carried out, and what membership and the halves of the hand-off have to hear, in order."""

    def __init__(self, peers: PeerAgents, transfers: Transfers, blocks: int) -> None:
        """`blocks`: of the pool that reads are posted into."""
        self.epoch = 1
        self.state = MoverState.DOWN
        self._peer_agents = peers
        self._transfers = transfers
        self._blocks = blocks
        self._unannounced: tuple[Agent, ...] = ()

    @property
    def up(self) -> bool:
        return self.state is not MoverState.DOWN

    @property
    def healing(self) -> bool:
        """It is being ended for the sake of reads that do not end, and takes no new ones."""
        return self.state is MoverState.HEALING

    def came(self, agents: tuple[Agent, ...], leases: int, *, announce: bool) -> list[Told]:
        """`leases`: how many are held. `announce`: whether there is something behind its agents yet."""
        if any(agent.epoch != self.epoch for agent in agents):
            return [ev.RestartMover(epoch=self.epoch)]
        self.state = MoverState.UP
        self._unannounced = agents
        announced = self.announce() if announce else []
        return [*announced, *self._peer_agents.mover_up(), ev.AdvertiseLeases(leases=leases)]

    def announce(self) -> list[Told]:
        """Peers hear of its agents, unless they have."""
        if not self.up:
            return []
        agents, self._unannounced = self._unannounced, ()
        return [ms.OwnAgentChanged(agent=agent) for agent in agents]

    def lost(self, *, asked: bool) -> list[Told]:
        """Its process has been reaped."""
        self.state = MoverState.DOWN
        self._peer_agents.mover_lost()
        ended = [] if asked else [self.next_epoch(pool_reset=False)]
        return [*ended, ho.MoverReaped(), ev.RestartMover(epoch=self.epoch)]

    def look(self) -> list[Told]:
        """What has to be done about reads, whatever happened before."""
        if self.state is MoverState.DOWN and self._transfers:
            return [ho.MoverReaped()]
        if self.state is MoverState.UP and self._transfers.hold_too_much(self._blocks):
            self.state = MoverState.HEALING
            return [self.next_epoch(pool_reset=False), ev.RestartMover(epoch=self.epoch)]
        return []

    def next_epoch(self, *, pool_reset: bool) -> ho.EpochBegan:
        """Its agents end with the epoch, announced or not, and so does every lease. `pool_reset`: cached KV, too."""
        self.epoch += 1
        self._unannounced = ()
        return ho.EpochBegan(epoch=self.epoch, pool_reset=pool_reset)

    def restart(self) -> list[Told]:
        """From now on it takes no new reads. One that is down starts, or will, by itself."""
        if self.state is MoverState.DOWN:
            return []
        self._peer_agents.mover_lost()
        return [ev.RestartMover(epoch=self.epoch)]
