"""What is no HTTP request, or one that two readers could cut differently: an error object that says why, and the end
of the connection."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from pdbus.nodes.http import protocol
from pdbus.nodes.http.protocol import HEAD_BYTES_MAX, Protocol

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
LONG = b"x" * 200_000
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64, 96))


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.7", 4711), "sockname": ("127.0.0.1", 8080)})
        self.said, self.ended = b"", False

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Served:
    """An app that takes any body, and a connection to it."""

    def __init__(self) -> None:
        self.wire, self.requests = Wire(), 0
        config = uvicorn.Config(self._app, interface="asgi3", lifespan="off", ws="none", log_config=None)
        self.protocol = Protocol(config, ServerState(), {})
        self.protocol.connection_made(self.wire)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    async def says(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.protocol.data_received(piece)
        await asyncio.wait_for(asyncio.gather(*self.protocol.tasks), 10)
        return self.wire.said


def answered(*pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of what ends a connection."""

    async def once() -> tuple[int, dict[str, Any]]:
        served = Served()
        head, _, body = (await served.says(*pieces)).partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head and b"connection: close" in head.lower()
        assert served.wire.ended
        return int(head.split()[1]), json.loads(body)["error"]

    return asyncio.run(once())


NO_REQUESTS = [
    ((bytes(100),), 400, "the request line is not METHOD PATH HTTP/1.1"),
    ((b"hello\r\n\r\n",), 400, "the request line is not METHOD PATH HTTP/1.1"),
    ((HELLO,), 400, "TLS: HTTP is spoken in clear here"),
    ((b"GET / HTTP/1.1\r\n\r\n",), 400, "there is no Host header"),
    ((HEAD + b"Host: y\r\n\r\n",), 400, "Host is given twice"),
    ((HEAD + b"no header\r\n\r\n",), 400, "a header is not NAME: VALUE"),
    ((HEAD + b"Content-Length: -5\r\n\r\n",), 400, "Content-Length is no number of bytes"),
    ((HEAD + b"Content-Length: abc\r\n\r\n",), 400, "Content-Length is no number of bytes"),
    ((HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",), 400,
     "Content-Length is given twice, with two values"),
    ((HEAD + b"Transfer-Encoding: gzip\r\n\r\n",), 400, "of transfer codings only chunked is supported"),
    ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"-5\r\n"), 400,
     "a chunk of the body does not begin with its size in hexadecimal digits"),
    ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nabc\r\n"), 400,
     "a chunk of the body is not as long as it says"),
    ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1" + LONG), 400, "a chunk's size, or what follows the last one"),
    ((b"GET /" + LONG,), 414, "the URL: longer than 16384 bytes"),
    ((b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",), 414, "the URL: longer than 16384 bytes"),
    ((HEAD + b"X: " + LONG,), 431, "the headers: longer than 16384 bytes"),
    ((HEAD + b"X: " + LONG + b"\r\n\r\n",), 431, "the headers: longer than 16384 bytes"),
    ((b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",), 400, "HTTP/9.9 is not spoken here, HTTP/1.1 is"),
    ((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), 400, "HTTP/2.0 is not spoken here"),
    ((HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",), 400,
     "Transfer-Encoding beside Content-Length: where the body ends is uncertain"),
    ((HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",), 400,
     "Transfer-Encoding beside Content-Length: where the body ends is uncertain"),
    ((b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",), 400,
     "Transfer-Encoding beside HTTP/1.0: where the body ends is uncertain"),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "status", "said"), NO_REQUESTS)
def test_what_is_no_request_is_told_why(pieces: tuple[bytes, ...], status: int, said: str) -> None:
    code, error = answered(*pieces)
    assert (code, error["type"], error["code"], error["param"]) == (
        status,
        "invalid_request_error",
        "invalid_http",
        None,
    )
    assert error["message"].startswith(said)


def test_what_follows_a_refused_request_is_not_looked_at() -> None:
    """It is what a smuggled request would be."""

    async def scene() -> None:
        served = Served()
        smuggled = b"0\r\n\r\nGET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
        both = HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
        said = await served.says(both + smuggled, smuggled, HEAD + b"\r\n")
        assert said.count(b"HTTP/1.1 ") == 1
        assert served.requests == 0

    asyncio.run(scene())


def test_requests_that_are_some_are_served() -> None:
    async def scene() -> None:
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        counted = HEAD + b"Content-Length: 3\r\n\r\nabc"
        large = HEAD + b"X: " + b"x" * (HEAD_BYTES_MAX - 100) + b"\r\nContent-Length: 0\r\n\r\n"
        for request in (chunked, counted, large, b"GET / HTTP/1.0\r\n\r\n"):
            assert (await Served().says(request)).startswith(b"HTTP/1.1 200")

    asyncio.run(scene())


def test_the_log_names_the_peer_once_a_second(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Whoever sends garbage by the thousand must not fill the disk."""
    now = 100.0
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now)
    monkeypatch.setattr(Protocol, "_logged_at", 0.0)
    monkeypatch.setattr(Protocol, "_unlogged", 0)
    with caplog.at_level(logging.WARNING, logger="pdbus.http"):
        for _ in range(3):
            answered(HELLO)
        now += 1
        answered(HELLO)
    said = [record.message for record in caplog.records if record.name == "pdbus.http"]
    first = "no HTTP request from 192.0.2.7 port 4711: TLS: HTTP is spoken in clear here"
    assert said == [first, f"{first} (2 more since the last line)"]
