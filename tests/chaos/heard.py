"""When each node said what in its log: the moment at which it came back is its own word, not our next look at it."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from pdbus.nodes.node_process import NodeProcess

LINES_MAX = 2000  # of a node: more than it says around one fault
READY = "is ready:"


class Heard:
    """Give `line` to a cluster. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[tuple[float, str]]] = {}
        self._more = asyncio.Event()

    def line(self, node: NodeProcess, text: str) -> None:
        self._lines.setdefault(node.name, deque(maxlen=LINES_MAX)).append((time.monotonic(), text))
        self._more.set()

    def when(self, node: str, words: str, since_s: float) -> float | None:
        """When it first said so, at `since_s` or later."""
        lines = self._lines.get(node, ())
        return next((at_s for at_s, text in lines if at_s >= since_s and words in text), None)

    async def wait(self, node: str, words: str, since_s: float) -> float:
        """The same, once it has."""
        while (at_s := self.when(node, words, since_s)) is None:
            self._more.clear()
            await self._more.wait()
        return at_s
