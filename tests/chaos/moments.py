"""Requests brought to a step of their life and held there, until a fault has come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdbus.bus.client import Client
from pdbus.nodes.node_process import NodeProcess

from tests.live.faults import Frozen, Status, until_fetch, until_status

REACH_S = 6.0  # for a request to come to its step

Pids = dict[str, dict[str, int]]  # by node: its control, worker and mover


class Moment:
    """Where a request of the decode node `d` is brought to. What has to be frozen for that is in `frozen`."""

    def __init__(self, d: Client, owners: list[NodeProcess], pids: Pids, frozen: Frozen) -> None:
        self._d, self._frozen, self._pids = d, frozen, pids
        self._owners = [node.name for node in owners]
        self._ways: dict[str, Callable[[], Awaitable[str]]] = {
            "arriving": self._arriving, "asked": self._asked, "accepted": self._accepted, "progress": self._progress,
            "done": self._done, "claiming": self._claiming, "decoding": self._decoding,
        }  # fmt: skip

    def hold(self, step: str) -> None:
        """Before the request is sent: who would bring it further than `step` is frozen."""
        child = {"asked": "control", "accepted": "worker", "done": "mover", "claiming": "mover"}.get(step)
        for name in self._owners if child else ():
            self._frozen.freeze(self._pids[name][child or ""])

    async def reach(self, step: str) -> str | None:
        """The prefill node of a request that is at `step`, '' for none; None when none comes there."""
        try:
            async with asyncio.timeout(REACH_S):
                return await self._ways[step]()
        except (TimeoutError, AssertionError):
            return None

    async def _arriving(self) -> str:
        return ""

    async def _asked(self) -> str:
        return await self._fetch(lambda f: f["state"] == "reading" and not f["generation"])

    async def _accepted(self) -> str:
        return await self._fetch(lambda f: f["generation"] and not f["ready"])

    async def _progress(self) -> str:
        return await self._fetch(lambda f: 0 < f["ready"] < f["prompt_tokens"])

    async def _done(self) -> str:
        return await self._fetch(lambda f: f["reads"] and f["first_token"])

    async def _claiming(self) -> str:
        owner = await self._done()
        self._frozen.freeze(self._pids[owner]["control"])
        self._frozen.thaw(self._pids[owner]["mover"])
        return await self._fetch(lambda f: f["state"] == "claiming")

    async def _decoding(self) -> str:
        def decodes(status: Status) -> list[Status]:
            return [r for r in status["requests"] if r["state"] == "running" and r["generated"] > 3]

        status = await until_status(self._d, decodes)
        return str(decodes(status)[0]["prefill_node"])

    async def _fetch(self, true: Callable[[Status], object]) -> str:
        return str((await until_fetch(self._d, true))["node"])
