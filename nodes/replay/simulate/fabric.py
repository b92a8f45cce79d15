"""Reads between nodes. A node's link is shared equally by the reads to and from it; a read goes as fast as the slower
of its two shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..driver import Driver

NS_PER_S = 1_000_000_000


@dataclass(slots=True, eq=False)
class Flow:
    """A read under way. `version` counts changes of its rate, so that an end that was foreseen earlier is no more."""

    owner: str
    reader: str
    left_bytes: float
    done: Callable[[], None]
    broken: Callable[[], None]
    rate: float = 0.0  # bytes per ns
    since_ns: int = 0
    version: int = 0


class Fabric:
    """All links, by node. `bytes_per_s` of each, to or from all others together."""

    def __init__(self, driver: Driver, bytes_per_s: float) -> None:
        self._driver = driver
        self._rate = bytes_per_s / NS_PER_S
        self._slowed: dict[str, float] = {}
        self._flows: dict[str, dict[Flow, None]] = {}

    def start(self, owner: str, reader: str, size: int, done: Callable[[], None], broken: Callable[[], None]) -> Flow:
        """One of the two is called when all bytes have come, or its owner has gone; none once the flow is stopped."""
        flow = Flow(owner, reader, size, done, broken, since_ns=self._driver.now)
        for name in (owner, reader):
            self._flows.setdefault(name, {})[flow] = None
        self._share(owner, reader)
        return flow

    def stop(self, flow: Flow) -> None:
        """It moves no more bytes."""
        if flow.version < 0:
            return
        flow.version = -1
        for name in (flow.owner, flow.reader):
            self._flows[name].pop(flow, None)
        self._share(flow.owner, flow.reader)

    def slow(self, node: str, factor: float) -> None:
        """A node's link has only this part of its bandwidth; 1: all of it."""
        self._slowed[node] = factor
        self._share(node)

    def owner_gone(self, node: str) -> None:
        """Nothing more comes from there."""
        for flow in [flow for flow in self._flows.get(node, ()) if flow.owner == node]:
            self.stop(flow)
            flow.broken()

    def _share(self, *names: str) -> None:
        """Whose shares have changed goes on at another rate."""
        for name in names:
            for flow in self._flows.get(name, ()):
                self._pace(flow)

    def _pace(self, flow: Flow) -> None:
        rate = min(self._share_of(flow.owner), self._share_of(flow.reader))
        if rate == flow.rate:
            return
        now = self._driver.now
        flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.since_ns))
        flow.rate, flow.since_ns = rate, now
        flow.version += 1
        self._driver.after(int(flow.left_bytes / rate) + 1, self._end, flow, flow.version)

    def _share_of(self, name: str) -> float:
        return self._rate * self._slowed.get(name, 1.0) / len(self._flows[name])

    def _end(self, flow: Flow, version: int) -> None:
        if flow.version == version:
            self.stop(flow)
            flow.done()
