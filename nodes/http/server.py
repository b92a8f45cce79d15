"""The HTTP process of a node: `python -m pdbus.nodes.http.server '<HttpArgs as JSON>'`.

The parent binds and listens (listening.py), so that a taken port is the parent's error, and passes the socket on (the
child's pass_fds). Connections wait in the socket's backlog until uvicorn accepts them, also while a successor is
started after a crash: readiness needs no message. The process ends with its parent, or on SIGTERM within about
`GRACE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.applications import Starlette

from pdbus.bus import wire
from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keyring import Keyring
from pdbus.connector.channel import end_with_parent
from pdbus.connector.process import keep_what_is_loaded
from pdbus.nodes.logs import set_up_logs
from pdbus.nodes.tracing import tracer_of

from .app import create_app
from .keys import HttpKeys
from .listening import BACKLOG, HttpArgs
from .protocol import KEEP_ALIVE_S, Protocol, quiet
from .tls import CLEAR, Tls
from .upstream import OneNode

GRACE_S = 1  # for answers under way when SIGTERM comes; a node drains before it sends one
LAST_WORDS_S = 0.5  # for those that took longer to be told so


class Server(uvicorn.Server):
    """uvicorn, ended by these signals alone and without raising one again afterwards; by the second one at once."""

    def __init__(self, config: uvicorn.Config, signals: Sequence[signal.Signals]) -> None:
        super().__init__(config)
        self._signals = signals

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in self._signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # uvicorn cancelled them and does not wait
            await asyncio.wait(tuple(self.server_state.tasks), timeout=LAST_WORDS_S)


def _keyring(args: HttpArgs) -> Keyring | None:
    """The node's own key: to the node this process is a part of itself."""
    if not args.keys:
        return None
    folder = KeyFolder(args.keys)
    return Keyring(folder, folder.own(args.name), node=args.node_key)


async def serve(args: HttpArgs) -> None:
    """Until SIGTERM. Closing the client cancels at the node what is still running. Raises what `Client` does when no
    node answers, and ConfigError for files that will not do."""
    keys = HttpKeys(args.http_keys) if args.http_keys else None
    tls = Tls(args.tls_cert, args.tls_key).check()  # again: the files may have changed since the node started
    async with Client(args.bus, keys=_keyring(args)) as client:
        tracer = tracer_of(args.name)
        app = create_app(OneNode(client), http=args.url, keys=keys, tracer=tracer, deadline_ms=args.deadline_ms)
        keep_what_is_loaded()
        await serve_app(app, socket.socket(fileno=args.fd), grace_s=GRACE_S, tls=tls)
        if tracer is not None:
            tracer.close()


async def serve_app(
    app: Starlette,
    listening: socket.socket,
    *,
    grace_s: int,
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    tls: Tls = CLEAR,
) -> None:
    """Until the first of `signals`; answers under way then have `grace_s`, or until the second one."""
    config = uvicorn.Config(
        app,
        loop="none",  # main has chosen it
        http=Protocol,
        ws="none",
        log_config=None,  # main has set it up
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        ssl_certfile=tls.cert or None,
        ssl_keyfile=tls.key or None,
    )
    logging.getLogger("uvicorn.error").addFilter(quiet)
    await Server(config, signals).serve(sockets=[listening])


def main() -> int:
    args = wire.from_json(sys.argv[1], HttpArgs)
    set_up_logs(f"{args.name} HTTP:" if args.log_format == "text" else args.name, args.log_format, logging.WARNING)
    end_with_parent(args.parent)
    try:
        uvloop.run(serve(args))
    except PdError as e:
        print(f"http: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
