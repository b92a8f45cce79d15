"""Keys on real nodes: the right tokens with them, no link after a key was revoked, a key replaced under load."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from zmq.utils import z85

from pdbus.bus.client import Client, Generation
from pdbus.bus.endpoint import Endpoint
from pdbus.bus.errors import Broken, RequestError
from pdbus.bus.keys import Key
from pdbus.bus.messages import Cancel, Cancelled, Credit
from pdbus.nodes.cluster import Cluster, http_ok
from pdbus.nodes.node_process import NodeProcess, descendants

from .conftest import answer
from .gateway_process import gateway_of
from tests.key_folders import key_folder, keyring

pytestmark = pytest.mark.live

PROMPT = [i % 200 for i in range(150)]
CODED = {"engine": "coded", "kv_blocks": 256, "prefill_chunk": 64, "coded_step_ms": 2}
LONG_TOKENS = 3000  # some 8 s
WAIT_S = 30.0
KEYS_READ_S = 1.5  # a node looks at its list every second


class Keyed:
    """1P + 2D with keys on, and a loop."""

    def __init__(self, runner: asyncio.Runner, path: Path) -> None:
        self.runner = runner
        self.recordings, self.logs = path / "recordings", path / "logs"
        self.logs.mkdir()
        options = {**CODED, "keys": str(path / "keys"), "record": str(self.recordings)}
        self.cluster = Cluster(1, 2, options=options, logs=self.logs)
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
            while not await true():  # noqa: ASYNC110
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


def test_only_an_operator_drains_a_node(keyed: Keyed) -> None:
    async def ask() -> None:
        decode = keyed.cluster.decode[0]
        async with keyed.client(decode) as client:
            with pytest.raises(RequestError, match="it may not send connect"):
                await client.connect(["tcp://127.0.0.1:9"])
            with pytest.raises(RequestError, match="it may not send drain"):
                await client.drain()
            status = await client.status()
            assert status["ready"]
            assert status["metrics"]["bus_forbidden_total"] >= 2

    keyed.runner.run(ask())


def test_http_of_a_node_with_keys_answers(keyed: Keyed) -> None:
    """Its process has the node's key, and what it asks for is the node's own will."""

    async def ask() -> bool:
        return await http_ok(f"{keyed.cluster.decode[0].http}/v1/models")

    assert keyed.runner.run(ask())


async def load(keyed: Keyed, node: NodeProcess, stop: asyncio.Event) -> list[tuple[list[int], bool]]:
    """Fresh prompts one after the other: tokens and whether another node prefilled. The coded engine checks each."""
    said = []
    async with keyed.client(node) as client:
        while not stop.is_set():
            prompt = [len(said) % 200, *PROMPT]
            got = await answer(client, prompt, max_tokens=4)
            assert got.finished.reason == "length", got.finished
            said.append((got.tokens, got.finished.timeline.remote))
            await asyncio.sleep(0.02)
    return said


def test_a_key_is_replaced_under_load(keyed: Keyed) -> None:
    """Both keys are allowed while the node starts again; requests go on meanwhile, and remotely again afterwards."""

    async def replace() -> None:
        decode, prefill = keyed.cluster.decode[0], keyed.cluster.prefill[0]
        stop = asyncio.Event()
        loading = asyncio.create_task(load(keyed, decode, stop))
        (old,) = keyed.folder.allowed().named(prefill.name)
        made = keyed.folder.make(prefill.name, replace=True)
        keyed.folder.allow(Key(name=old.name, role=old.role, public=made.public, addresses=old.addresses))
        prefill.signal(signal.SIGTERM)
        assert await prefill.wait() == 0
        await keyed.cluster.restart(prefill)
        keyed.folder.revoke(old)
        await keyed.until(lambda: _is(keyed, decode, prefill.name, "up"))

        fresh = iter(range(200))

        async def remote() -> bool:
            async with keyed.client(decode) as client:
                return (await answer(client, [next(fresh), 7, *PROMPT], max_tokens=2)).finished.timeline.remote

        await keyed.until(remote)
        stop.set()
        said = await loading
        assert said and len({len(tokens) for tokens, _ in said}) == 1

    keyed.runner.run(replace())


async def _is(keyed: Keyed, at: NodeProcess, name: str, state: str) -> bool:
    return (await keyed.peers(at)).get(name) == state


def test_a_revoked_decode_node_loses_its_links(keyed: Keyed, tmp_path: Path) -> None:
    """Within a second or two, though its connection stands: and it still answers by itself."""

    async def revoke() -> None:
        prefill, decode = keyed.cluster.prefill[0], keyed.cluster.decode[1]
        await keyed.until(lambda: _is(keyed, prefill, decode.name, "up"))
        (key,) = keyed.folder.allowed().named(decode.name)
        shutil.copytree(keyed.folder.path, tmp_path / "before")  # of a client that has not heard of it
        keyed.folder.revoke(key)
        await keyed.until(lambda: _is_not_up(keyed, prefill, decode.name))
        async with keyed.client(prefill) as client:
            assert (await client.ledger()).clean
        async with Client(decode.address, keys=tmp_path / "before" / "client.key") as client:

            async def knows() -> bool:
                peers = {peer["name"]: peer["state"] for peer in (await client.status())["peers"]}
                return peers[prefill.name] not in ("up", "suspect")

            await keyed.until(knows)  # no request waits for an answer that cannot come
            said = await answer(client, [9, 9, *PROMPT], max_tokens=4)
        assert said.finished.reason == "length" and not said.finished.timeline.remote

    keyed.runner.run(revoke())


async def _is_not_up(keyed: Keyed, at: NodeProcess, name: str) -> bool:
    return (await keyed.peers(at)).get(name) not in ("up", "suspect")


def test_what_a_revoked_client_had_running_ends(keyed: Keyed, tmp_path: Path) -> None:
    """It would hold its blocks to its deadline."""

    async def revoke() -> None:
        decode = keyed.cluster.decode[0]
        key_folder(keyed.folder.path, {"eve": "client"})
        await asyncio.sleep(KEYS_READ_S)
        async with Client(decode.address, keys=keyed.folder.path / "eve.key") as eve:
            generation = eve.generate(PROMPT, max_tokens=LONG_TOKENS)
            await anext(generation)
            reading = asyncio.create_task(_read(generation))
            keyed.folder.revoke(*keyed.folder.allowed().named("eve"))

            async def over() -> bool:
                async with keyed.client(decode) as client:
                    return not (await client.status())["requests"]

            await keyed.until(over)
            with pytest.raises(RequestError, match="does not allow the key of eve"):
                await eve.status()
            with pytest.raises(Broken, match="your key was revoked here"):
                await reading
            assert len(generation.tokens) < LONG_TOKENS

    keyed.runner.run(revoke())


def test_no_client_speaks_for_anothers_request(keyed: Keyed) -> None:
    """What names one stands in the status, which every client may read."""

    async def pose() -> None:
        decode = keyed.cluster.decode[0]
        async with keyed.client(decode) as alice, keyed.client(decode, "ops") as ops:
            generation = alice.generate(PROMPT, max_tokens=300, ignore_eos=True)
            await anext(generation)
            [row] = (await ops.status())["requests"]
            incarnation, _, client_id = row["client"].partition(":")
            own = keyring(keyed.folder, "ops")
            poser = Endpoint("poser", bytes.fromhex(incarnation), lambda received: None, keyring=own)
            try:
                link = poser.connect(decode.address)
                for message in (Cancel(client_id=client_id), Credit(client_id=client_id, index=1 << 30)):
                    with pytest.raises(RequestError, match="asked with another key"):
                        await poser.request(link, message, Cancelled, 10)
            finally:
                poser.close()
            await _read(generation)
            assert generation.finished is not None and generation.finished.reason == "length"

    keyed.runner.run(pose())


async def _read(generation: Generation) -> None:
    async for _ in generation:
        pass


def test_a_gateway_has_a_clients_key_and_bearer_keys(keyed: Keyed, tmp_path: Path) -> None:
    """It finds the decode nodes through the prefill node, each by its own key."""
    http_keys = tmp_path / "http.keys"
    http_keys.touch(0o600)
    http_keys.write_text("alice sk-0123456789abcdef\n")
    words = (
        "--join", keyed.cluster.prefill[0].address,
        "--keys", str(keyed.folder.path / "client.key"), "--http-keys", str(http_keys),
    )  # fmt: skip

    async def ask() -> None:
        async with gateway_of(*words) as gate:
            assert (await gate.complete(PROMPT)).status_code == 401
            gate.web.headers["Authorization"] = "Bearer sk-0123456789abcdef"
            said = await gate.complete(PROMPT)
            async with keyed.client(keyed.cluster.decode[0]) as client:
                here = await answer(client, PROMPT, max_tokens=8, ignore_eos=True)
            assert said.status_code == 200 and said.json()["choices"][0]["token_ids"] == here.tokens

    keyed.runner.run(ask())


def test_no_secret_is_anywhere_but_in_its_file(keyed: Keyed) -> None:
    """Not in arguments, environments, logs, recordings, status: in hexadecimal, as bytes, or as ZeroMQ writes it."""
    secrets = [keyed.folder.own(name).secret for name in keyed.folder.names()]
    written = [form for s in secrets for form in (s, s.hex().encode(), z85.encode(s))]

    async def status() -> str:
        async with keyed.client(keyed.cluster.decode[0]) as client:
            return str(await client.status())

    said = [keyed.runner.run(status()).encode()]
    for node in keyed.cluster.nodes:
        for pid in (node.pid, *descendants(node.pid)):
            said += [Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
    files = [file for folder in (keyed.recordings, keyed.logs) for file in folder.rglob("*") if file.is_file()]
    said += [file.read_bytes() for file in files]
    assert len(files) > len(keyed.cluster.nodes)
    assert not [form for form in written for text in said if form in text]


def test_an_operator_drains_a_node(keyed: Keyed) -> None:
    """The last test here: the node has ended."""

    async def drain() -> int:
        decode = keyed.cluster.decode[0]
        async with keyed.client(decode, "ops") as client:
            await client.drain()
        return await decode.wait()

    assert keyed.runner.run(drain()) == 0
