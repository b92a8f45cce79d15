"""A stranger announces a frame of 3 GiB, wherever a node listens: it costs nothing, and he is cut off.

A node in use goes on answering. What strangers say that can be read: test_endpoint.py, test_curve.py, tests/fuzz.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.keyring import Keyring
from pdbus.bus.messages import Status, StatusReply
from pdbus.bus.publisher import Publisher

from tests.key_folders import key_folder, keyring, listens
from tests.loop import on_loop

ANY_PORT = "tcp://127.0.0.1:0"
HUGE_BYTES = 3 << 30
SENT_BYTES = 32 << 20  # of it, if he is let
RSS_BYTES_MAX = 20 << 20
PIECE = bytes(1 << 16)
COMMAND, MESSAGE = b"\x06", b"\x02"  # flags of a frame whose length takes 8 bytes
CALLS_A = {"bus": b"DEALER", "events": b"SUB"}


class Node:
    """An endpoint and a publisher, with keys or without."""

    def __init__(self, ring: Keyring | None) -> None:
        self.endpoint = Endpoint("p1", os.urandom(16), self._hear, keyring=ring)
        self._publisher = Publisher("p1", bytes(16), context=self.endpoint.context, keyring=ring)
        self.addresses = {"bus": self.endpoint.bind(ANY_PORT), "events": self._publisher.bind(ANY_PORT)}

    def _hear(self, received: Received) -> None:
        self.endpoint.send(received.link, StatusReply(status={"ok": True}), cause=received.header.seq)

    def close(self) -> None:
        self._publisher.close()
        self.endpoint.close()


@contextmanager
def node(ring: Keyring | None = None) -> Iterator[Node]:
    made = Node(ring)
    try:
        yield made
    finally:
        made.close()


async def answers(address: str, ring: Keyring | None = None) -> bool:
    friend = Endpoint("friend", os.urandom(16), lambda received: None, keyring=ring)
    try:
        reply = await friend.request(friend.connect(address), Status(), StatusReply, 5)
        return reply.status == {"ok": True}
    finally:
        friend.close()


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(socket_type: bytes) -> bytes:
    """The NULL mechanism's whole handshake."""
    said = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return b"\x04" + bytes([len(said)]) + said


async def announce(address: str, before: bytes, flags: bytes) -> int:
    """How much the process grew by a stranger who sends `before`, then a frame of HUGE_BYTES, until he is cut off."""
    process = psutil.Process()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    rss = process.memory_info().rss
    try:
        with suppress(ConnectionError):
            writer.write(before + flags + HUGE_BYTES.to_bytes(8, "big"))
            for _ in range(SENT_BYTES // len(PIECE)):
                writer.write(PIECE)
                await writer.drain()
        with suppress(ConnectionError):
            async with asyncio.timeout(30):
                while await reader.read(1 << 16):
                    pass
    finally:
        writer.close()
    return process.memory_info().rss - rss


@pytest.mark.parametrize("where", ["bus", "events"])
def test_a_huge_frame_before_the_handshake_with_keys(tmp_path: Path, where: str) -> None:
    folder = key_folder(tmp_path / "keys", {"p1": "prefill", "friend": "client"})

    @on_loop
    async def check() -> None:
        with node(keyring(folder, "p1")) as n:
            listens(folder, "p1", n.addresses["bus"])
            assert await announce(n.addresses[where], greeting(b"CURVE"), COMMAND) < RSS_BYTES_MAX
            assert await answers(n.addresses["bus"], keyring(folder, "friend"))

    check()


@pytest.mark.parametrize("where", ["bus", "events"])
@pytest.mark.parametrize("shaken", [False, True], ids=["before the handshake", "after it"])
def test_a_huge_frame_without_keys(where: str, shaken: bool) -> None:
    @on_loop
    async def check() -> None:
        with node() as n:
            before = greeting(b"NULL") + (ready(CALLS_A[where]) if shaken else b"")
            assert await announce(n.addresses[where], before, MESSAGE if shaken else COMMAND) < RSS_BYTES_MAX
            assert await answers(n.addresses["bus"])

    check()
