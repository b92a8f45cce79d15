"""One cluster that is asked for as long as it takes, while its first prefill and decode node die and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from statistics import median

from pdbus.bus.client import Client

from .sizes import Sample, size_of
from tests.chaos.arena import POLL_S, Arena
from tests.chaos.harm import Harm
from tests.chaos.moments import Pids
from tests.chaos.outcome import Outcome
from tests.chaos.plan import DYING, Fault
from tests.chaos.traffic import Traffic
from tests.live.faults import ask, pids_of, prompt

AT_ONCE = 6  # requests under way
QUIET = 0.3  # of a turn, before somebody is hurt
PROBES, PROBE_PROMPT, PROBE_ANSWER = 20, 100, 10
ROLES = ("prefill", "decode")


class Shift(Arena):
    """Its second prefill and decode node are never hurt: what grows in them would grow for ever."""

    def __init__(self, stage: Arena, turn_s: float) -> None:
        super().__init__(stage.cluster, stage.relays, stage.heard, stage.lease_s)
        self.samples: list[Sample] = []
        self._turn_s = turn_s
        self._began_s = time.monotonic()
        self._requests = 0
        self._probe = count(1 << 60)

    async def turn(self, seed: int, number: int) -> Outcome:
        """One restart under load, each role and each way of ending in turn."""
        kind = DYING[number // len(ROLES) % len(DYING)]
        return await self.strike(Fault(seed, number, kind, ROLES[number % len(ROLES)], "any"))

    async def _strike(self, outcome: Outcome, clients: Mapping[str, Client]) -> None:
        draw = outcome.fault.draw()
        victim = getattr(self.cluster, outcome.fault.role)[0]
        outcome.victim, outcome.reached = victim.name, True
        pids: Pids = {name: await pids_of(client) for name, client in clients.items()}
        traffic = Traffic(draw, {node.name: clients[node.name] for node in self.cluster.decode}, {victim.name})
        traffic.count(outcome)
        load = asyncio.create_task(self._load(traffic))
        try:
            await asyncio.sleep(QUIET * self._turn_s)
            harm = Harm(victim, pids[victim.name], None, self.heard, draw, "", _nothing)
            await harm.begin(outcome.fault.kind, self._held)
            await self._heal(outcome, harm, victim, clients)
            await load
        finally:
            load.cancel()
            await traffic.ended()
        await self._check(outcome, victim, clients, pids)
        self._requests += outcome.right + outcome.cancelled + outcome.failed
        self.samples.append(await self._sample(clients))

    async def _load(self, traffic: Traffic) -> None:
        until_s = time.monotonic() + self._turn_s
        while time.monotonic() < until_s:
            if traffic.under_way < AT_ONCE:
                traffic.ask_some(1)
            await asyncio.sleep(POLL_S)

    async def _sample(self, clients: Mapping[str, Client]) -> Sample:
        kept = [same[1].name for same in (self.cluster.prefill, self.cluster.decode)]
        latency_ms = median([await self._timed(clients[kept[1]]) for _ in range(PROBES)])
        pids = {f"{name} {what}": pid for name in kept for what, pid in (await pids_of(clients[name])).items()}
        sizes = {process: size_of(pid) for process, pid in pids.items()}
        return Sample(time.monotonic() - self._began_s, self._requests, latency_ms, sizes)

    async def _timed(self, client: Client) -> float:
        began = time.perf_counter()
        await ask(client, prompt(PROBE_PROMPT, next(self._probe)), PROBE_ANSWER)
        return (time.perf_counter() - began) * 1e3


async def _nothing() -> None:
    pass
