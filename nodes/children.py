"""Control's HTTP process: spawned, and spawned again when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.util import find_spec

from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import is_wildcard, parse_address
from pdbus.connector.process import Child, Exit, spawn

from .config import NodeConfig
from .http.keys import HttpKeys
from .http.listening import HttpArgs, listen
from .http.tls import Tls

HTTP_MODULE = "pdbus.nodes.http.server"
HTTP_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
HTTP_RESTART_S = 0.5

log = logging.getLogger("pdbus")


class HttpServer:
    """The HTTP process: bound here, so that a taken port is our error; connections wait while a successor starts."""

    def __init__(self, config: NodeConfig, bus: str, node_key: str = "") -> None:
        """`node_key`: the public one that answers at `bus`. Raises ConfigError naming --http-port, --http-host,
        --http-keys or --http-tls-...."""
        missing = [name for name in HTTP_PACKAGES if find_spec(name) is None]
        if missing:
            problem = f"HTTP needs the package {missing[0]}: pip install 'pdbus[http]', or give 0 for no HTTP"
            raise ConfigError("--http-port", problem)
        if config.http_keys:
            HttpKeys(config.http_keys)
        self._tls = Tls(config.http_tls_cert, config.http_tls_key).check()
        self._bus = bus
        self._name, self._log_format = config.name, config.log_format
        self._http_keys = config.http_keys
        self._deadline_ms = config.request_deadline_ns // 10**6
        self._keys, self._node_key = config.keys, node_key
        self._socket = listen(config.http_host, config.http_port, search=not config.http_port_asked)
        port = self._socket.getsockname()[1]
        if port != config.http_port:
            log.info("port %d is taken: HTTP listens on port %d", config.http_port, port)
        host = config.http_host.strip("[]")
        if is_wildcard(host):
            host = parse_address(bus, "--listen").host  # where others reach this machine
        self.url = f"{self._tls.scheme}://[{host}]:{port}" if ":" in host else f"{self._tls.scheme}://{host}:{port}"
        self._child: Child | None = None
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        fd = self._socket.fileno()
        args = HttpArgs(
            bus=self._bus, fd=fd, name=self._name, url=self.url, parent=os.getpid(),
            keys=self._keys, node_key=self._node_key, http_keys=self._http_keys,
            tls_cert=self._tls.cert, tls_key=self._tls.key, log_format=self._log_format,
            deadline_ms=self._deadline_ms,
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
