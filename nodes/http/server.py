"""The HTTP process of a node: `python -m pdbus.nodes.http.server '<HttpArgs as JSON>'`.

The parent binds and listens (`listen`), so that a taken port is the parent's error, and passes the socket on (the
child's pass_fds). Connections wait in the socket's backlog until uvicorn accepts them, also while a successor is
started after a crash: readiness needs no message. The process ends with its parent, or on SIGTERM within about
`GRACE_S`.

    sock = listen(host, port)
    args = HttpArgs(bus=address, fd=sock.fileno(), url=url, parent=os.getpid())
    child = await spawn(MODULE, args, on_exit=on_exit, pass_fds=(sock.fileno(),))
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
import uvloop
from pdbus.bus.client import Client

from pdbus.bus import wire
from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared
from pdbus.connector.channel import end_with_parent

from .app import create_app

MODULE = "pdbus.nodes.http.server"
GRACE_S = 1  # for answers under way when SIGTERM comes; a node drains before it sends one
CANCEL_S = 0.5  # for those that took longer to cancel their request at the node
KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection, so that the client closes first
BACKLOG = 2048
PORTS_TRIED_MAX = 100


class HttpArgs(Declared):
    """Everything the process needs, handed over as one JSON string at spawn."""

    bus: str  # the node's bus address
    fd: int  # the listening socket, inherited
    url: str = ""  # how others reach that socket: http://host:port
    parent: int = 0  # its pid, to notice that it died while this process started; 0: do not look


def listen(host: str, port: int, *, search: bool = False) -> socket.socket:
    """A listening socket for the process to inherit; port 0 is any. With `search` (a default port) the next free one is
    taken instead of a taken one. Raises ConfigError naming --http-port, or --http-host when that cannot be bound."""
    last = port + PORTS_TRIED_MAX if search and port else port
    for candidate in range(port, min(last, 65_535) + 1):
        try:
            return socket.create_server((host, candidate), family=_family(host), backlog=BACKLOG)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                setting = "--http-port" if e.errno == errno.EACCES else "--http-host"
                raise ConfigError(setting, f"cannot listen on {host}:{candidate}: {e.strerror or e}") from None
        except OverflowError:
            break
    if not 0 <= port <= 65_535:
        raise ConfigError("--http-port", f"must be between 0 and 65535, got {port}")
    raise ConfigError("--http-port", f"{host}:{port} is taken; choose another port, or 0 for any free one")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Server(uvicorn.Server):
    """uvicorn, ended by SIGTERM alone and without raising the signal again afterwards."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    def _stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # uvicorn cancelled them and does not wait
            await asyncio.wait(tuple(self.server_state.tasks), timeout=CANCEL_S)


async def serve(args: HttpArgs) -> None:
    """Until SIGTERM."""
    async with Client(args.bus) as client:
        config = uvicorn.Config(
            create_app(client, http=args.url),
            loop="none",  # main has chosen it
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        await Server(config).serve(sockets=[socket.socket(fileno=args.fd)])


def main() -> int:
    args = wire.from_json(sys.argv[1], HttpArgs)
    end_with_parent()
    if args.parent and os.getppid() != args.parent:
        return 0
    uvloop.run(serve(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
