"""Requests for which no node has room now: they wait here, oldest first, and not without end."""

from __future__ import annotations

import asyncio
from collections import deque

from pdbus.bus.errors import DeadlineExceeded, Overloaded


class Waiting:
    """At most `places` at once. Who is woken tries again, and takes its place at the head again if it was too early."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._line: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def turn(self, timeout_s: float, *, retry_after_ms: int, again: bool = False) -> None:
        """Wait until there may be room. `again`: it was woken before. Raises Overloaded when all places are taken,
        DeadlineExceeded after `timeout_s`."""
        if len(self._line) >= self._places and not again:
            problem = f"all nodes are full, and {self._places} requests wait already"
            raise Overloaded(problem, retry_after_ms=retry_after_ms)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.insert(0, woken) if again else self._line.append(woken)
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            raise DeadlineExceeded("no node had room within the request's deadline") from None
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self.room()  # its turn goes to the next
            raise
        finally:
            if woken in self._line:
                self._line.remove(woken)

    def room(self) -> None:
        """There may be room for one more."""
        while self._line:
            woken = self._line.popleft()
            if not woken.done():
                woken.set_result(None)
                return
