"""The HTTP process on real sockets, before a fake node on a real bus."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pdbus.bus import wire
from pdbus.bus.endpoint import Received
from pdbus.bus.messages import Cancel, Generate
from pdbus.connector.process import Child, Exit, spawn
from pdbus.nodes.http import protocol, server
from pdbus.nodes.http.listening import HttpArgs, listen
from pdbus.nodes.http.stream import BODY_BYTES_MAX

from tests.fake_node import FakeNode, silent
from tests.loop import on_loop, until

pytestmark = pytest.mark.live

MODULE = "pdbus.nodes.http.server"
STATUS = {"name": "fake", "model": "tiny", "role": "decode", "ready": True, "address": "tcp://127.0.0.1:1"}
STREAM = {"prompt": "hi", "stream": True}


class Served:
    """A fake node, the HTTP process in front of it, and a client of that."""

    def __init__(self, node: FakeNode, sock: socket.socket) -> None:
        self.node = node
        self.port: int = sock.getsockname()[1]
        self.web = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)
        self._sock = sock
        self.child: Child

    async def start(self) -> None:
        """It is up when its first request is answered: until then requests wait in the backlog."""
        fd = self._sock.fileno()
        args = HttpArgs(bus=self.node.address, fd=fd, parent=os.getpid())
        self.child = await spawn(MODULE, args, on_exit=lambda _: None, pass_fds=(fd,))

    async def stop(self) -> Exit:
        return await self.child.stop(lambda: None, 0)


@asynccontextmanager
async def served(on_generate: Any = None) -> AsyncIterator[Served]:
    node = FakeNode(on_generate)
    node.status = STATUS
    node.bind()
    with listen("127.0.0.1", 0) as sock:
        s = Served(node, sock)
        await s.start()
        try:
            async with s.web:
                yield s
        finally:
            await s.stop()
            node.close()


@on_loop
async def test_whole_and_streamed_answers() -> None:
    async with served() as s:
        whole = (await s.web.post("/v1/completions", json={"prompt": "hi"})).json()
        assert whole["choices"][0]["text"] == "hello world"
        streamed = await s.web.post("/v1/completions", json=STREAM)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await s.web.get("/health/ready")).status_code == 200


@on_loop
async def test_each_token_is_out_before_the_next_is_there() -> None:
    """Nothing between node and client may gather: the first token is worth most."""
    asked: list[Received] = []

    def first_word(node: FakeNode, received: Received) -> None:
        asked.append(received)
        node.tokens(received, 0, ["one"])

    async with served(first_word) as s, s.web.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = (line async for line in response.aiter_lines() if line)
        assert '"one"' in await anext(lines)
        s.node.tokens(asked[0], 1, ["two"])
        assert '"two"' in await anext(lines)
        s.node.finish(asked[0])
        assert [line async for line in lines][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_at_the_node(stream: bool) -> None:
    @on_loop
    async def scene() -> None:
        async with served(silent) as s:
            asking = asyncio.ensure_future(s.web.post("/v1/completions", json={"prompt": "hi", "stream": stream}))
            await until(lambda: s.node.count(Generate))
            asking.cancel()
            await until(lambda: s.node.count(Cancel))

    scene()


@on_loop
async def test_a_huge_body_is_answered_while_it_is_still_being_sent() -> None:
    async with served() as s:
        response = await s.web.post("/v1/completions", content=b"x" * (2 * BODY_BYTES_MAX))
        assert response.status_code == 413
        assert (await s.web.get("/health/live")).status_code == 200


async def says(port: int, sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()


TOO_LARGE = [b"content-length: 99999999999", b"content-length: 9000000\r\nexpect: 100-continue"]


@pytest.mark.parametrize("headers", TOO_LARGE)
def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(headers: bytes) -> None:
    @on_loop
    async def scene() -> None:
        async with served() as s:
            answer = await says(s.port, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"body_too_large" in answer

    scene()


HALF_HEADS = {"nothing": b"", "half a head": b"GET / HTTP/1.1\r\nhost: x\r\n"}


@pytest.mark.parametrize("before", [b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("half", HALF_HEADS.values(), ids=HALF_HEADS)
def test_a_connection_without_a_whole_head_is_closed(half: bytes, before: bytes, monkeypatch: Any) -> None:
    """Each holds a descriptor: a few thousand of them would keep everyone else out."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)

    @on_loop
    async def scene() -> None:
        node = FakeNode()
        node.status = STATUS
        node.bind()
        with listen("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
            serving = asyncio.create_task(server.serve(HttpArgs(bus=node.address, fd=os.dup(sock.fileno()))))
            answer = await says(port, before + half)
            assert answer.startswith(b"HTTP/1.1 200 OK") if before else answer == b""
            serving.cancel()
            await asyncio.wait((serving,))
        node.close()

    scene()


@on_loop
async def test_a_warning_has_time_and_node() -> None:
    node = FakeNode()
    node.bind()
    with listen("127.0.0.1", 0) as sock:
        args = HttpArgs(bus=node.address, fd=sock.fileno(), name="d1")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", MODULE, wire.to_json(args).decode(),
            pass_fds=(sock.fileno(),), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await says(sock.getsockname()[1], bytes(100))
        process.terminate()
        _, said = await process.communicate()
    node.close()
    assert re.fullmatch(
        rb"\d\d:\d\d:\d\d d1 HTTP: no HTTP request from 127.0.0.1 port \d+: the request line is not .*\n", said
    )


NO_HTTP = {
    "zeros": bytes(100),
    "unknown version": b"GET / HTTP/9.9\r\n\r\n",
    "no body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("garbage", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_disturbs_nobody(garbage: bytes) -> None:
    @on_loop
    async def scene() -> None:
        async with served() as s:
            reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
            writer.write(garbage)
            assert (await reader.readline()).startswith(b"HTTP/1.1 4")
            writer.close()
            assert (await s.web.get("/health/live")).status_code == 200

    scene()


@on_loop
async def test_sigterm_ends_it_with_an_answer_under_way() -> None:
    """By itself, not by the SIGKILL that would follow; and the node hears that nobody reads on."""
    async with served(silent) as s:
        asking = asyncio.ensure_future(s.web.post("/v1/completions", json=STREAM))
        await until(lambda: s.node.count(Generate))
        assert (await s.stop()).code == 0
        await until(lambda: s.node.count(Cancel))
        response = await asking
        assert response.status_code == 503
        assert "told to stop" in response.text


@on_loop
async def test_a_successor_serves_those_who_came_in_between() -> None:
    """The parent keeps the socket: a crash of the HTTP process refuses nobody."""
    async with served() as s:
        await s.web.get("/health/live")
        s.child.signal(signal.SIGKILL)
        await s.child.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        await s.start()
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@on_loop
async def test_no_node_at_the_address_is_one_line_and_a_bad_exit() -> None:
    with listen("127.0.0.1", 0) as sock:
        args = HttpArgs(bus="tcp://127.0.0.1:1", fd=sock.fileno())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", MODULE, wire.to_json(args).decode(),
            pass_fds=(sock.fileno(),), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().startswith("http: no node answered at tcp://127.0.0.1:1")
    assert said.count(b"\n") == 1


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-m", sys.argv[1], sys.argv[2]], pass_fds=(int(sys.argv[3]),))
print(child.pid, flush=True)
child.wait()
"""


@on_loop
async def test_it_ends_with_its_parent() -> None:
    """kill -9 of control leaves no HTTP process, and so no port, behind."""
    node = FakeNode()
    with listen("127.0.0.1", 0) as sock:
        args = HttpArgs(bus=node.bind(), fd=sock.fileno())
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, MODULE, wire.to_json(args).decode(), str(sock.fileno()),
            pass_fds=(sock.fileno(),), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        port = sock.getsockname()[1]
        async with httpx.AsyncClient(timeout=20, trust_env=False) as web:
            assert (await web.get(f"http://127.0.0.1:{port}/health/live")).status_code == 200
        parent.kill()
        await parent.wait()
        await until(lambda: not _runs(child))
    node.close()


def _runs(pid: int) -> bool:
    """Ended or a zombie that init has not reaped yet is both not running."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
