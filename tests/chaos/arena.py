"""One cluster, two prefill and two decode nodes, to which faults happen one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import NodeProcess

from .harm import Harm
from .moments import Moment, Pids
from .outcome import Outcome
from .plan import ENDING, Fault
from .traffic import Traffic
from tests.live.faults import OPTIONS, TCP, Frozen, ask, pids_of, prompt, until
from tests.relay import Relay

LEASE_S = 2.0
START_S = 2.0  # for a node that is started again to say hello
PROOF_S = 1.0  # for leases to end after proof of their reader's end
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

    def __init__(self, cluster: Cluster, relays: Mapping[str, Relay]) -> None:
        self.cluster, self._relays = cluster, relays
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
        if fault.kind in (*ENDING, "freeze control", "slow"):
            hurt.add(victim.name)
        relay = self._relays.get(victim.name)
        harm = Harm(self.cluster, victim, pids[victim.name], relay, draw)
        watching = asyncio.create_task(self._reclaimed(outcome, harm, victim, clients))
        later = asyncio.create_task(_later(traffic))
        await harm.begin(fault.kind, self._held)
        await later
        await traffic.ended()
        if fault.kind == "disk full":
            harm.since_s = time.monotonic()
            await harm.replace_full_disk()
        await watching
        await self._heal(outcome, harm, victim, clients)
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
            for owner in self.cluster.prefill:
                while await _leases_of(victim.name, clients[owner.name]):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        outcome.reclaimed_s = time.monotonic() - harm.ended_s
        returned_s = harm.since_s - harm.ended_s if harm.since_s else LEASE_S
        outcome.reclaim_due_s = PROOF_S + min(returned_s + START_S, LEASE_S)

    async def _heal(self, outcome: Outcome, harm: Harm, victim: NodeProcess, clients: Mapping[str, Client]) -> None:
        """Until prompts are handed over there again: from a prefill node to every decode node, to a decode node."""
        askers = [victim] if victim in self.cluster.decode else self.cluster.decode
        try:
            async with asyncio.timeout(HEAL_S):
                await asyncio.gather(*(self._handed_over(clients[node.name], victim) for node in askers))
        except TimeoutError:
            outcome.problems.append(f"not healed after {HEAL_S:g} s")
            return
        outcome.healed_s = time.monotonic() - harm.since_s

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
            await self._check_ledger(outcome, name, client)
            now = await pids_of(client)
            if name != victim.name:
                gone = [what for what in ("control", "worker") if now[what] != before[name][what]]
                outcome.lost += len(gone)
                outcome.problems += [f"{what} of {name} has ended" for what in gone]

    async def _check_ledger(self, outcome: Outcome, name: str, client: Client) -> None:
        said: dict[str, object] = {}

        async def clean() -> bool:
            reply = await client.ledger()
            said.update(reply.ledger)
            return reply.clean

        try:
            await until(clean)
        except TimeoutError:
            blocks: dict[str, int] = said["blocks"]  # type: ignore[assignment]
            outcome.leaked += max(1, blocks["in_use"] + blocks["quarantined"])
            outcome.problems.append(f"{name} is not clean: {said}")


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


async def _leases_of(reader: str, owner: Client) -> int:
    try:
        peers = (await owner.status())["peers"]
    except PdError:
        return 1  # it does not say
    return sum(peer["leases"] for peer in peers if peer["name"] == reader)


@asynccontextmanager
async def arena(folder: Path, environment: Mapping[str, str] = TCP) -> AsyncIterator[Arena]:
    """Recorded below `folder`; its nodes end by SIGTERM, so that their recordings are whole."""
    relays = [Relay() for _ in range(2)]
    options = {
        **OPTIONS, "kv_blocks": 256, "lease": f"{LEASE_S:g}s", "record": str(folder / "recording"), "http_port": 0,
        "run_dir": str(folder),
    }  # fmt: skip
    roles = {**ROLES, "decode": {**ROLES["decode"], "join": ",".join(relay.address for relay in relays)}}
    (folder / "logs").mkdir(parents=True)
    cluster = Cluster(2, 2, options=options, role_options=roles, environment=environment, logs=folder / "logs")
    for node in cluster.nodes:
        node.http = ""
    for node, relay in zip(cluster.prefill, relays, strict=True):
        node.command = (*node.command, "--advertise", relay.address)
        await relay.start(node.address)
    try:
        async with cluster:
            yield Arena(cluster, {node.name: relay for node, relay in zip(cluster.prefill, relays, strict=True)})
    finally:
        await cluster.kill_all()
        for relay in relays:
            relay.close()
