"""HTTP/1.1 as uvicorn speaks it with h11, and three cares more.

A request that is none is answered with an error object that says why, and the connection is closed. So is one that two
readers could cut differently (Transfer-Encoding beside Content-Length): a proxy before us may be the other reader.
A connection on which no whole request head arrives in time is closed: its descriptor is worth something, and uvicorn
itself waits for ever. Where a body turns out to be damaged, the app that has the request hears that nobody listens any
more: uvicorn itself answers 400 and lets it answer too.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdbus.bus import wire
from pdbus.bus.errors import RequestError

from .errors import error_object

KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection, so that the client closes first
HEAD_S: float = KEEP_ALIVE_S  # for a request's head to arrive
HEAD_BYTES_MAX = 16 << 10  # of a request's line and headers: h11's own
LINGER_S = 1.0  # for the answer to a refused request to be read: closed at once, what still comes in would destroy it
LOG_EVERY_S = 1.0  # a line on refused requests: whoever sends garbage is not to fill the disk
TLS_HELLO = b"\x16\x03"

WORDS = {
    "illegal request line": "the request line is not METHOD PATH HTTP/1.1",
    "no request line received": "the request line is not METHOD PATH HTTP/1.1",
    "illegal header line": "a header is not NAME: VALUE",
    "continuation line": "a header is not NAME: VALUE",
    "illegal chunk header": "a chunk of the body does not begin with its size in hexadecimal digits",
    "malformed chunk footer": "a chunk of the body is not as long as it says",
    "bad Content-Length": "Content-Length is no number of bytes",
    "conflicting Content-Length": "Content-Length is given twice, with two values",
    "multiple Transfer-Encoding": "Transfer-Encoding is given twice",
    "Only Transfer-Encoding": "of transfer codings only chunked is supported",
    "Missing mandatory Host": "there is no Host header",
    "Found multiple Host": "Host is given twice",
}  # for h11's, which may quote what was sent, by how they begin

log = logging.getLogger("pdbus.http")


class Connection(h11.Connection):
    """h11's, stricter: raises h11.RemoteProtocolError for what it lets pass."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request:
            _check(event)
        return event


def _check(request: h11.Request) -> None:
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError(f"HTTP/{request.http_version.decode()} is not spoken here, HTTP/1.1 is")
    if len(request.target) > HEAD_BYTES_MAX:
        raise h11.RemoteProtocolError(_long("the URL"), error_status_hint=414)
    if sum(len(name) + len(value) for name, value in request.headers) > HEAD_BYTES_MAX:
        raise h11.RemoteProtocolError(_long("the headers"), error_status_hint=431)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        beside = "Content-Length" if b"content-length" in names else "HTTP/1.0"
        raise h11.RemoteProtocolError(f"Transfer-Encoding beside {beside}: where the body ends is uncertain")


def _long(what: str) -> str:
    return f"{what}: longer than {HEAD_BYTES_MAX} bytes"


class Protocol(H11Protocol):
    _late: asyncio.TimerHandle | None = None
    _refused = False
    _logged_at, _unlogged = 0.0, 0  # of all connections

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = Connection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles what h11 has raised."""
        if self._refused:
            return
        self._refused = True
        busy = self.cycle is not None and not self.cycle.response_complete
        status, problem = self._problem(sys.exception(), msg, in_body=busy)
        self._log(problem)
        if busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun, or is all sent
            return
        try:
            self._answer(status, problem)
        except h11.LocalProtocolError:  # its head has been sent, and what answers a HEAD has no body
            self.transport.close()

    def _answer(self, status: int, problem: str) -> None:
        status, error = error_object(RequestError(problem, code="invalid_http", status=status))
        body = wire.to_json(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = h11.Response(status_code=status, headers=list(headers.items()), reason=HTTPStatus(status).phrase)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _problem(self, error: BaseException | None, otherwise: str, *, in_body: bool) -> tuple[int, str]:
        """What is wrong with a request, and the status that says so."""
        received = self.conn.trailing_data[0]
        said = str(error or otherwise)
        hint = error.error_status_hint if isinstance(error, h11.ProtocolError) else 400
        status = hint if hint < 500 else 400  # the client's fault, whatever it sent
        if received.startswith(TLS_HELLO) and not in_body:
            return 400, "TLS: HTTP is spoken in clear here"
        if said == "Receive buffer too long":
            if in_body:
                return 400, _long("a chunk's size, or what follows the last one,")
            return (431, _long("the headers")) if b"\n" in received else (414, _long("the URL"))
        return status, next((words for begins, words in WORDS.items() if said.startswith(begins)), said)

    def _log(self, problem: str) -> None:
        now = time.monotonic()
        if now - Protocol._logged_at < LOG_EVERY_S:
            Protocol._unlogged += 1
            return
        peer = f"{self.client[0]} port {self.client[1]}" if self.client else "somebody"
        more = f" ({Protocol._unlogged} more since the last line)" if Protocol._unlogged else ""
        log.warning("no HTTP request from %s: %s%s", peer, problem, more)
        Protocol._logged_at, Protocol._unlogged = now, 0

    def _unsupported_upgrade_warning(self) -> None:
        """Not a word: the request is answered as if it had not asked."""

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def quiet(record: logging.LogRecord) -> bool:
    """For uvicorn's own log: without the line that says less than ours."""
    return record.msg != "Invalid HTTP request received."
