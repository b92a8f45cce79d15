"""Bodies that do not come, and headers that would be two: nobody waits for ever, nothing of a client's is a header."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from pdbus.nodes.http import stream
from pdbus.nodes.http.app import create_app

from tests.fake_client import FakeClient

SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
    "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("x", 80), "client": ("y", 1),
    "headers": [(b"host", b"x"), (b"content-length", b"100")],
}  # fmt: skip


async def answered(receive: Callable[[], Awaitable[dict[str, Any]]]) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await create_app(FakeClient())(SCOPE, receive, send)  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def test_a_body_that_comes_drop_by_drop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn would wait for ever; the connection is closed, since what follows on it is no request."""
    monkeypatch.setattr(stream, "BODY_S", 0.02)

    async def drop() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b" ", "more_body": True}

    status, headers, body = asyncio.run(answered(drop))
    assert status == 408 and headers[b"connection"] == b"close" and b"did not arrive" in body


@pytest.mark.parametrize("path", ["/v1/models/a%0d%0aset-cookie:%20b=c", "/a%0d%0aset-cookie:%20b=c"])
def test_line_breaks_of_a_client_make_no_header(path: str) -> None:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeClient()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as web:
            return await web.get(path)

    answer = asyncio.run(get())
    assert answer.status_code == 404 and "set-cookie" not in answer.headers
