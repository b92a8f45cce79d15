"""Which ports a node ends up with: what was asked for or an error, of the defaults the next free triple (design, 9)."""

from __future__ import annotations

import logging

from pdbus.bus.endpoint import Endpoint
from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import Address, Triple, advertised, bind_first_free, need_free, parse_address
from pdbus.bus.publisher import Publisher

from .config import NodeConfig

log = logging.getLogger("pdbus")


def bind_bus(config: NodeConfig, endpoint: Endpoint, publisher: Publisher) -> tuple[str, str]:
    """Bind the bus and its events. Returns what others call: (bus address, events address). Raises ConfigError."""
    listen = parse_address(config.listen, "--listen", port_zero=True)
    if config.listen_asked:
        need_free(listen.host, listen.port, "--listen")
        bus = endpoint.bind(str(listen))
        return _advertised(config, bus), _bind_events(config, publisher, parse_address(bus, "--listen"))
    bus, events = bind_first_free(lambda t: _bind_triple(config, endpoint, publisher, listen.host, t), listen.host)
    if parse_address(bus, "--listen").port != listen.port:
        log.info("port %d is taken: listening on %s", listen.port, bus)
    return _advertised(config, bus), events


def _bind_triple(
    config: NodeConfig, endpoint: Endpoint, publisher: Publisher, host: str, triple: Triple
) -> tuple[str, str]:
    bus = endpoint.bind(str(Address(host, triple.bus)))
    return bus, _bind_events(config, publisher, Address(host, triple.bus))


def _bind_events(config: NodeConfig, publisher: Publisher, bus: Address) -> str:
    if config.events_asked:
        events = parse_address(config.events, "--events", port_zero=True)
        need_free(events.host, events.port, "--events")
        return publisher.bind(str(events))
    try:
        return publisher.bind(str(Address(bus.host, bus.port + 1)))
    except ConfigError:
        return publisher.bind(str(Address(bus.host, 0)))


def _advertised(config: NodeConfig, bound: str) -> str:
    return advertised(bound, config.advertise if config.advertise_asked else "")
