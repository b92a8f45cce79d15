"""Which ports a node ends up with: what was asked for or an error, of the defaults the next free triple."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import ConfigError
from pdbus.bus.keyring import node_keyring
from pdbus.bus.ports import Address, advertised, bind_first_free, is_free, is_wildcard, need_free, parse_address
from pdbus.bus.publisher import Publisher

from .config import NodeConfig

log = logging.getLogger("pdbus")


def make_bus(
    config: NodeConfig,
    incarnation: bytes,
    on_message: Callable[[Received], None],
    on_link_lost: Callable[..., None],
) -> tuple[Endpoint, Publisher]:
    """With keys if there are to be. `on_link_lost` hears the link, and the reason where one is known. Raises
    ConfigError."""
    keyring = node_keyring(config.keys, config.name, config.role) if config.keys else None
    endpoint = Endpoint(
        config.name, incarnation, on_message, on_link_lost=on_link_lost, on_link_refused=on_link_lost, keyring=keyring,
        on_door=partial(_say_of_door, "bus"),
    )  # fmt: skip
    publisher = Publisher(
        config.name, incarnation, context=endpoint.context, keyring=keyring, on_door=partial(_say_of_door, "events")
    )
    return endpoint, publisher


def _say_of_door(what: str, problem: str) -> None:
    if problem:
        log.error("%s: %s", what, problem)
    else:
        log.info("%s: callers are let in again", what)


def bind_bus(config: NodeConfig, endpoint: Endpoint, publisher: Publisher) -> tuple[str, str]:
    """Bind the bus and its events. Returns what others call: (bus address, events address). Raises ConfigError."""
    listen = parse_address(config.listen, "--listen", port_zero=True)
    if config.events_asked:
        wanted = parse_address(config.events, "--events", port_zero=True)
        need_free(wanted.host, wanted.port, "--events")
    if config.listen_asked:
        need_free(listen.host, listen.port, "--listen")
        bus = endpoint.bind(str(listen))
    else:
        bus = bind_first_free(lambda triple: endpoint.bind(str(Address(listen.host, triple.bus))), listen.host)
        if parse_address(bus, "--listen").port != listen.port:
            log.info("port %d is taken: listening on %s", _taken(listen), bus)
    address = advertised(bus, config.advertise if config.advertise_asked else "")
    return address, _reachable(_bind_events(config, publisher, parse_address(bus, "--listen")), address)


def _taken(wanted: Address) -> int:
    """Which of the three ports from the wanted one on is not to be had."""
    return next((p for p in range(wanted.port, wanted.port + 3) if not is_free(wanted.host, p)), wanted.port)


def _bind_events(config: NodeConfig, publisher: Publisher, bus: Address) -> Address:
    """Where it was asked for; else the port after the bus's, or any."""
    if config.events_asked:
        return parse_address(publisher.bind(config.events), "--events")
    try:
        return parse_address(publisher.bind(str(Address(bus.host, bus.port + 1))), "--events")
    except ConfigError:
        events = parse_address(publisher.bind(str(Address(bus.host, 0))), "--events")
        log.info("port %d is taken: events on %s", bus.port + 1, events)
        return events


def _reachable(bound: Address, advertised_bus: str) -> str:
    """A wildcard is no address: those who reach our bus reach our events on the same host."""
    host = parse_address(advertised_bus, "--advertise").host if is_wildcard(bound.host) else bound.host
    return str(Address(host, bound.port))
