"""The vLLM servers behind a gateway: who is next, and who is left out for a while."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.nodes.config import node_name

from ..endpoints import Endpoint

OF_NAMES = "--prefiller-name"
DOWN_NS = 2_000_000_000  # how long one that could not be reached is asked only when nobody else is there


class Server(NamedTuple):
    """`name`: on the bus, '' where it does not matter."""

    url: str
    name: str = ""


class Turns:
    """Servers of one kind, asked in turn."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)
        self._next = 0
        self._down_until: dict[Server, int] = {}

    def next(self, now_ns: int, tried: Collection[Server] = ()) -> Server | None:
        """One that was not tried, rather one that is not down; None: all were."""
        order = [self.servers[(self._next + i) % len(self.servers)] for i in range(len(self.servers))]
        left = [server for server in order if server not in tried]
        if not left:
            return None
        chosen = next((server for server in left if self._down_until.get(server, 0) <= now_ns), left[0])
        self._next = (self.servers.index(chosen) + 1) % len(self.servers)
        return chosen

    def down(self, server: Server, now_ns: int) -> None:
        self._down_until[server] = now_ns + DOWN_NS


def decode_servers(endpoints: Sequence[Endpoint]) -> tuple[Server, ...]:
    return tuple(Server(f"http://{endpoint}") for endpoint in dict.fromkeys(endpoints))


def prefill_servers(endpoints: Sequence[Endpoint], names: Sequence[str] = ()) -> tuple[Server, ...]:
    """`names` as their connectors have them. Needed where there are several: a decode server must know which of them
    was asked. Raises ConfigError (`--prefiller-name`)."""
    for name in names:
        try:
            node_name(name)
        except ValueError as e:
            raise ConfigError(OF_NAMES, str(e)) from None
    if len(names) != len(endpoints) and (names or len(endpoints) > 1):
        problem = f"{len(names)} for {len(endpoints)} prefill servers: give each the name that its connector has"
        raise ConfigError(OF_NAMES, problem)
    named = names or [""] * len(endpoints)
    return tuple(Server(f"http://{endpoint}", name) for endpoint, name in zip(endpoints, named, strict=True))
