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

import h11
import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

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
from .tls import CLEAR, Tls
from .upstream import OneNode

GRACE_S = 1  # for answers under way when SIGTERM comes; a node drains before it sends one
LAST_WORDS_S = 0.5  # for those that took longer to be told so
KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection, so that the client closes first
HEAD_S: float = KEEP_ALIVE_S  # for a request's head to arrive


class Protocol(H11Protocol):
    """uvicorn's, with two cares more. A connection on which no whole request head arrives in time is closed: its
    descriptor is worth something, and uvicorn itself waits for ever. Where a body turns out to be damaged, the app that
    has the request hears that nobody listens any more: uvicorn itself answers 400 and lets it answer too."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:  # its head has been sent, and what answers a HEAD has no body
                self.transport.close()
        else:  # an answer has begun, or is all sent
            self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


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
        app = create_app(OneNode(client), http=args.url, keys=keys, tracer=tracer)
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
