"""Nodes named by host and port, as `--decoder-host` and `--prefiller-host` do: found over HTTP, then used over the bus.

Decode nodes join the gateway; each of its decode nodes is made to join the prefill nodes, again after a restart. A port
may also be a node's bus port. An endpoint that does not answer is asked again for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from pdbus.bus.errors import ConfigError, PdError, RequestError
from pdbus.bus.ports import parse_address
from pdbus.nodes.http.peers import BUS_PORT, Info, fetch_info

from .fleet import Fleet
from .fleet_node import FleetNode

RETRY_S = 1.0

log = logging.getLogger("pdbus.gateway")


class Endpoint(NamedTuple):
    """A host and a port of a node, HTTP's or the bus's."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def paired(hosts: Sequence[str], ports: Sequence[str], host_setting: str, port_setting: str) -> tuple[Endpoint, ...]:
    """Hosts with ports in order; one host goes with all ports, and one port with all hosts. Raises ConfigError."""
    hosts, ports = _parts(hosts), _parts(ports)
    if not hosts and not ports:
        return ()
    if not ports:
        raise ConfigError(port_setting, f"is needed for {host_setting}")
    hosts = hosts or ["localhost"]
    if len(hosts) != len(ports) and 1 not in (len(hosts), len(ports)):
        raise ConfigError(port_setting, f"{len(ports)} ports for {len(hosts)} hosts: give one each, or one for all")
    count = max(len(hosts), len(ports))
    hosts, ports = hosts * (count // len(hosts)), ports * (count // len(ports))
    return tuple(_endpoint(host, port, host_setting, port_setting) for host, port in zip(hosts, ports, strict=True))


def _parts(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _endpoint(host: str, port: str, host_setting: str, port_setting: str) -> Endpoint:
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(port_setting, f"must be a port from 1 to 65535, got {port!r}")
    found = Endpoint(host.strip("[]"), int(port))
    try:
        parse_address(f"tcp://{found}", host_setting)
    except ConfigError:
        raise ConfigError(host_setting, f"must be a host name or address, got {host!r}") from None
    return found


class Endpoints:
    """Finds them and keeps them used."""

    def __init__(self, fleet: Fleet, decoders: Sequence[Endpoint], prefillers: Sequence[Endpoint]) -> None:
        self._fleet = fleet
        self._prefillers: dict[str, str] = {}  # bus addresses of those found, with their names
        self._tasks = [
            *(asyncio.ensure_future(self._find(endpoint, decodes=True)) for endpoint in decoders),
            *(asyncio.ensure_future(self._find(endpoint, decodes=False)) for endpoint in prefillers),
        ]
        self._asking: dict[tuple[bytes, str], asyncio.Task[None]] = {}  # by a node's life and who it is to join

    def looked(self, node: FleetNode) -> None:
        """A decode node has said how it is: make it join the prefill nodes that it does not know."""
        peers = node.status.get("peers", ())
        known = {peer.get("name") for peer in peers} | {peer.get("address") for peer in peers}
        for address, name in self._prefillers.items():
            if not known & {address, name} and (node.incarnation, address) not in self._asking:
                self._asking[node.incarnation, address] = asyncio.ensure_future(self._join(node, address))

    def close(self) -> None:
        for task in (*self._tasks, *self._asking.values()):
            task.cancel()

    async def _find(self, endpoint: Endpoint, *, decodes: bool) -> None:
        told = ""
        while True:
            try:
                found = await _info_of(endpoint)
                need_role(found, decodes=decodes)
            except PdError as e:
                if str(e) != told:
                    log.info("%s %s", endpoint, e)
                    told = str(e)
                await asyncio.sleep(RETRY_S)
                continue
            if decodes:
                self._fleet.join(found.address)
            else:
                self._prefillers[found.address] = found.name
            return

    async def _join(self, node: FleetNode, address: str) -> None:
        try:
            outcomes = await node.client.connect([address])
            if not outcomes[0].ok:
                log.info("%s does not join %s: %s", node.name, address, outcomes[0].detail)
        except PdError as e:
            log.info("%s does not join %s: %s", node.name, address, e)
        await asyncio.sleep(RETRY_S)  # for its status to show it
        self._asking.pop((node.incarnation, address), None)


async def _info_of(endpoint: Endpoint) -> Info:
    """Of the node behind a port; name and role are '' behind a bus port. Raises RequestError."""
    try:
        return await fetch_info(f"http://{endpoint}")
    except RequestError as e:
        if e.code == BUS_PORT:
            return Info(name="", address=f"tcp://{endpoint}")
        raise


def need_role(info: Info, *, decodes: bool) -> None:
    """Raises RequestError where a decode node is to be and a prefill node is, or the other way round."""
    if info.role == ("prefill" if decodes else "decode"):
        setting = "--decoder-port" if decodes else "--prefiller-port"
        raise RequestError(f"is a {info.role} node, {info.name}: {setting} is for others")
