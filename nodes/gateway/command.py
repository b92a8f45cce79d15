"""`pd gateway`: the process. HTTP and the bus share one loop: nothing here answers heartbeats."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdbus.bus.errors import ConfigError
from pdbus.bus.generation import DEADLINE_MS
from pdbus.bus.keyring import Keyring, client_keyring
from pdbus.bus.ports import Address, is_loopback, is_wildcard, own_host, parse_address
from pdbus.bus.station import Station
from pdbus.connector.process import keep_what_is_loaded
from pdbus.connector.wakeups import wake_at_once
from pdbus.nodes.config import node_name, request_deadline
from pdbus.nodes.config_checks import not_insecure
from pdbus.nodes.http.app import create_app
from pdbus.nodes.http.errors import JSON
from pdbus.nodes.http.keys import HttpKeys
from pdbus.nodes.http.listening import listen
from pdbus.nodes.http.server import serve_app
from pdbus.nodes.http.tls import Tls
from pdbus.nodes.logs import FORMS, set_up_logs
from pdbus.nodes.tracing import Tracer, tracer_of

from .endpoints import Endpoint, Endpoints
from .gateway import Gateway
from .routing import POLICIES
from .ui import page as ui
from .vllm.servers import Turns, decode_servers, prefill_servers

DRAIN_S = 120  # for answers under way, from the first signal; like a node's

log = logging.getLogger("pdbus.gateway")


@dataclass(frozen=True)
class GatewayConfig:
    """What the user chose. `http` is HOST:PORT; `asked`: the options that were given, by parameter. One that
    cannot be had is an error then, where a default would give way."""

    join: tuple[str, ...]
    decoders: tuple[Endpoint, ...]
    prefillers: tuple[Endpoint, ...]
    http: str
    asked: frozenset[str]
    keys: str
    http_keys: str
    tls: Tls
    insecure: bool
    policy: str
    queue: int
    name: str
    record: str
    record_tokens: bool
    log_format: str = "text"
    request_deadline: str = ""  # "": a node's default
    vllm: bool = False
    prefiller_names: tuple[str, ...] = ()


def run_gateway(config: GatewayConfig) -> int:
    """Until SIGTERM or SIGINT, then until the answers under way have ended. Raises ConfigError."""
    check(config)
    at = http_address(config.http)
    if not is_loopback(at.host) and not config.insecure and not config.http_keys:
        raise ConfigError("--http", not_insecure(config.http, at.host, "--http-keys FILE"))
    keyring = client_keyring(config.keys, setting="--keys") if config.keys else None
    http_keys = HttpKeys(config.http_keys) if config.http_keys else None
    config.tls.check()
    name = config.name or f"gateway-{os.urandom(2).hex()}"
    tracer = None if config.vllm else tracer_of(name)
    listening = listen(
        at.host, at.port, search="http" not in config.asked, host_setting="--http", port_setting="--http"
    )
    set_up_logs(name, config.log_format)
    wake_at_once()
    if config.vllm:
        uvloop.run(_run_front(config, listening, http_keys))
    else:
        uvloop.run(_run(config, name, listening, keyring, http_keys, tracer))
        if tracer is not None:
            tracer.close()
    return 0


def check(config: GatewayConfig) -> None:
    """Raises ConfigError naming the option at fault."""
    if config.vllm:
        _check_vllm(config)
    for address in config.join:
        parse_address(address, "--join")
    if not config.join and not config.decoders:
        raise ConfigError("--join", "is needed: the bus address of a node, or give --decoder-host and --decoder-port")
    if config.prefiller_names and not config.vllm:
        raise ConfigError("--prefiller-name", "goes with --vllm: nodes of pdbus say their names")
    if config.name:
        try:
            node_name(config.name)
        except ValueError as e:
            raise ConfigError("--name", str(e)) from None
    if config.policy not in POLICIES:
        raise ConfigError("--policy", f"there is no {config.policy!r}; give {', '.join(POLICIES)}")
    if config.log_format not in FORMS:
        raise ConfigError("--log-format", f"must be {' or '.join(FORMS)}, got {config.log_format!r}")
    deadline_ms(config.request_deadline)
    if config.record_tokens and not config.record:
        raise ConfigError("--record-tokens", "needs --record DIR, the recording that they are to stand in")
    if config.record and os.path.exists(config.record) and not os.path.isdir(config.record):
        raise ConfigError("--record", f"{config.record} is a file; give a folder")


def deadline_ms(text: str) -> int:
    """Of requests that give none. Raises ConfigError naming the option."""
    if not text:
        return DEADLINE_MS
    try:
        return int(request_deadline(text)) // 10**6
    except ValueError as e:
        raise ConfigError("--request-deadline", str(e)) from None


def _check_vllm(config: GatewayConfig) -> None:
    """What vLLM servers are asked over HTTP, and are not nodes that the gateway joins."""
    for option, given in (("--join", config.join), ("--keys", config.keys), ("--record", config.record)):
        if given:
            raise ConfigError(option, "is for nodes of pdbus: leave it away with --vllm")
    if "policy" in config.asked:
        raise ConfigError("--policy", "is for nodes of pdbus: vLLM servers take turns, leave it away with --vllm")
    if "queue" in config.asked:
        raise ConfigError("--queue", "is for nodes of pdbus: vLLM servers queue themselves, leave it away with --vllm")
    if config.request_deadline:
        raise ConfigError("--request-deadline", "is for nodes of pdbus: vLLM servers have their own, leave it away")
    if not config.decoders:
        raise ConfigError("--decoder-port", "is needed: where vLLM's decode server answers HTTP")
    if not config.prefillers:
        raise ConfigError("--prefiller-port", "is needed: where vLLM's prefill server answers HTTP")
    prefill_servers(config.prefillers, config.prefiller_names)


def http_address(text: str) -> Address:
    """HOST:PORT, an IPv6 host in brackets. Raises ConfigError (`--http`)."""
    try:
        return parse_address(f"tcp://{text}", "--http", port_zero=True)
    except ConfigError:
        raise ConfigError("--http", f"must be like 127.0.0.1:8000 or [::1]:8000, got {text!r}") from None


async def _run(
    config: GatewayConfig,
    name: str,
    listening: socket.socket,
    keyring: Keyring | None,
    http_keys: HttpKeys | None,
    tracer: Tracer | None,
) -> None:
    called = (*config.join, *map(str, config.decoders))
    station = Station(
        address=",".join(called), role="gateway", name=name, keyring=keyring, record=config.record or None,
        record_tokens=config.record_tokens, setting="--record",
    )  # fmt: skip
    gateway = Gateway(station, config.join, policy=config.policy, queue=config.queue, tracer=tracer)
    endpoints = Endpoints(gateway.fleet, config.decoders, config.prefillers)
    gateway.looked_by(endpoints.looked)
    url = _url(listening, config.tls.scheme)
    try:
        async with gateway:
            log.info("HTTP %s, policy %s, nodes from %s", url, config.policy, ", ".join(called))
            app = app_of(gateway, url, http_keys, tracer, deadline_ms(config.request_deadline))
            keep_what_is_loaded()
            signals = (signal.SIGTERM, signal.SIGINT)
            serving = asyncio.ensure_future(serve_app(app, listening, grace_s=DRAIN_S, signals=signals, tls=config.tls))
            await asyncio.wait((serving, gateway.fleet.failed), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
                gateway.fleet.failed.result()  # raises what went wrong
            await serving
    finally:
        endpoints.close()
        station.close(linger_ms=500)


async def _run_front(config: GatewayConfig, listening: socket.socket, http_keys: HttpKeys | None) -> None:
    """In front of vLLM servers."""
    from .vllm import front  # httpx, which nothing else here needs

    prefillers = Turns(prefill_servers(config.prefillers, config.prefiller_names))
    decoders = Turns(decode_servers(config.decoders))
    async with front.client() as http:
        app = front.app_of(front.Front(http, prefillers, decoders, keyed=http_keys is not None), http_keys)
        behind = ", ".join(server.url for server in (*prefillers.servers, *decoders.servers))
        log.info("HTTP %s, vLLM servers %s", _url(listening, config.tls.scheme), behind)
        await serve_app(app, listening, grace_s=DRAIN_S, signals=(signal.SIGTERM, signal.SIGINT), tls=config.tls)


def app_of(
    gateway: Gateway,
    http: str = "",
    keys: HttpKeys | None = None,
    tracer: Tracer | None = None,
    deadline_ms: int = DEADLINE_MS,
) -> Starlette:
    """The paths of nodes, and the gateway's own. `http`: its address. `deadline_ms`: of requests that give none."""
    more = [Route("/pd/nodes", _nodes(gateway)), *ui.routes(gateway)]
    return create_app(
        gateway, http=http, keys=keys, more=more, open_paths=[ui.PAGE], tracer=tracer, deadline_ms=deadline_ms
    )


def _nodes(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def nodes(_: Request) -> Response:
        """What the gateway knows of its nodes."""
        return JSON(await gateway.status())

    return nodes


def _url(listening: socket.socket, scheme: str) -> str:
    host, port = listening.getsockname()[:2]
    host = own_host() if is_wildcard(host) else host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
