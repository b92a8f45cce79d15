"""Real clusters for live tests: started once a module, checked clean after every test."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from pdbus.bus.client import Client
from pdbus.bus.messages import Finished
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import NodeProcess

T = TypeVar("T")
POISON = b"\xa5"
CLEAN_S = 10.0  # for the last lease to end and the last read to be reported, on a busy machine


def slabs_of(pid: int) -> list[Path]:
    """The memfds that a control process holds its ranks' KV in."""
    files = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda file: int(file.name))
    return [file for file in files if os.readlink(file).startswith("/memfd:pdbus-kv")]


def slab_of(pid: int) -> Path:
    """Rank 0's."""
    return slabs_of(pid)[0]


def poison(pid: int) -> None:
    """Fill the whole KV of a node with POISON. Whatever it had cached is spoilt: ask for no prefix of it again."""
    for file in slabs_of(pid):
        with open(file, "r+b") as slab, mmap.mmap(slab.fileno(), 0) as memory:
            memory[:] = POISON * len(memory)


class Answered(NamedTuple):
    """A whole answer and how it ended."""

    tokens: list[int]
    text: str
    finished: Finished


class Live:
    """A cluster, its oracle (one node doing both jobs, linked to nobody), and a loop to talk to them in."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster, oracle: Cluster) -> None:
        self.cluster = cluster
        self._oracle = oracle
        self._runner = runner

    @property
    def prefill(self) -> NodeProcess:
        return self.cluster.prefill[0]

    @property
    def decode(self) -> NodeProcess:
        return self.cluster.decode[0]

    @property
    def oracle(self) -> NodeProcess:
        return self._oracle.both[0]

    async def start(self) -> None:
        await asyncio.gather(self.cluster.start(), self._oracle.start())

    async def stop(self) -> None:
        await asyncio.gather(self.cluster.stop(timeout_s=20), self._oracle.stop(timeout_s=20))

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self._runner.run(wait())

    def ask(self, node: NodeProcess, question: Callable[[Client], Awaitable[T]]) -> T:
        """What `question` gives with a client of that node."""

        async def ask() -> T:
            async with Client(node.address) as client:
                return await question(client)

        return self.run(ask())

    def both_answer(self, prompt: Any, **sampling: Any) -> tuple[Answered, Answered]:
        """The same request at the decode node and at the oracle."""
        here = self.ask(self.decode, lambda client: answer(client, prompt, **sampling))
        there = self.ask(self.oracle, lambda client: answer(client, prompt, **sampling))
        return here, there

    def poison(self, node: NodeProcess) -> None:
        poison(node.pid)

    def check_clean(self) -> None:
        """Both ledgers: nothing but free and cached blocks left, no lease, no read, no request."""
        self.run(self._until_clean())

    async def _until_clean(self) -> None:
        for node in (*self.cluster.nodes, *self._oracle.nodes):
            if not node.running:
                continue
            async with Client(node.address) as client:
                for _ in range(int(CLEAN_S / 0.05)):
                    reply = await client.ledger()
                    if reply.clean:
                        break
                    await asyncio.sleep(0.05)
                assert reply.clean, f"{node.name}: {reply.ledger}"


async def answer(client: Client, prompt: Any, **sampling: Any) -> Answered:
    generation = client.generate(prompt, **sampling)
    async for _ in generation:
        pass
    assert generation.finished is not None
    return Answered(generation.tokens, generation.text, generation.finished)


@contextmanager
def live_cluster(prefill: int = 1, decode: int = 1, **arguments: Any) -> Iterator[Live]:
    with asyncio.Runner() as runner:
        live = Live(runner, Cluster(prefill, decode, **arguments), Cluster(0, 0, both=1, **arguments))
        try:
            live.run(live.start())
            yield live
        finally:
            live.run(live.stop())


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's coded cluster records."""
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def coded_cluster(recordings: Path) -> Iterator[Live]:
    """1P + 1D and an oracle, coded engine over real NIXL: every byte read is checked, every token depends on all."""
    options = {"engine": "coded", "kv_blocks": 512, "prefill_chunk": 64, "record": str(recordings)}
    with live_cluster(options=options) as live:
        yield live


@pytest.fixture
def coded(coded_cluster: Live) -> Iterator[Live]:
    yield coded_cluster
    coded_cluster.check_clean()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama: two layers, real tokenizer file, seed 0."""
    from pdbus.nodes.models.random_llama import write_random_llama

    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def torch_cluster(tiny_llama: Path) -> Iterator[Live]:
    """1P + 1D and an oracle, torch engine, `--deterministic`: tokens are to be equal bitwise."""
    options = {"model": str(tiny_llama), "deterministic": True, "kv_blocks": 256, "prefill_chunk": 64}
    with live_cluster(options=options) as live:
        yield live


@pytest.fixture
def deterministic(torch_cluster: Live) -> Iterator[Live]:
    yield torch_cluster
    torch_cluster.check_clean()


@pytest.fixture(scope="module")
def fast(tiny_llama: Path) -> Iterator[Live]:
    """1P + 1D and an oracle, torch engine as people run it."""
    with live_cluster(options={"model": str(tiny_llama), "kv_blocks": 256}) as live:
        yield live
        live.check_clean()
