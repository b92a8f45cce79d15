"""Clusters to hurt: real processes to kill, freeze and start again, while requests run whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdbus.bus.client import Client, Generation
from pdbus.bus.errors import PdError
from pdbus.bus.messages import Sampling
from pdbus.connector.layout import geometry_for
from pdbus.nodes.cluster import Cluster, Options
from pdbus.nodes.engines.coded import cell_code, choose, prefix_sums
from pdbus.nodes.node_process import NodeProcess, descendants

from .conftest import Answered, answer

POLL_S = 0.01
WAIT_S = 20.0  # for anything that has to come about; the machine may be busy
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}  # reads that need the owner's mover, as between two machines
B, CHUNK = 16, 64
GEOMETRY = geometry_for(layers=2, kv_heads=2, head_dim=8, block_size=B, dtype="float32")
OPTIONS: dict[str, str | int | float | bool] = {
    "engine": "coded", "coded_layers": 2, "coded_kv_heads": 2, "coded_head_dim": 8, "kv_blocks": 512,
    "prefill_chunk": CHUNK, "lease": "3s", "renew": "400ms", "claim": "200ms",
}  # fmt: skip
Status = dict[str, Any]
SLOW_PREFILL = {"coded_token_us": 1000}  # 64 ms a chunk: time to see it happen


class Frozen:
    """Processes that have been stopped, and can be let go on."""

    def __init__(self) -> None:
        self._frozen: set[int] = set()

    def freeze(self, pid: int) -> None:
        self._frozen.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self, pid: int) -> None:
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    @property
    def pids(self) -> set[int]:
        return set(self._frozen)

    def thaw_all(self) -> None:
        for pid in tuple(self._frozen):
            self.thaw(pid)


class Site(Frozen):
    """One cluster in a loop of its own. What a test has frozen or killed is whole again for the next one."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster, bound_s: float) -> None:
        super().__init__()
        self.cluster = cluster
        self._bound_s = bound_s
        self._runner = runner

    @property
    def p(self) -> NodeProcess:
        return self.cluster.prefill[0]

    @property
    def d(self) -> NodeProcess:
        return self.cluster.decode[0]

    def run(self, work: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(self._bound_s):
                await work

        try:
            self._runner.run(bounded())
        except BaseException as e:
            for node in self.cluster.nodes:
                e.add_note("\n".join((f"--- {node.name}", *node.tail)))
            raise

    def mend(self) -> None:
        """After a test: everything goes on or is started again, all are linked, every ledger is clean."""
        self.thaw_all()
        self.run(self._whole())
        self.run(self._clean())

    async def _whole(self) -> None:
        ended = [node for node in self.cluster.nodes if not node.running]
        await asyncio.gather(*(self.cluster.restart(node) for node in ended))
        await asyncio.gather(*(self.cluster.wait_ready(node, WAIT_S) for node in self.cluster.nodes))

    async def _clean(self) -> None:
        for node in self.cluster.nodes:
            async with Client(node.address) as client:
                await until_clean(client)


@contextmanager
def site_of(
    prefill: int,
    decode: int,
    *,
    options: Options,
    before: Callable[[Cluster], Coroutine[Any, Any, None]] | None = None,
    bound_s: float = 90,
    **arguments: Any,
) -> Iterator[Site]:
    """`before` is called before the nodes start; a scenario ends within `bound_s`. They are killed in the end, and
    leave their run directories to us."""
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="pd") as run_dir:
        cluster = Cluster(prefill, decode, options={**options, "run_dir": run_dir}, **arguments)
        if before is not None:
            runner.run(before(cluster))
        try:
            runner.run(cluster.start())
            yield Site(runner, cluster, bound_s)
        finally:
            runner.run(cluster.kill_all())


def scenario(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test written as a coroutine over a site."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        site = next(value for value in fixtures.values() if isinstance(value, Site))
        site.run(test(**fixtures))

    return run


# ---------------------------------------------------------------- asking


def prompt(length: int, salt: int) -> list[int]:
    """Shares no block with one of another salt."""
    return random.Random(f"{length}/{salt}").choices(range(5, 256), k=length)


def expected(tokens: Sequence[int], count: int) -> list[int]:
    """What one node would answer: the coded engine's rule, on no slab."""
    known = list(tokens)
    code = cell_code(GEOMETRY, prefix_sums(known))
    read = np.concatenate([code, np.empty((count, *code.shape[1:]), np.uint8)])
    total = int(prefix_sums(known)[-1])
    for end in range(len(tokens), len(tokens) + count):
        known.append(choose(read[:end], Sampling(), 256))
        sums = prefix_sums(known[-1:], end, total)
        read[end : end + 1], total = cell_code(GEOMETRY, sums), int(sums[-1])
    return known[len(tokens) :]


def assert_right(answered: Answered, asked: Sequence[int]) -> None:
    assert answered.finished.error is None, answered.finished.error
    assert answered.tokens == expected(asked, len(answered.tokens))
    assert answered.finished.reason == "length"


async def ask(client: Client, asked: Sequence[int], tokens: int = 8, **options: Any) -> Answered:
    answered = await answer(client, asked, max_tokens=tokens, **options)
    assert_right(answered, asked)
    assert len(answered.tokens) == tokens
    return answered


async def read_all(generation: Generation) -> Answered:
    async for _ in generation:
        pass
    assert generation.finished is not None
    return Answered(generation.tokens, generation.text, generation.finished)


async def ask_remotely(client: Client, salt: int) -> Answered:
    """Ask until a prompt has been prefilled elsewhere again, each answer being right."""
    async with asyncio.timeout(WAIT_S):
        while True:
            salt += 1_000_000
            answered = await ask(client, prompt(40, salt), 2)
            if answered.finished.timeline.remote:
                return answered
            await asyncio.sleep(POLL_S)


# ---------------------------------------------------------------- watching


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Raises TimeoutError when it does not come true. A node that does not answer for a while is asked again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(PdError):
                if await true():
                    return
            await asyncio.sleep(POLL_S)


async def until_status(client: Client, true: Callable[[Status], Any]) -> Status:
    """The first status of the node that is so."""
    status: Status = {}

    async def look() -> bool:
        status.update(await client.status())
        return bool(true(status))

    try:
        await until(look)
    except TimeoutError:
        raise AssertionError(f"not so within {WAIT_S:g} s: {status}") from None
    return status


class Unclean(AssertionError):
    """Something is left on a node though nobody has a request. `blocks`: those that are neither free nor cached."""

    def __init__(self, ledger: Status) -> None:
        super().__init__(f"is not clean: {ledger}")
        self.blocks: int = ledger["blocks"]["in_use"] + ledger["blocks"]["quarantined"] if ledger else 0


async def until_clean(client: Client) -> None:
    """Nothing but free and cached blocks, no lease, no read, no request. Raises Unclean."""
    ledger: Status = {}

    async def look() -> bool:
        reply = await client.ledger()
        ledger.update(reply.ledger)
        return reply.clean

    try:
        await until(look)
    except TimeoutError:
        problem = Unclean(ledger)
        problem.add_note(client.address)
        raise problem from None


async def until_fetch(client: Client, true: Callable[[Status], Any]) -> Status:
    """The first row of the decode node's fetches that is so."""
    found: list[Status] = []

    def look(status: Status) -> bool:
        found[:] = [row for row in status["reads"] if true(row)]
        return bool(found)

    await until_status(client, look)
    return found[0]


async def pids_of(client: Client) -> dict[str, int]:
    """Of control, worker and mover, all up."""
    status = await until_status(client, lambda s: all(s["pids"].values()) and s["ready"])
    pids: dict[str, int] = status["pids"]
    return pids


def child_of(node: NodeProcess, module: str) -> int:
    """The pid of the node's process that runs this module."""
    for pid in descendants(node.pid):
        if module in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"{node.name} has no {module}")


def watch(pids: Sequence[int]) -> list[int]:
    """A pidfd of each: readable once it has ended."""
    return [os.pidfd_open(pid) for pid in pids]


async def all_end(pidfds: Sequence[int], within_s: float = WAIT_S) -> None:
    loop = asyncio.get_running_loop()
    for pidfd in pidfds:
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(within_s):
                await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
