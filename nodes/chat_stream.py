"""A chat request over the OpenAI HTTP API, streamed, with nothing but the standard library. For demo and bench."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdbus.bus.errors import Broken

TIMEOUT_S = 120.0  # for anything at all to come


@dataclass
class Answered:
    """One whole answer. `id` as HTTP shows it; `timeline` is the node's `pd_timeline`."""

    id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    timeline: dict[str, Any] = field(default_factory=dict)


def chat(base: str, prompt: str, max_tokens: int, on_text: Callable[[str], None]) -> Answered:
    """Asks greedily; `on_text` hears the answer as it comes. Raises Broken with the server's or the network's words."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens, "temperature": 0, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    answered = Answered()
    for chunk in post_stream(f"{base}/v1/chat/completions", body):
        answered.id = chunk.get("id", answered.id)
        for choice in chunk.get("choices", []):
            piece = choice.get("delta", {}).get("content") or ""
            answered.text += piece
            answered.tokens += choice.get("token_ids") or []
            answered.finish_reason = choice.get("finish_reason") or answered.finish_reason
            if piece:
                on_text(piece)
        answered.timeline = chunk.get("pd_timeline", answered.timeline)
    if not answered.finish_reason or not answered.timeline:
        raise Broken(f"{base}: the answer ended before its end")
    return answered


def post_stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer up to [DONE]. Raises Broken."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Broken(f"{url}: {response.status}: {_message(response.read())}")
        yield from _chunks(response, url)
    except (OSError, http.client.HTTPException) as e:
        raise Broken(f"{url}: {e or type(e).__name__}") from None
    finally:
        connection.close()


def _chunks(response: http.client.HTTPResponse, url: str) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            chunk = json.loads(data)
            if "error" in chunk:
                raise Broken(f"{url}: {chunk['error'].get('message', chunk['error'])}")
            yield chunk


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
