"""Prefill and decode nodes on this machine, as processes of this one. For `pd up`, the demo, benches and tests.

async with Cluster(prefill=1, decode=1, options={"engine": "coded", "deterministic": True}) as cluster:
    cluster.decode[0].http, cluster.prefill[0].address
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, PdError
from pdbus.bus.ports import is_free

from .config import SETTINGS
from .node_process import NodeProcess, OnLine
from .values import switch

PARENT = str(os.getpid())  # of all that is started here: it ends with us
NODE_COMMAND = (sys.executable, "-P", "-m", "pdbus.nodes", PARENT)
# Of settings, those that a gateway has too:
GATEWAY_OPTIONS = ("record", "record_tokens", "keys", "http_keys", "http_tls_cert", "http_tls_key", "request_deadline")
GATEWAY_COMMAND = (sys.executable, "-P", "-m", "pdbus.nodes.gateway", PARENT)
PORTS_FROM, PORTS_TO = 20_000, 32_000  # below what kernels give to outgoing connections, which would take them from us
READY_S = 180.0  # importing torch and reading a model on a busy machine
POLL_S = 0.1
DRAIN_S = 130.0  # a node's own limit is 120 s
HTTP_BYTES_MAX = 1 << 16

_chosen: set[int] = set()  # by clusters of this process that have not stopped: their nodes may not have bound them yet

Options = Mapping[str, str | int | float | bool]
Ready = Callable[[NodeProcess], Awaitable[bool]]


class Cluster:
    """Nodes named `prefill-1`, `decode-1`, `both-1`... `options` are settings by name for all of them, `role_options`
    for those of one role. Every node gets cores of its own when there are enough."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        *,
        options: Options | None = None,
        role_options: Mapping[str, Options] | None = None,
        environment: Mapping[str, str] | None = None,
        config: Path | None = None,
        bus_port: int = 0,  # search from here; 0: somewhere out of the way
        http_port: int = 0,
        gateway_port: int | None = None,  # of a gateway in front of all; None: no gateway
        on_line: OnLine | None = None,
        logs: Path | None = None,  # a folder: one file a node
        command: Sequence[str] = NODE_COMMAND,
        ready: Ready | None = None,
    ) -> None:
        self.prefill: list[NodeProcess] = []
        self.both: list[NodeProcess] = []
        self.decode: list[NodeProcess] = []
        self.gateway: list[NodeProcess] = []
        self._ready = ready or is_ready
        self._options = dict(options or {})
        self._role_options = dict(role_options or {})
        self._environment = {"PD_KEYS": "", **(environment or {})}  # whose nodes have other names
        self._command = (*command, *(("--config", str(config)) if config else ()))
        self._on_line, self._logs = on_line, logs
        self.taken: list[int] = []  # of the ports from bus_port and from http_port on: others had them
        counts = {"prefill": prefill, "both": both, "decode": decode}
        before = set(_chosen)
        ports = list(islice(_free_ports(bus_port, 3, self.taken), sum(counts.values())))
        self._build(counts, iter(ports), _free_ports(http_port or bus_port, 1, self.taken))
        self._ports = _chosen - before
        if gateway_port:
            self._add_gateway(gateway_port)

    def _build(self, counts: Mapping[str, int], ports: Iterator[int], http_ports: Iterator[int]) -> None:
        roles = [role for role, count in counts.items() for _ in range(count)]
        shares = partition_cores(sorted(os.sched_getaffinity(0)), len(roles))
        for role, cores in zip(roles, shares, strict=True):
            http_port = 0 if role == "prefill" else next(http_ports)
            self._add(role, next(ports), http_port, cores)

    def _add(self, role: str, port: int, http_port: int, cores: Sequence[int]) -> None:
        same: list[NodeProcess] = getattr(self, role)
        name = f"{role}-{len(same) + 1}"
        address = f"tcp://127.0.0.1:{port}"
        owners = [] if role == "prefill" else [*self.prefill, *self.both]
        settings: dict[str, str | int | float | bool] = {
            "role": role, "name": name, "listen": address, "advertise": address,
            "events": f"tcp://127.0.0.1:{port + 1}", "http_host": "127.0.0.1", "http_port": http_port,
            **({"cpus": ",".join(map(str, cores))} if cores else {"threads": 1}),
            **({"join": ",".join(node.address for node in owners)} if owners else {}),
            **self._options, **self._role_options.get(role, {}),
        }  # fmt: skip
        node = NodeProcess(
            name, role, (*self._command, *command_line(settings)),
            address=address, http=f"{_scheme(settings)}://127.0.0.1:{http_port}" if http_port else "",
            joined=[node.name for node in owners], environment=self._environment, on_line=self._on_line,
            log=self._logs / f"{name}.log" if self._logs else None, keys=str(settings.get("keys", "")),
        )  # fmt: skip
        same.append(node)

    def _add_gateway(self, port: int) -> None:
        name, http = "gateway-1", f"127.0.0.1:{port}"
        words = ["--join", ",".join(node.address for node in self.nodes), "--http", http, "--name", name]
        words += command_line({key: self._options[key] for key in GATEWAY_OPTIONS if self._options.get(key)})
        self.gateway.append(
            NodeProcess(
                name, "gateway", (*GATEWAY_COMMAND, *words), address="", http=f"{_scheme(self._options)}://{http}",
                environment=self._environment, on_line=self._on_line,
                log=self._logs / f"{name}.log" if self._logs else None,
            )
        )  # fmt: skip

    @property
    def nodes(self) -> list[NodeProcess]:
        """In the order of their start: a node joins those before it. The gateway is the last."""
        return [*self.prefill, *self.both, *self.decode, *self.gateway]

    async def __aenter__(self) -> Cluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts all nodes and waits until they are ready and linked. Raises Broken with a node's last words, after
        having ended all others."""
        try:
            for node in self.nodes:
                await self._wait_bound([other for other in self.nodes if other.name in node.joined])
                await node.start()
            await self._all(self.wait_ready(node) for node in self.nodes)
        except BaseException:
            await self.kill_all()
            raise

    async def wait_ready(self, node: NodeProcess, timeout_s: float = READY_S) -> None:
        """Until it would serve a request, linked to those it joined. Raises Broken when it ends or is too slow."""
        await self._until(node, "is not ready", lambda: self._ready(node), timeout_s)

    async def stop(self, timeout_s: float = DRAIN_S) -> None:
        """SIGTERM to all, so that they drain; after `timeout_s` the rest is killed."""
        for node in self.nodes:
            node.signal(signal.SIGTERM)
        ends = [asyncio.create_task(node.wait()) for node in self.nodes]
        if ends:
            await asyncio.wait(ends, timeout=timeout_s)
        await self.kill_all()
        await asyncio.gather(*ends)
        _chosen.difference_update(self._ports)

    async def kill_all(self) -> None:
        """Ends everything at once."""
        for node in self.nodes:
            node.kill_all()
        for node in self.nodes:
            await node.wait()
            await node.close()

    async def kill(self, node: NodeProcess) -> None:
        """kill -9 of a node's control, and nothing else: its children have to end by themselves."""
        node.signal(signal.SIGKILL)
        await node.wait()

    async def restart(self, node: NodeProcess) -> None:
        """Starts a node that has ended again, on its ports, and waits until it is ready."""
        await node.close()
        await node.start()
        await self.wait_ready(node)

    async def _wait_bound(self, nodes: Sequence[NodeProcess]) -> None:
        """Who joins must find a bus that listens."""
        for node in nodes:
            await self._until(node, "does not listen", lambda node=node: listens(node.address), READY_S)  # type: ignore[misc]

    async def _until(self, node: NodeProcess, what: str, true: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        end = asyncio.create_task(node.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while not end.done() and not await true():
                    await asyncio.wait([end], timeout=POLL_S)
        except TimeoutError:
            raise Broken(f"{node.name} {what} after {timeout_s:.0f} s{_last_words(node)}") from None
        finally:
            if not end.done():
                end.cancel()
        if end.done() and not end.cancelled():
            raise Broken(f"{node.name} ended with status {end.result()}{_last_words(node)}")

    async def _all(self, waits: Iterator[Awaitable[None]]) -> None:
        """The first failure ends the waiting for the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for wait in waits:
                    group.create_task(_run(wait))
        except* PdError as failures:
            raise _first(failures) from None


async def _run(wait: Awaitable[None]) -> None:
    await wait


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _last_words(node: NodeProcess) -> str:
    return f": {node.tail[-1]}" if node.tail else " and said nothing"


def _scheme(settings: Options) -> str:
    return "https" if settings.get("http_tls_cert") else "http"


def command_line(settings: Options) -> list[str]:
    """Settings as options of `pd-node`."""
    switches = {setting.name for setting in SETTINGS if setting.is_switch}
    words: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if name in switches:
            words.append(f"--{option}" if switch(str(value)) else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def partition_cores(cores: Sequence[int], nodes: int) -> list[tuple[int, ...]]:
    """As equal a share of the cores as possible for each node; empty ones for all when there are too few."""
    if len(cores) < nodes:
        return [()] * nodes
    return [tuple(cores[i * len(cores) // nodes : (i + 1) * len(cores) // nodes]) for i in range(nodes)]


def _free_ports(start: int, count: int, taken: list[int]) -> Iterator[int]:
    """First ports of runs of `count` free ones, from `start` upwards in steps of `count`, as a node looks for them;
    without it from anywhere out of the way. `taken` hears of those that bar a run."""
    port = start or random.randrange(PORTS_FROM, PORTS_TO, 8)
    while port + count <= 65_536:
        barred = [p for p in range(port, port + count) if p in _chosen or not is_free("127.0.0.1", p)]
        if barred:
            taken += barred
        else:
            _chosen.update(range(port, port + count))
            yield port
        port += count
    raise Broken(f"no {count} free ports in a row above {start}")


async def listens(address: str) -> bool:
    """Whether anybody does at tcp://host:port or http://host:port."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def is_ready(node: NodeProcess) -> bool:
    """Whether its bus says so, every link that it was told to make is up, and its HTTP answers. A gateway has no bus
    of its own."""
    if not node.address:
        return await http_ok(f"{node.http}/health/ready")
    if not await listens(node.address):
        return False
    try:
        async with asyncio.timeout(5), Client(node.address, keys=node.keys or None) as client:
            status = await client.status()
    except (PdError, TimeoutError):
        return False
    up = [p.get("name") for p in status.get("peers", []) if p.get("state") == "up" and not p.get("detail")]
    linked = all(name in up for name in node.joined)
    return bool(status.get("ready")) and linked and (not node.http or await http_ok(f"{node.http}/health/ready"))


async def http_ok(url: str) -> bool:
    """Whether GET answers 200. Its certificate is not looked at: it is not made out to 127.0.0.1."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    tls = _unverified() if scheme == "https" else None
    name, _, port = host.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(name, int(port), ssl=tls)
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read(HTTP_BYTES_MAX)
            writer.close()
            return answer.startswith(b"HTTP/1.1 200")
    return False


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
