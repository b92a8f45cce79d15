"""The movers of a node, one for each rank: what its core decides about them is done here, and it hears what comes of
it. The core knows of one mover (own_mover.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pdbus.bus.errors import Broken
from pdbus.bus.messages import Agent, KVLayout
from pdbus.bus.wire import Declared, pack_u32

from . import events as ev
from . import ipc
from .joins import MoverJoin, MoversReady
from .managed import Managed, agent_of
from .process import Exit, nixl_environment
from .ranks import Ranks, Starts
from .slab import Slab

Said = ipc.FromMover | MoversReady


class MoverShell:
    """All of them as one. Made on the event loop that they are heard in."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        layouts: Sequence[KVLayout],
        directory: Path,
        *,
        name: str,
        incarnation: bytes,
        listen: str,
        tell: Callable[[ev.NodeEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_said: Callable[[Said], None],
        on_broken: Callable[[Broken], None],
        log: logging.Logger,
    ) -> None:
        """One for each slab, in which KV lies as its layout says; `name` and `incarnation` are the node's, `listen` is
        its bus address. `tell` is the core's; `on_said` hears everything before it. `on_broken` hears that they cannot
        be kept running."""
        self._layouts = layouts
        self._name, self._incarnation = name, incarnation
        self._tell, self._spawn = tell, spawn
        self._on_said, self._on_broken = on_said, on_broken
        self._log = log
        self._starts = Starts("mover")
        self._asked = False  # they were told to end, to be started again
        self._over = False

        def make(
            rank: int, hear: Callable[[ipc.FromMover], None], reaped: Callable[[Exit], None]
        ) -> Managed[ipc.FromMover]:
            slab, layout = slabs[rank], layouts[rank]
            args = ipc.MoverArgs(
                endpoint="", slab_path=slab.path, slab_bytes=slab.size_bytes, layout=layout, rank=rank, agent_name=""
            )
            return Managed(
                "pdbus.connector.mover", args, ipc.FromMover, ipc.StopMover(), directory=directory, on_message=hear,
                on_exit=reaped, environment=nixl_environment(listen), rank=rank,
            )  # fmt: skip

        self._ranks: Ranks[ipc.FromMover, Said] = Ranks(
            len(slabs), make, MoverJoin, on_message=self._heard, on_exit=self._on_exit
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """By rank; 0 for one that does not run."""
        return self._ranks.pids

    async def start(self, epoch: int) -> None:
        """Their agents are called after the node, its incarnation and this epoch."""
        name = f"{self._incarnation.hex()}/{epoch}"
        await self._ranks.start(lambda rank: {"agent_name": f"{self._name}/{rank}/{name}"})

    async def stop(self) -> None:
        """For good."""
        self._over = True
        await self._ranks.stop()

    def send(self, message: Declared) -> None:
        self._ranks.send(message)

    def carry_out(self, effect: ev.NodeEffect) -> None:
        """What is for movers of it."""
        match effect:
            case ev.AddPeer(peer=peer, geometry=geometry, agents=agents):
                self.send(ipc.PeerAdd(peer=peer, geometry=geometry, agents=agents))
            case ev.RemovePeer(peer=peer):
                self.send(ipc.PeerRemove(peer=peer))
            case ev.StartRead() as e:
                source, target = pack_u32(e.source), pack_u32(e.target)
                self.send(ipc.Read(read=e.read, peer=e.peer, begin=e.begin, end=e.end, source=source, target=target))
            case ev.AdvertiseLeases(leases=leases):
                self.send(ipc.Advertise(leases=leases))
            case ev.RestartMover(epoch=epoch):
                self._restart(epoch)

    # ------------------------------------------------------------ what they say

    def _heard(self, message: Said) -> None:
        self._on_said(message)
        match message:
            case MoversReady():
                self._starts.ready()
                self._tell(ev.MoverUp(agents=self._agents(message)))
            case ipc.PeerAdded(peer=peer, problem=problem):
                if problem:
                    self._log.error("the mover cannot read from %s: %s", peer.partition("/")[0], problem)
                    self.send(ipc.PeerRemove(peer=peer))  # where ranks have it all the same
                self._tell(ev.PeerAddEnded(peer=peer, problem=problem))
            case ipc.ReadEnded(read=read, problem=problem, bytes=size, transfer_ns=transfer_ns):
                self._tell(ev.ReadEnded(read=read, problem=problem, bytes=size, transfer_ns=transfer_ns))
            case ipc.ReadDoubtful(read=read, problem=problem):
                self._tell(ev.ReadDoubtful(read=read, problem=problem))

    def _agents(self, ready: MoversReady) -> tuple[Agent, ...]:
        """What peers are told of them."""
        return tuple(agent_of(mover, rank, self._layouts[rank]) for rank, mover in enumerate(ready.ranks))

    # ------------------------------------------------------------ their end, and the next ones

    def _on_exit(self, ended: Exit) -> None:
        asked, self._asked = self._asked, False
        if not asked and not self._over:
            self._log.error("mover: %s", ended)
        self._tell(ev.MoverLost(problem=str(ended), asked=asked))

    def _restart(self, epoch: int) -> None:
        if self._over:
            return
        if self._ranks.running:
            if not self._asked:
                self._asked = True
                self._spawn(self._ranks.stop())
            return
        try:
            self._spawn(self._start_later(epoch, self._starts.wait_s()))
        except Broken as e:
            self._on_broken(e)

    async def _start_later(self, epoch: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if not self._over:
            await self.start(epoch)
