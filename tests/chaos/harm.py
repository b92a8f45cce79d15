"""What is done to a node, or to the link before it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time

from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import NodeProcess

from tests.live.faults import Frozen
from tests.relay import Relay

FROZEN_S = 3.0  # at most: longer than a lease, shorter than what makes a client give its node up
AWAY_S = 3.0  # at most, before a node that has ended is started again: longer than a lease
SILENT_S = 3.0
DELAY_S = 0.15  # of each piece
DELAYED_S = 2.0
SLOW_S, SLOW_STOPPED_S, SLOW_GOES_S = 1.5, 0.04, 0.01  # a fifth of its speed

Children = dict[str, int]


class Harm:
    """To one node. `done` is set once it has come; `begin` returns when nothing stands in the way of healing any
    more, and `since_s` then says since when."""

    def __init__(
        self, cluster: Cluster, node: NodeProcess, children: Children, relay: Relay | None, draw: random.Random
    ) -> None:
        self._cluster, self._node, self._children, self._relay, self._draw = cluster, node, children, relay, draw
        self.died = asyncio.Event()
        self.ended_s = 0.0  # when it died
        self.since_s = 0.0  # when it was started again, or the last that was in its way taken away

    async def begin(self, kind: str, held: Frozen) -> None:
        """`held`: what kept a request at its step, let go as soon as the fault has come."""
        what, _, which = kind.partition(" ")
        own = Frozen()
        match what:
            case "kill":
                self._kill(which)
            case "freeze":
                own.freeze(self._children[which])
            case "terminate":
                self._node.signal(signal.SIGTERM)
            case "disk":
                self._fill_disk()
        for pid in held.pids - own.pids:
            held.thaw(pid)
        await self._go_on(what, which, own)

    async def _go_on(self, what: str, which: str, own: Frozen) -> None:
        if what == "freeze":
            await asyncio.sleep(self._draw.random() * FROZEN_S)
            own.thaw_all()
        elif what == "slow":
            await self._slow(own)
        elif what in ("cut", "silence", "delay"):
            await self._strain_link(what)
        self.since_s = time.monotonic()
        if what == "terminate" or (what == "kill" and which in ("control", "all")):
            await self._start_again()

    def _kill(self, which: str) -> None:
        self.ended_s = time.monotonic()
        self.died.set()
        if which == "all":
            self._node.kill_all()
        else:
            os.kill(self._children[which], signal.SIGKILL)

    def _fill_disk(self) -> None:
        """No file of control's may grow any more: what it writes next fails, as on a full disk."""
        resource.prlimit(self._children["control"], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    async def _slow(self, own: Frozen) -> None:
        until_s = time.monotonic() + SLOW_S
        while time.monotonic() < until_s:
            for pid in self._children.values():
                own.freeze(pid)
            await asyncio.sleep(SLOW_STOPPED_S)
            own.thaw_all()
            await asyncio.sleep(SLOW_GOES_S)

    async def _strain_link(self, what: str) -> None:
        assert self._relay is not None
        if what == "cut":
            self._relay.cut()
            return
        self._relay.silent = what == "silence"
        self._relay.delay_s = DELAY_S if what == "delay" else 0.0
        await asyncio.sleep(self._draw.random() * SILENT_S if what == "silence" else DELAYED_S)
        self._relay.mend()

    async def _start_again(self) -> None:
        await self._node.wait()
        if self._draw.random() < 0.5:
            await asyncio.sleep(self._draw.random() * AWAY_S)
        self.since_s = time.monotonic()
        await self._cluster.restart(self._node)

    async def replace_full_disk(self) -> None:
        """The only way to a disk that is not full: another life."""
        with contextlib.suppress(ProcessLookupError):
            self._node.signal(signal.SIGTERM)
        await self._node.wait()
        await self._cluster.restart(self._node)
