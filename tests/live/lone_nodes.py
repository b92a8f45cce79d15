"""Nodes started one by one, each with settings of its own: for tests of how they find, refuse and leave each other."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from pdbus.bus.client import Client
from pdbus.bus.ports import is_free
from pdbus.nodes.cluster import NODE_COMMAND, READY_S, command_line, is_ready
from pdbus.nodes.node_process import NodeProcess

from .conftest import Answered, answer

T = TypeVar("T")
POLL_S = 0.02
WAIT_S = 30.0  # for anything that has to come about; the machine may be busy
CODED = {"engine": "coded", "kv_blocks": 128, "prefill_chunk": 32, "threads": 1}


class Lone:
    """Coded nodes and an HTTP client, in a loop of their own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.nodes: list[NodeProcess] = []
        self.web = httpx.Client(timeout=30, trust_env=False)

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self._runner.run(wait())

    def start(self, role: str, name: str, *, http: bool = True, **settings: Any) -> NodeProcess:
        """Spawns it; `ready` waits for it."""
        port, web = free_ports(3), free_ports(1)
        node = NodeProcess(
            name, role,
            (*NODE_COMMAND, *command_line({
                "role": role, "name": name, "listen": f"tcp://127.0.0.1:{port}",
                "http_port": web if http else 0, **CODED, **settings,
            })),
            address=f"tcp://127.0.0.1:{port}", http=f"http://127.0.0.1:{web}" if http else "",
        )  # fmt: skip
        self.nodes.append(node)
        self.run(node.start())
        return node

    def ready(self, *nodes: NodeProcess) -> None:
        """Waits until all would serve a request."""

        async def all_ready() -> None:
            await asyncio.gather(*(until(lambda node=node: is_ready(node), READY_S) for node in nodes))  # type: ignore[misc]

        self.run(all_ready())

    def ask(self, node: NodeProcess, question: Callable[[Client], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with Client(node.address) as client:
                return await question(client)

        return self.run(ask())

    def answer(self, node: NodeProcess, prompt: Any, **sampling: Any) -> Answered:
        return self.ask(node, lambda client: answer(client, prompt, **sampling))

    def peers(self, node: NodeProcess) -> list[dict[str, Any]]:
        peers: list[dict[str, Any]] = self.ask(node, lambda client: client.status())["peers"]
        return peers

    def until_peer(self, node: NodeProcess, **wanted: Any) -> dict[str, Any]:
        """Waits for a peer of `node` that shows these values."""

        async def find() -> dict[str, Any]:
            async with Client(node.address) as client:
                return await until(lambda: matching(client, wanted))

        return self.run(find())

    def post(self, node: NodeProcess, path: str, body: Any) -> dict[str, Any]:
        response = self.web.post(node.http + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def add(self, node: NodeProcess, *endpoints: str) -> list[dict[str, Any]]:
        body = self.post(node, "/add_remote_prefill_eps", {"endpoints": endpoints})
        return body["results"]  # type: ignore[no-any-return]

    def remove(self, node: NodeProcess, *endpoints: str) -> list[dict[str, Any]]:
        body = self.post(node, "/remove_remote_prefill_eps", {"endpoints": endpoints})
        return body["results"]  # type: ignore[no-any-return]

    def listed(self, node: NodeProcess) -> list[dict[str, Any]]:
        endpoints: list[dict[str, Any]] = self.web.get(f"{node.http}/remote_prefill_eps").json()["endpoints"]
        return endpoints

    def check_clean(self) -> None:
        """No lease, read or request is left anywhere, and every node runs."""
        for node in self.nodes:
            assert node.running, f"{node.name} has ended: {node.tail}"
            self.ask(node, lambda client: until(lambda: is_clean(client)))

    def stop(self, *nodes: NodeProcess) -> None:
        """Ends these, or all: drained, since nothing runs any more; what does not end is killed."""
        ending = nodes or tuple(self.nodes)
        for node in ending:
            node.signal(signal.SIGTERM)
        self.run(ended(ending))
        for node in ending:
            node.kill_all()
            self.run(node.wait())
            self.run(node.close())
            self.nodes.remove(node)

    def close(self) -> None:
        self.stop()
        self.web.close()


async def ended(nodes: Sequence[NodeProcess]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(node.wait() for node in nodes))


async def until(found: Callable[[], Awaitable[T]], within_s: float = WAIT_S) -> T:
    """What `found` gives once it gives something."""
    async with asyncio.timeout(within_s):
        while not (result := await found()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return result


async def matching(client: Client, wanted: dict[str, Any]) -> dict[str, Any]:
    peers = (await client.status())["peers"]
    return next((peer for peer in peers if all(peer[key] == value for key, value in wanted.items())), {})


async def is_clean(client: Client) -> bool:
    return (await client.ledger()).clean


def free_ports(count: int) -> int:
    """The first of so many free ones in a row, below what kernels give to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        if all(is_free("127.0.0.1", port + i) for i in range(count)):
            return port


L = TypeVar("L", bound=Lone)


@contextmanager
def lone_nodes(kind: type[L] = Lone) -> Iterator[L]:  # type: ignore[assignment]
    with asyncio.Runner() as runner:
        lone = kind(runner)
        try:
            yield lone
        finally:
            lone.close()
