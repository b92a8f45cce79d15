"""What is done to a node, or to the link before it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable

from pdbus.nodes.node_process import NodeProcess

from .heard import READY, Heard
from tests.live.faults import Frozen
from tests.relay import Relay

FROZEN_S = 3.0  # at most: longer than a lease, shorter than what makes a client give its node up
AWAY_S = 3.0  # at most, before a node that has ended is started again: longer than a lease
SILENT_S = 3.0
APART_S = 7.0  # at most: longer than it takes to give a peer up
DELAY_S = 0.15  # of each piece
DELAYED_S = 2.0
SLOW_S, SLOW_STOPPED_S, SLOW_GOES_S = 1.5, 0.04, 0.01  # a fifth of its speed
WAYS = {"deaf": ("in",), "mute": ("out",)}  # of the node: what is swallowed; else both ways are

Children = dict[str, int]


class Harm:
    """To one node. `begin` returns when nothing of ours stands in the way of healing any more: `since_s` says since
    when, and `starts` whether something of the node had to start first.

    `caller`: the name of who cannot reach the node in a partition; `others_served` returns once all others have been.
    """

    def __init__(
        self,
        node: NodeProcess,
        children: Children,
        relay: Relay | None,
        heard: Heard,
        draw: random.Random,
        caller: str,
        others_served: Callable[[], Awaitable[None]],
    ) -> None:
        self._node, self._children, self._relay, self._heard, self._draw = node, children, relay, heard, draw
        self._caller, self._others_served = caller, others_served
        self.died = asyncio.Event()
        self.ended_s = 0.0  # when it died
        self.since_s = 0.0  # when it was started, or a child of it killed, or the last that was in its way taken away
        self.starts = False

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

    async def back(self) -> float:
        """When the node said that it is ready again, or was within reach again."""
        return await self._heard.wait(self._node.name, READY, self.since_s) if self.starts else self.since_s

    async def _go_on(self, what: str, which: str, own: Frozen) -> None:
        match what:
            case "freeze":
                await asyncio.sleep(self._draw.random() * FROZEN_S)
                own.thaw_all()
            case "slow":
                await self._slow(own)
            case "kill" | "terminate" | "disk":
                pass
            case _:
                await self._strain(what)
        self.since_s = self.ended_s if what == "kill" else time.monotonic()
        self.starts = what in ("kill", "terminate")
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

    async def _strain(self, what: str) -> None:
        relay, lasts_s = self._relay, self._draw.random()
        assert relay is not None
        match what:
            case "cut":
                relay.cut()
            case "delay":
                relay.delay_s = DELAY_S
                await asyncio.sleep(DELAYED_S)
            case "silence":
                relay.swallow()
                await asyncio.sleep(lasts_s * SILENT_S)
            case "deaf" | "mute":
                relay.swallow(WAYS[what])
                await asyncio.sleep(lasts_s * APART_S)
            case "partition":
                relay.swallow(caller=self._caller)
                await asyncio.gather(asyncio.sleep(lasts_s * APART_S), self._others_served())
        relay.mend()

    async def _start_again(self) -> None:
        await self._node.wait()
        if self._draw.random() < 0.5:
            await asyncio.sleep(self._draw.random() * AWAY_S)
        await self._start()

    async def replace_full_disk(self) -> None:
        """The only way to a disk that is not full: another life."""
        with contextlib.suppress(ProcessLookupError):
            self._node.signal(signal.SIGTERM)
        await self._node.wait()
        await self._start()

    async def _start(self) -> None:
        await self._node.close()
        self.since_s, self.starts = time.monotonic(), True
        await self._node.start()
