"""One cluster, two prefill and two decode nodes, to which faults happen one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import NodeProcess

from .harm import Harm
from .heard import Heard
from .moments import Moment, Pids
from .outcome import PROOF_S, Outcome
from .plan import DYING, Fault
from .traffic import Traffic
from tests.live.faults import OPTIONS, TCP, Frozen, Unclean, ask, pids_of, prompt, until_clean
from tests.relay import Relay

START_MAX_S = 30.0  # for a node to be back
HEAL_S = 30.0  # after which it counts as not healed
TRIES = 3
PAUSE_S, LOOK_S = 4.0, 0.25
BEFORE, DURING = 4, 3  # requests, beside the one that is brought to the step
DURING_AFTER_S = 0.1
POLL_S = 0.02
ROLES: Mapping[str, Mapping[str, str | int | float | bool]] = {
    "prefill": {"coded_token_us": 500},
    "decode": {"coded_step_ms": 1, "coded_token_us": 50},
}


class Arena:
    """Buses of prefill nodes are reached through a relay each."""

    def __init__(self, cluster: Cluster, relays: Mapping[str, Relay], heard: Heard, lease_s: float) -> None:
        self.cluster, self.relays, self.heard, self.lease_s = cluster, relays, heard, lease_s
        self._held = Frozen()
        self._salt = 1 << 61

    async def strike(self, fault: Fault) -> Outcome:
        """One fault, and all that comes of it, until the cluster is whole again. Another time when the machine stood
        still meanwhile: deadlines passed, and nothing can be said of time."""
        for _ in range(TRIES):
            pauses = Pauses()
            outcome = await self._once(fault)
            if await pauses.longest_s() < PAUSE_S or outcome.wrong or outcome.leaked:
                break
        return outcome

    async def _once(self, fault: Fault) -> Outcome:
        outcome = Outcome(fault)
        async with AsyncExitStack() as stack:
            clients = {node.name: await stack.enter_async_context(Client(node.address)) for node in self.cluster.nodes}
            try:
                await self._strike(outcome, clients)
            except (PdError, AssertionError, TimeoutError, OSError) as e:
                outcome.problems.append(f"{type(e).__name__}: {e}")
            finally:
                self._held.thaw_all()
        return outcome

    async def _strike(self, outcome: Outcome, clients: Mapping[str, Client]) -> None:
        fault, draw = outcome.fault, outcome.fault.draw()
        pids: Pids = {name: await pids_of(client) for name, client in clients.items()}
        asked = draw.choice(self.cluster.decode)
        hurt: set[str] = set()
        traffic = Traffic(draw, {node.name: clients[node.name] for node in self.cluster.decode}, hurt)
        traffic.count(outcome)
        victim = await self._bring(outcome, asked, clients, pids, traffic)
        if fault.kind in DYING:
            hurt.add(victim.name)
        others = [node for node in self.cluster.decode if node is not asked]

        async def others_served() -> None:
            await self._handed_over_to(others, clients, victim)

        harm = Harm(
            victim, pids[victim.name], self.relays.get(victim.name), self.heard, draw, asked.name, others_served
        )
        watching = asyncio.create_task(self._reclaimed(outcome, harm, victim, clients))
        later = asyncio.create_task(_later(traffic))
        await harm.begin(fault.kind, self._held)
        await later
        if fault.kind == "disk full":
            await traffic.ended()
            await harm.replace_full_disk()
        await asyncio.gather(self._heal(outcome, harm, victim, clients), traffic.ended())
        await watching
        await self._check(outcome, victim, clients, pids)

    async def _bring(
        self, outcome: Outcome, asked: NodeProcess, clients: Mapping[str, Client], pids: Pids, traffic: Traffic
    ) -> NodeProcess:
        """A request to its step. Who shall be hurt."""
        fault = outcome.fault
        moment = Moment(clients[asked.name], self.cluster.prefill, pids, self._held)
        moment.hold(fault.step)
        traffic.ask_long(asked.name)
        traffic.ask_some(BEFORE)
        owner = await moment.reach(fault.step)
        outcome.reached = owner is not None
        others = {node.name: node for node in self.cluster.prefill}
        victim = asked if fault.role == "decode" else others.get(owner or "", fault.draw().choice(self.cluster.prefill))
        outcome.victim = victim.name
        return victim

    async def _reclaimed(
        self, outcome: Outcome, harm: Harm, victim: NodeProcess, clients: Mapping[str, Client]
    ) -> None:
        """When the last lease of a decode node that died has ended."""
        if outcome.fault.role != "decode" or outcome.fault.kind not in ("kill control", "kill all"):
            return
        async with asyncio.timeout(HEAL_S):
            await harm.died.wait()
            ends = [asyncio.create_task(_end_of_leases(victim.name, clients[p.name])) for p in self.cluster.prefill]
            ended_s = await asyncio.gather(*ends)
        restarted = f"{victim.name} is gone: {victim.name} was restarted"
        proven_s = [self.heard.when(p.name, restarted, harm.ended_s) for p in self.cluster.prefill]
        outcome.reclaimed_s = max(ended_s) - harm.ended_s
        outcome.reclaimed_late_s = max(
            ended - min(harm.ended_s + self.lease_s, proven or math.inf) - PROOF_S
            for ended, proven in zip(ended_s, proven_s, strict=True)
        )

    async def _heal(self, outcome: Outcome, harm: Harm, victim: NodeProcess, clients: Mapping[str, Client]) -> None:
        """Until prompts are handed over there again: from a prefill node to every decode node, to a decode node."""
        what = f"is back after {START_MAX_S:g} s"
        try:
            async with asyncio.timeout(START_MAX_S):
                back_s = await harm.back()
            what = f"has healed {HEAL_S:g} s after its return"
            async with asyncio.timeout(HEAL_S):
                askers = [victim] if victim in self.cluster.decode else self.cluster.decode
                await self._handed_over_to(askers, clients, victim)
        except TimeoutError:
            outcome.problems.append(f"nothing {what}")
            return
        outcome.started_s = back_s - harm.since_s if harm.starts else None
        outcome.healed_s = time.monotonic() - back_s

    async def _handed_over_to(
        self, askers: Sequence[NodeProcess], clients: Mapping[str, Client], victim: NodeProcess
    ) -> None:
        await asyncio.gather(*(self._handed_over(clients[node.name], victim) for node in askers))

    async def _handed_over(self, d: Client, victim: NodeProcess) -> None:
        while True:
            with contextlib.suppress(PdError):
                self._salt += 1
                timeline = (await ask(d, prompt(40, self._salt), 2)).finished.timeline
                if timeline.remote and (victim in self.cluster.decode or timeline.prefill_node == victim.name):
                    return
            await asyncio.sleep(POLL_S)

    async def _check(self, outcome: Outcome, victim: NodeProcess, clients: Mapping[str, Client], before: Pids) -> None:
        """Every node's ledger, and the processes of those that were not hurt."""
        for name, client in clients.items():
            try:
                await until_clean(client)
            except Unclean as e:
                outcome.leaked += max(1, e.blocks)
                outcome.problems.append(f"{name}: {e}")
            now = await pids_of(client)
            if name != victim.name:
                gone = [what for what in ("control", "worker") if now[what] != before[name][what]]
                outcome.lost += len(gone)
                outcome.problems += [f"{what} of {name} has ended" for what in gone]


class Pauses:
    """How long this process, and so the machine, has stood still since."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def longest_s(self) -> float:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self._longest_s

    async def _look(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - last_s)
            last_s = now_s


async def _later(traffic: Traffic) -> None:
    await asyncio.sleep(DURING_AFTER_S)
    traffic.ask_some(DURING)


async def _end_of_leases(reader: str, owner: Client) -> float:
    """When the owner said for the first time that this reader has none."""
    while True:
        with contextlib.suppress(PdError):
            peers = (await owner.status())["peers"]
            if not sum(peer["leases"] for peer in peers if peer["name"] == reader):
                return time.monotonic()
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def arena(
    folder: Path,
    environment: Mapping[str, str] = TCP,
    options: Mapping[str, str] | None = None,
    lease_s: float = 2.0,
) -> AsyncIterator[Arena]:
    """Recorded below `folder`; its nodes end by SIGTERM, so that their recordings are whole. `options`: more settings
    for all of them."""
    relays = [Relay() for _ in range(2)]
    settings = {
        **OPTIONS, "kv_blocks": 256, "lease": f"{lease_s:g}s", "record": str(folder / "recording"), "http_port": 0,
        "run_dir": str(folder), **(options or {}),
    }  # fmt: skip
    roles = {**ROLES, "decode": {**ROLES["decode"], "join": ",".join(relay.address for relay in relays)}}
    (folder / "logs").mkdir(parents=True)
    heard = Heard()
    cluster = Cluster(
        2, 2, options=settings, role_options=roles, environment=environment, logs=folder / "logs", on_line=heard.line
    )
    for node in cluster.nodes:
        node.http = ""
    for node, relay in zip(cluster.prefill, relays, strict=True):
        node.command = (*node.command, "--advertise", relay.address)
        await relay.start(node.address)
    try:
        async with cluster:
            yield Arena(
                cluster, {node.name: relay for node, relay in zip(cluster.prefill, relays, strict=True)}, heard, lease_s
            )
    finally:
        await cluster.kill_all()
        for relay in relays:
            relay.close()
