"""Keys on real nodes: the right tokens with them, no link after a key was revoked, a key replaced under load."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError, RequestError
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keys import Key
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.node_process import NodeProcess

from tests.key_folders import key_folder

from .conftest import answer

pytestmark = pytest.mark.live

PROMPT = [i % 200 for i in range(150)]
CODED = {"engine": "coded", "kv_blocks": 256, "prefill_chunk": 64}
WAIT_S = 30.0


class Keyed:
    """1P + 2D with keys on, and a loop."""

    def __init__(self, runner: asyncio.Runner, path: Path) -> None:
        self.runner = runner
        self.cluster = Cluster(1, 2, options={**CODED, "keys": str(path / "keys")})
        nodes = self.cluster.nodes
        roles = {**{node.name: node.role for node in nodes}, "client": "client", "ops": "operator"}
        self.folder = key_folder(path / "keys", roles, {node.name: node.address for node in nodes})

    def client(self, node: NodeProcess, name: str = "client") -> Client:
        return Client(node.address, keys=self.folder.path / f"{name}.key")

    async def peers(self, node: NodeProcess) -> dict[str, str]:
        async with self.client(node) as client:
            return {peer["name"]: peer["state"] for peer in (await client.status())["peers"]}

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await true():
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with asyncio.Runner() as runner:
        made = Keyed(runner, tmp_path_factory.mktemp("keyed"))
        try:
            runner.run(made.cluster.start())
            yield made
        finally:
            runner.run(made.cluster.stop(timeout_s=20))


def test_tokens_are_right_and_come_from_the_prefill_node(keyed: Keyed) -> None:
    """The coded engine ends a request at the first wrong byte of KV."""

    async def ask() -> None:
        decode = keyed.cluster.decode[0]
        async with keyed.client(decode) as client:
            said = await answer(client, PROMPT, max_tokens=8)
        async with keyed.client(keyed.cluster.decode[1]) as client:
            other = await answer(client, PROMPT, max_tokens=8)
        assert said.finished.reason == "length" and said.finished.timeline.remote
        assert said.tokens == other.tokens

    keyed.runner.run(ask())


def test_who_has_no_key_hears_that_one_is_asked_for(keyed: Keyed) -> None:
    async def ask() -> None:
        with pytest.raises(RequestError, match="asks for a key"):
            async with Client(keyed.cluster.decode[0].address):
                pass

    keyed.runner.run(ask())
