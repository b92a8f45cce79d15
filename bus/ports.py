"""Addresses and ports: what a user may write, what is free, and what may be told to others."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple, TypeVar

from .errors import ConfigError

BUS_PORT = 7400
HTTP_PORT = 8080
TAKEN = "taken"
TRIPLES_MAX = 100  # how many triples after the default are tried: more nodes than that on a machine is a mistake

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\[\]/:\s]+):(\d{1,5})")
HOST_PARTS = "between its dots must be 1 to 63 characters"
T = TypeVar("T")


class Address(NamedTuple):
    """`str()` gives it back as ZeroMQ takes it. `host` has no brackets; '*' is every interface."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class Triple(NamedTuple):
    """The three ports of a node."""

    bus: int
    events: int
    replay: int


def parse_address(text: str, setting: str, *, port_zero: bool = False) -> Address:
    """`tcp://host:port`, an IPv6 host in brackets. Raises ConfigError naming `setting`.

    Port 0 (any free one) only with `port_zero`: an address to listen on, not one to call.
    """
    match = _TCP.fullmatch(text)
    if match is None:
        raise ConfigError(setting, f"must be like tcp://host:port (IPv6: tcp://[::1]:7400), got {text!r}")
    host, port = match[1].strip("[]"), int(match[2])
    if port > 65535 or (port == 0 and not port_zero):
        raise ConfigError(setting, f"the port must be {0 if port_zero else 1} to 65535, got {port} in {text!r}")
    if match[1].startswith("["):
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ConfigError(setting, f"{host!r} is no IPv6 address, in {text!r}") from None
    elif not may_be_host(host):
        raise ConfigError(setting, f"{host!r:.80} can be no host: {HOST_PARTS}")
    return Address(host, port)


def may_be_host(host: str) -> bool:
    """Whether it can be looked up at all: with an empty or a long part that ends in an error of its own kind."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    return host in ("*", "0.0.0.0", "::")  # noqa: S104


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is taken to be reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def unknown_host(host: str) -> str:
    """Why nobody here knows `host`; '' for an address, and for a name that resolves."""
    if not may_be_host(host):
        return HOST_PARTS
    try:
        socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as e:
        return e.strerror or str(e)
    return ""


def advertised(bound: str, asked: str = "", *, setting: str = "--advertise") -> str:
    """What peers are told to call: what was asked for, else where we are bound, a wildcard replaced by our address.

    Raises ConfigError when a wildcard was asked for: nobody can call that.
    """
    if asked:
        address = parse_address(asked, setting)
        if is_wildcard(address.host):
            raise ConfigError(setting, f"{asked} is a wildcard: name the address that other nodes reach this one at")
        return str(address)
    address = parse_address(bound, "--listen")
    return str(Address(own_host(), address.port)) if is_wildcard(address.host) else bound


def own_host() -> str:
    """The address that this machine speaks to others from; 127.0.0.1 when it has none. Sends nothing."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: connecting a UDP socket only picks a route
            host: str = probe.getsockname()[0]
            return host
        except OSError:
            return "127.0.0.1"


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be bound on `host` now. Someone may still take it before we do."""
    return not bind_problem(host, port)


def bind_problem(host: str, port: int) -> str:
    """Why `port` cannot be bound on `host` now; '' when it can."""
    host = "" if host == "*" else host
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        return e.strerror or str(e)
    family, _, _, _, at = found[0]
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does: a closed port's past is no bar
        try:
            probe.bind(at)
        except OSError as e:
            return TAKEN if e.errno == errno.EADDRINUSE else e.strerror or str(e)
    return ""


def free_triples(host: str, start: int = BUS_PORT) -> Iterator[Triple]:
    """Triples of ports that look free, from `start` up in steps of three."""
    for first in range(start, min(start + 3 * TRIPLES_MAX, 65534), 3):
        triple = Triple(first, first + 1, first + 2)
        if all(is_free(host, port) for port in triple):
            yield triple


def free_port(host: str, start: int = HTTP_PORT) -> int:
    """The first port from `start` that looks free. Raises ConfigError when there is none near."""
    for port in range(start, min(start + TRIPLES_MAX, 65536)):
        if is_free(host, port):
            return port
    raise ConfigError("--http-port", f"no free port from {start} to {start + TRIPLES_MAX - 1} on {host}")


def need_free(host: str, port: int, setting: str) -> None:
    """Raises ConfigError naming `setting` and the port when it was asked for and cannot be bound."""
    problem = bind_problem(host, port) if port else ""
    if problem == TAKEN:
        raise ConfigError(setting, f"port {port} on {host} is taken: stop who listens there, or choose another")
    if problem:
        raise ConfigError(setting, f"cannot listen on {host}, port {port}: {problem}")


def bind_first_free(bind: Callable[[Triple], T], host: str, start: int = BUS_PORT, *, setting: str = "--listen") -> T:
    """Call `bind` with one free triple after the other until it does not raise ConfigError, since nodes that start
    together race for the same ports. `bind` must undo what it has bound before it raises."""
    for triple in free_triples(host, start):
        try:
            return bind(triple)
        except ConfigError:
            continue
    raise ConfigError(setting, f"no free triple of ports from {start} to {start + 3 * TRIPLES_MAX - 1} on {host}")
