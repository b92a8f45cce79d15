"""Control's worker and mover: spawned, spoken to, reaped, spawned again. Decides nothing about requests or leases."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from pdbus.bus.errors import Broken, ConfigError
from pdbus.bus.ports import is_wildcard, parse_address
from pdbus.bus.wire import Declared, replace
from pdbus.connector.channel import ControlChannel, endpoint_in
from pdbus.connector.ipc import MoverArgs, WorkerArgs
from pdbus.connector.process import Child, Exit, spawn

from .config import NodeConfig
from .http.keys import HttpKeys
from .http.listening import HttpArgs, listen

HTTP_MODULE = "pdbus.nodes.http.server"
HTTP_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
HTTP_RESTART_S = 0.5
STOP_WAIT_S = 3.0  # from the stop message to SIGTERM: a step or a read may be under way

log = logging.getLogger("pdbus")

Received = TypeVar("Received", bound=Declared)


class Managed(Generic[Received]):
    """One child process and its channel, through all its lives. `on_exit` is called after it has been reaped."""

    def __init__(
        self,
        module: str,
        args: WorkerArgs | MoverArgs,
        receives: type[Received],
        stop: Declared,
        *,
        directory: Path,
        on_message: Callable[[Received], None],
        on_exit: Callable[[Exit], None],
        threads: int = 1,
        rank: int = 0,
    ) -> None:
        self._module = module
        self._name = f"{module.rpartition('.')[2]}-{rank}"
        self._args = args
        self._receives = receives
        self._stop = stop
        self._directory = directory
        self._on_message = on_message
        self._on_exit = on_exit
        self._threads = threads
        self._lives = 0
        self._heard = False  # this life has said its first word
        self._stopping = False  # this life has been asked to end
        self._child: Child | None = None
        self._channel: ControlChannel[Received] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None and self._child.running else 0

    async def start(self, **changes: str) -> None:
        """Spawn it, with some of its arguments changed, on a fresh endpoint: no life hears what the last was told."""
        self._lives += 1
        endpoint = endpoint_in(self._directory, f"{self._name}-{self._lives}")
        self._heard = self._stopping = False
        self._channel = ControlChannel(endpoint, self._receives, self._hear)
        args = replace(self._args, endpoint=endpoint, **changes)
        self._child = await spawn(self._module, args, threads=self._threads, on_exit=self._reaped)

    async def run(self) -> None:
        """Raises what `on_message` raised; ends when this life's channel is closed."""
        if self._channel is not None:
            await self._channel.run()

    def send(self, message: Declared) -> None:
        """Dropped until it has said that it is ready: a new life is told everything then. One that does not read is
        dying or stuck, and is seen to its end: what it was told last is part of what its end undoes."""
        if self._channel is None or not self._heard:
            return
        try:
            self._channel.send(message)
        except Broken:
            if self._child is not None and not self._stopping:
                self._child.signal(signal.SIGKILL)

    async def stop(self) -> None:
        """One that has not spoken yet cannot hear either: it gets SIGTERM at once."""
        self._stopping = True
        if self._child is not None:
            await self._child.stop(lambda: self.send(self._stop), STOP_WAIT_S if self._heard else 0)

    def _hear(self, message: Received) -> None:
        self._heard = True
        self._on_message(message)

    def _reaped(self, ended: Exit) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._on_exit(ended)


class HttpServer:
    """The HTTP process: bound here, so that a taken port is our error; connections wait while a successor starts."""

    def __init__(self, config: NodeConfig, bus: str, node_key: str = "") -> None:
        """`node_key`: the public one that answers at `bus`. Raises ConfigError naming --http-port, --http-host or
        --http-keys."""
        missing = [name for name in HTTP_PACKAGES if find_spec(name) is None]
        if missing:
            problem = f"HTTP needs the package {missing[0]}: pip install 'pdbus[http]', or give 0 for no HTTP"
            raise ConfigError("--http-port", problem)
        if config.http_keys:
            HttpKeys(config.http_keys)
        self._bus = bus
        self._name = config.name
        self._http_keys = config.http_keys
        self._keys, self._node_key = config.keys, node_key
        self._socket = listen(config.http_host, config.http_port, search=not config.http_port_asked)
        port = self._socket.getsockname()[1]
        if port != config.http_port:
            log.info("port %d is taken: HTTP listens on port %d", config.http_port, port)
        host = config.http_host.strip("[]")
        if is_wildcard(host):
            host = parse_address(bus, "--listen").host  # where others reach this machine
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._child: Child | None = None
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        fd = self._socket.fileno()
        args = HttpArgs(
            bus=self._bus, fd=fd, name=self._name, url=self.url, parent=os.getpid(),
            keys=self._keys, node_key=self._node_key, http_keys=self._http_keys,
        )  # fmt: skip
        self._child = await spawn(HTTP_MODULE, args, on_exit=self._reaped, pass_fds=(fd,))

    async def stop(self) -> None:
        self._stopping = True
        if self._child is not None:
            await self._child.stop(lambda: None, 0)
        self._socket.close()

    def _reaped(self, ended: Exit) -> None:
        if not self._stopping:
            log.error("HTTP: %s", ended)
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        await asyncio.sleep(HTTP_RESTART_S)
        if not self._stopping:
            await self.start()
