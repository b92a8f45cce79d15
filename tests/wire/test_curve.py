"""Keys on the wire: who is let in, what each may say, and what becomes of strangers."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from pdbus.bus.client import Client
from pdbus.bus.curve import call
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import ConfigError, RequestError
from pdbus.bus.frames import MESSAGE_BYTES_MAX, pack
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keyring import Keyring
from pdbus.bus.keys import Key
from pdbus.bus.messages import (
    Cancel,
    Cancelled,
    Drain,
    Error,
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
        return await endpoint.request(endpoint.connect(self.node.address), Status(), StatusReply, 5)

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path


@contextmanager
def cluster(path: Path) -> Iterator[Cluster]:
    made = Cluster(path)
    try:
        yield made
    finally:
        made.close()


# ---------------------------------------------------------------- who is let in


@on_loop
async def _asks(keys: Path) -> None:
    with cluster(keys) as c:
        assert (await c.status("alice")).status == {"ok": True}
        assert c.node.endpoint.public_of(c.node.heard[0].link) == c.folder.own("alice").public


def test_a_key_on_the_list_is_heard_and_known(keys: Path) -> None:
    _asks(keys)
