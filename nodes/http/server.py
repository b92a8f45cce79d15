"""The HTTP process of a node: `python -m pdbus.nodes.http.server '<HttpArgs as JSON>'`.

The parent binds and listens (listening.py), so that a taken port is the parent's error, and passes the socket on (the
child's pass_fds). Connections wait in the socket's backlog until uvicorn accepts them, also while a successor is
started after a crash: readiness needs no message. The process ends with its parent, or on SIGTERM within about
`GRACE_S`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
import uvloop

from pdbus.bus import wire
from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.connector.channel import end_with_parent

from .app import create_app
from .listening import BACKLOG, HttpArgs

GRACE_S = 1  # for answers under way when SIGTERM comes; a node drains before it sends one
LAST_WORDS_S = 0.5  # for those that took longer to be told so
KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection, so that the client closes first


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
            await asyncio.wait(tuple(self.server_state.tasks), timeout=LAST_WORDS_S)


async def serve(args: HttpArgs) -> None:
    """Until SIGTERM. Closing the client cancels at the node what is still running. Raises what `Client` does when no
    node answers."""
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
    try:
        uvloop.run(serve(args))
    except PdError as e:
        print(f"http: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
