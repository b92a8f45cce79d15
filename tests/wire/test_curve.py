"""Keys on the wire: who is let in, what each may say, and what becomes of strangers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdbus.bus.client import Client
from pdbus.bus.curve import call
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import ConfigError, RequestError
from pdbus.bus.frames import MESSAGE_BYTES_MAX, pack
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keys import Key
from pdbus.bus.messages import (
    Cancel,
    Drain,
    Geometry,
    Hello,
    LeaseRenew,
    Message,
    PrefillRequest,
    Sampling,
    Status,
    StatusReply,
    TryId,
    Welcome,
)
from pdbus.bus.publisher import Publisher, Subscriber
from pdbus.bus.wire import Header

from tests.key_folders import key_folder, keyring, listens
from tests.loop import on_loop, until

ANY_PORT = "tcp://127.0.0.1:0"
ROLES = {"p1": "prefill", "d1": "decode", "d2": "decode", "alice": "client", "bob": "client", "ops": "operator"}


class Node:
    """An endpoint with keys, that answers status and welcomes who says hello."""

    def __init__(self, folder: KeyFolder, name: str) -> None:
        self.heard: list[Received] = []
        self.endpoint = Endpoint(name, os.urandom(16), self.hear, keyring=keyring(folder, name))
        self.address = self.endpoint.bind(ANY_PORT)
        listens(folder, name, self.address)

    def hear(self, received: Received) -> None:
        self.heard.append(received)
        if isinstance(received.message, Status):
            self.endpoint.send(received.link, StatusReply(status={"ok": True}), cause=received.header.seq)
        if isinstance(received.message, Hello):
            welcome = Welcome(hello=Hello(role="prefill"))
            self.endpoint.send(received.link, welcome, cause=received.header.seq)

    @property
    def counters(self) -> dict[str, int]:
        return self.endpoint.counters.as_dict()


class Cluster:
    """One node, p1, and whoever calls it."""

    def __init__(self, path: Path) -> None:
        self.folder = key_folder(path / "keys", ROLES)
        self.node = Node(self.folder, "p1")
        self._endpoints = [self.node.endpoint]

    def endpoint(self, key: str, name: str = "", *, folder: KeyFolder | None = None, **more: Any) -> Endpoint:
        made = Endpoint(
            name or key, os.urandom(16), lambda received: None, keyring=keyring(folder or self.folder, key), **more
        )
        self._endpoints.append(made)
        return made

    async def status(self, key: str) -> StatusReply:
        endpoint = self.endpoint(key)
        return await ask(endpoint, endpoint.connect(self.node.address))

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


@contextmanager
def cluster(path: Path) -> Iterator[Cluster]:
    made = Cluster(path)
    try:
        yield made
    finally:
        made.close()


async def refused(asking: Awaitable[object]) -> str:
    """What the asker is told."""
    with pytest.raises(RequestError) as caught:
        await asking
    assert caught.value.code == "forbidden"
    return str(caught.value)


def ask(endpoint: Endpoint, link: str, message: Message | None = None) -> Awaitable[StatusReply]:
    return endpoint.request(link, message or Status(), StatusReply, 5)


# ---------------------------------------------------------------- who is let in


@on_loop
async def test_a_key_on_the_list_is_heard_and_known(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        assert (await c.status("alice")).status == {"ok": True}
        assert c.node.endpoint.public_of(c.node.heard[0].link) == c.folder.own("alice").public


@on_loop
async def test_who_has_no_key_is_told_that_one_is_asked_for(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        stranger = Endpoint("stranger", os.urandom(16), lambda received: None)
        try:
            assert "asks for a key" in await refused(ask(stranger, stranger.connect(c.node.address)))
        finally:
            stranger.close()
        await until(lambda: c.node.counters["handshakes_failed"])
        assert c.node.heard == []


@on_loop
async def test_who_asks_only_after_the_handshake_has_failed_is_told_the_same(tmp_path: Path) -> None:
    """On a busy machine it fails between connecting and sending; then there was only `could not be sent`."""
    with cluster(tmp_path) as c:
        refusals: list[str] = []
        stranger = Endpoint(
            "stranger",
            os.urandom(16),
            lambda received: None,
            on_link_refused=lambda _, problem: refusals.append(problem),
        )
        try:
            link = stranger.connect(c.node.address)
            await until(lambda: refusals)
            assert "asks for a key" in await refused(ask(stranger, link))
        finally:
            stranger.close()


@on_loop
async def test_a_key_that_is_not_on_the_list_is_refused_by_name_and_counted(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        elsewhere = key_folder(tmp_path / "elsewhere", {"eve": "client"})
        elsewhere.allow(c.folder.allowed().named("p1")[0])
        eve = c.endpoint("eve", folder=elsewhere)
        said = await refused(ask(eve, eve.connect(c.node.address)))
        assert f"does not allow the key of eve: its public one is {elsewhere.own('eve').public}" in said
        assert c.node.counters["keys_refused"] == 1 and c.node.heard == []


@on_loop
async def test_a_node_with_another_key_than_the_list_says_is_not_spoken_with(tmp_path: Path) -> None:
    """Who stands at p1's address but has not its secret learns nothing: the hello never leaves."""
    with cluster(tmp_path) as c:
        elsewhere = key_folder(tmp_path / "elsewhere", {"p1": "prefill", "alice": "client"}, {"p1": c.node.address})
        alice = c.endpoint("alice", folder=elsewhere)
        assert "it has no key, or not the one that" in await refused(ask(alice, alice.connect(c.node.address)))
        assert c.node.heard == []


@on_loop
async def test_a_node_without_keys_is_not_spoken_with(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        plain = Endpoint("p1", os.urandom(16), lambda received: None)
        try:
            listens(c.folder, "p1", plain.bind(ANY_PORT))
            alice = c.endpoint("alice")
            assert "it has no key, or not the one" in await refused(ask(alice, alice.connect(plain_address(c.folder))))
        finally:
            plain.close()


def plain_address(folder: KeyFolder) -> str:
    return folder.allowed().named("p1")[-1].addresses[0]


@on_loop
async def test_an_address_without_a_key_is_not_called(tmp_path: Path) -> None:
    with cluster(tmp_path) as c, pytest.raises(ConfigError, match=r"no key of tcp://127\.0\.0\.1:9 in"):
        c.endpoint("alice").connect("tcp://127.0.0.1:9")


@on_loop
async def test_while_a_key_is_replaced_the_one_that_answers_is_found(tmp_path: Path) -> None:
    """The newest is tried first; the node may still run with the old one."""
    with cluster(tmp_path) as c:
        made = c.folder.make("p1", replace=True)
        c.folder.allow(Key(name="p1", role="prefill", public=made.public, addresses=(c.node.address,)))
        async with Client(c.node.address, keys=c.folder.path / "alice.key") as alice:
            assert await alice.status() == {"ok": True}


# ---------------------------------------------------------------- who was let in and is revoked


@on_loop
async def test_a_revoked_key_is_not_heard_on_the_connection_that_it_has(tmp_path: Path) -> None:
    """ZeroMQ asks only at the handshake: the connection itself goes on."""
    with cluster(tmp_path) as c:
        alice = c.endpoint("alice")
        link = alice.connect(c.node.address)
        await ask(alice, link)
        ring = c.node.endpoint.keyring
        assert ring is not None
        c.folder.revoke(*c.folder.allowed().named("alice"))
        assert [key.name for key in ring.reload()] == ["alice"]
        assert await refused(ask(alice, link)) == "this key is not allowed here"
        assert len(c.node.heard) == 1 and c.node.counters["forbidden"] == 1
        assert "does not allow the key of alice" in await refused(c.status("alice"))
        assert c.node.counters["keys_refused"] == 1


@on_loop
async def test_a_list_that_cannot_be_read_leaves_the_last_in_force(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        alice = c.endpoint("alice")
        (c.folder.path / "allowed").write_text("alice client nonsense")
        ring = c.node.endpoint.keyring
        assert ring is not None and ring.reload() == ()
        assert (await ask(alice, alice.connect(c.node.address))).status == {"ok": True}


# ---------------------------------------------------------------- who may say what

TRY = TryId(node="d1", incarnation=bytes(16), request=bytes(16), attempt=1)
PREFILL = PrefillRequest(
    try_=TRY, sampling=Sampling(), have=0, deadline_ms=1000, prompt_tokens=1, prompt_digest=bytes(16)
)
NODE_HELLO = Hello(role="decode", geometry=Geometry())


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("alice", "alice", PREFILL),
        ("alice", "alice", LeaseRenew(entries=())),
        ("alice", "alice", Drain()),
        ("alice", "alice", NODE_HELLO),
        ("alice", "d1", Status()),
        ("bob", "alice", Status()),
        ("d1", "d2", LeaseRenew(entries=())),
        ("d1", "nobody", LeaseRenew(entries=())),
        ("d2", "d2", PREFILL),
        ("d1", "d1", Hello(role="prefill", geometry=Geometry())),
        ("d1", "d1", Status()),
    ],
    ids=lambda value: value.KIND if isinstance(value, Message) else value,
)
def test_what_a_key_may_not_say_is_refused_and_counted(tmp_path: Path, key: str, name: str, message: Message) -> None:
    @on_loop
    async def check() -> None:
        with cluster(tmp_path) as c:
            endpoint = c.endpoint(key, name)
            said = await refused(ask(endpoint, endpoint.connect(c.node.address), message))
            assert key in said or name in said
            assert c.node.heard == [] and c.node.counters["forbidden"] == 1

    check()


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("d1", "d1", PREFILL),
        ("d1", "d1", NODE_HELLO),
        ("alice", "client-1", Status()),
        ("ops", "client-2", Drain()),
        ("p1", "client-3", Drain()),
    ],
    ids=lambda value: value.KIND if isinstance(value, Message) else value,
)
def test_what_a_key_may_say_is_heard(tmp_path: Path, key: str, name: str, message: Message) -> None:
    """p1 here is the node's own HTTP process."""

    @on_loop
    async def check() -> None:
        with cluster(tmp_path) as c:
            endpoint = c.endpoint(key, name)
            endpoint.send(endpoint.connect(c.node.address), message)
            await until(lambda: c.node.heard)
            assert c.node.counters["forbidden"] == 0

    check()


@on_loop
async def test_nobody_speaks_on_another_keys_connection(tmp_path: Path) -> None:
    """Who knew its name could take it over from ROUTER; so it has a secret in it, and the key is looked at."""
    with cluster(tmp_path) as c, raw_dealer(c, "bob") as bob:
        alice = c.endpoint("alice")
        await ask(alice, alice.connect(c.node.address))
        name = bytes.fromhex(c.node.heard[0].link.removeprefix("in:"))
        assert alice.incarnation in name and len(name) > len(alice.incarnation) + 16
        bob.set(zmq.IDENTITY, name)
        bob.connect(c.node.address)
        bob.send_multipart(pack(Header(from_="alice", from_inc=alice.incarnation, seq=2), Status()))
        await until(lambda: c.node.counters["forbidden"])
        assert len(c.node.heard) == 1


@contextmanager
def raw_dealer(c: Cluster, key: str) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    call(socket, keyring(c.folder, key), c.folder.own("p1").public)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


# ---------------------------------------------------------------- who is on the way


GREETING_BYTES = 64


class Relay:
    """Passes bytes on to a node; what the caller sends after the handshake goes through `change` frame by frame."""

    def __init__(self, address: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
        self._port = int(address.rpartition(":")[2])
        self._change = change
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.create_task(self._answers(there, writer))
        self._tasks.add(answers)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(GREETING_BYTES):  # as they come: each side waits for the other's
                back.write(await reader.readexactly(1))
            for _ in range(2):  # HELLO, INITIATE
                back.write(await self._frame(reader))
            held: list[bytes] = []
            while True:
                held.append(await self._frame(reader))
                if changed := self._change(held):
                    back.write(b"".join(changed))
                    held = []

    async def _answers(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await there.read(1 << 16):
                writer.write(data)
        writer.close()

    async def _frame(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(1)
        size = await reader.readexactly(8 if head[0] & 2 else 1)
        return head + size + await reader.readexactly(int.from_bytes(size, "big"))


@pytest.mark.parametrize(
    ("change", "heard"),
    [
        (lambda held: held * 2, ["1"]),
        (lambda held: held[::-1] if len(held) == 2 else [], ["2"]),
        (lambda held: [held[0][:-1] + bytes([held[0][-1] ^ 1])], []),
    ],
    ids=["replayed", "reordered", "changed"],
)
def test_bytes_that_were_tampered_with_end_what_is_heard_there(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], heard: list[str]
) -> None:
    """Nothing is heard twice, late or changed, nor anything that follows, and it is counted: heartbeats do the rest."""

    @on_loop
    async def check() -> None:
        with cluster(tmp_path) as c:
            async with Relay(c.node.address, change) as relay:
                listens(c.folder, "p1", relay.address, c.node.address)
                alice = c.endpoint("alice")
                link = alice.connect(relay.address)
                for client_id in "12":
                    alice.send(link, Cancel(client_id=client_id))
                await until(lambda: c.node.counters["handshakes_failed"])
                alice.send(link, Cancel(client_id="3"))
                await c.status("bob")
                assert [r.message.client_id for r in c.node.heard if isinstance(r.message, Cancel)] == heard

    check()


# ---------------------------------------------------------------- much at once


@on_loop
async def test_the_largest_message_passes(tmp_path: Path) -> None:
    """Encryption adds bytes to a frame, which ZeroMQ counts."""
    with cluster(tmp_path) as c:
        alice = c.endpoint("alice")
        link = alice.connect(c.node.address)
        await ask(alice, link)
        room = MESSAGE_BYTES_MAX - 200
        alice.send(link, Status(), [bytes(room)])
        await until(lambda: len(c.node.heard) == 2)
        assert len(c.node.heard[1].raw[0]) == room


# ---------------------------------------------------------------- published events


@on_loop
async def test_a_revoked_subscriber_is_turned_out_and_others_come_back(tmp_path: Path) -> None:
    """ZeroMQ would go on sending to a connection that stands."""
    with cluster(tmp_path) as c:
        ring = c.node.endpoint.keyring
        assert ring is not None
        publisher = Publisher("p1", bytes(16), context=c.node.endpoint.context, keyring=ring)
        address = publisher.bind(ANY_PORT)
        heard: dict[str, list[int]] = {"alice": [], "bob": []}
        subscribers = {name: subscribe(c, name, address, heard[name]) for name in heard}
        try:
            for subscriber in subscribers.values():
                await subscriber.in_force.wait()
            publisher.publish("node", "up")
            await until(lambda: heard == {"alice": [1], "bob": [1]})
            c.folder.revoke(*c.folder.allowed().named("bob"))
            ring.reload()
            publisher.turn_out()
            await until(lambda: publisher.publish("node", "up") and len(heard["alice"]) > 3)
            assert heard["bob"] == [1]
            await until(lambda: c.node.counters["keys_refused"])
        finally:
            for subscriber in subscribers.values():
                subscriber.close()
            publisher.close()


def subscribe(c: Cluster, name: str, address: str, heard: list[int]) -> Subscriber:
    def secure(socket: zmq.Socket[bytes]) -> None:
        call(socket, keyring(c.folder, name), c.folder.own("p1").public)

    return Subscriber(address, ["node"], lambda header, _: heard.append(header.seq), secure=secure)
