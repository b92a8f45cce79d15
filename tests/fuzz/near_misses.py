"""Bytes that are nearly right: messages, headers and HTTP requests with a little of them changed, by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pdbus.bus.messages import MESSAGES, Message
from pdbus.bus.wire import Header, encode, pack_foreign, unpack_foreign

from tests.wire.first_frame import first_frame, parts
from tests.wire.golden import FILE

NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63))
WORDS = ("", "\x00", "é" * 40, "x" * 5000, "tcp://127.0.0.1:1", "../../etc/passwd", "{{7*7}}", "\ud83d")
DEPTH = 3000  # of a bomb
# A valid one of these changes who is there or what runs: what it does to a node is not what is asked here.
LEFT_OUT = ("drain", "disconnect", "goodbye")


class Parts(NamedTuple):
    """Of one message."""

    start: bytes
    header: bytes
    body: bytes
    raw: tuple[bytes, ...]


def _parted(first: str, *raw: str) -> Parts:
    return Parts(*parts(bytes.fromhex(first)), tuple(map(bytes.fromhex, raw)))


golden: dict[str, Parts] = {
    kind: _parted(*frames) for kind, frames in json.loads(FILE.read_text()).items() if kind not in LEFT_OUT
}


def value(draw: random.Random, depth: int = 0) -> Any:
    """Any value that msgpack and JSON can both hold."""
    match draw.randrange(8 if depth < 3 else 5):
        case 0:
            return draw.choice(NUMBERS)
        case 1:
            return draw.choice(WORDS).encode("utf-8", "replace").decode()
        case 2:
            return draw.choice((None, True, False, 0.5, 1e308))
        case 3:
            return draw.randrange(-300, 300)
        case 4:
            return "".join(chr(draw.randrange(32, 1000)) for _ in range(draw.randrange(12)))
        case 5:
            return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
        case 6:
            return {f"k{i}": value(draw, depth + 1) for i in range(draw.randrange(4))}
    return [0] * draw.randrange(300)


def changed(draw: random.Random, whole: Any) -> Any:
    """The value with one part of it, at any depth, another, missing, or twice."""
    if isinstance(whole, dict) and whole and draw.random() < 0.85:
        key = draw.choice(sorted(whole, key=str))
        rest = {k: v for k, v in whole.items() if k != key}
        if draw.random() < 0.2:
            return rest | ({f"{key}x": whole[key]} if draw.random() < 0.5 else {})
        return rest | {key: changed(draw, whole[key])}
    if isinstance(whole, list) and whole and draw.random() < 0.7:
        at = draw.randrange(len(whole))
        return [*whole[:at], *([] if draw.random() < 0.2 else [changed(draw, whole[at])]), *whole[at + 1 :]]
    return value(draw)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """A few bytes flipped, missing, in the wrong place or too many."""
    if not data:
        return draw.randbytes(draw.randrange(20))
    at = draw.randrange(len(data))
    match draw.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + draw.randbytes(draw.randrange(1, 20)) + data[at:]
        case 3:
            return data[at:] + data[:at]
        case 4:
            return data * 2
    return data[:at] + draw.choice((b"\xff" * 9, b"\x91" * DEPTH, b"\xdf\xff\xff\xff\xff", b"\xc1")) + data[at:]


def frames(draw: random.Random, header: Header) -> list[bytes]:
    """One message, or what is nearly one. Under `header`, but for a quarter of them."""
    if draw.random() < 0.05:
        return [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 6))]
    start, _, body, raw = golden[draw.choice(sorted(golden))]
    head = encode(header)
    match draw.randrange(6):
        case 0:
            made = _damaged(draw, start, head, body, raw)
        case 1:
            made = [first_frame(start, pack_foreign(changed(draw, unpack_foreign(head))), body), *raw]
        case 2:
            whole = first_frame(start, head, body)
            if draw.random() < 0.5:
                made = [whole[: draw.randrange(len(whole))]]
            else:
                made = [whole, *raw, *[b"x"] * draw.randrange(1, 80)]
        case _:
            made = [first_frame(start, head, pack_foreign(changed(draw, unpack_foreign(body)))), *raw]
    return made if not _changes_the_cluster(made) else frames(draw, header)


def _damaged(draw: random.Random, start: bytes, head: bytes, body: bytes, raw: Sequence[bytes]) -> list[bytes]:
    """One part of it: itself, or where it stands in the frame, its length being that of the part as it was."""
    match draw.randrange(5):
        case 0:
            return [first_frame(damaged(draw, start), head, body), *raw]
        case 1:
            return [first_frame(start, damaged(draw, head), body), *raw]
        case 2:
            return [first_frame(start, head, damaged(draw, body)), *raw]
        case 3 if raw:
            return [first_frame(start, head, body), *(damaged(draw, data) for data in raw)]
    return [damaged(draw, first_frame(start, head, body)), *raw]


def _changes_the_cluster(made: Sequence[bytes]) -> bool:
    return any(made[0].partition(b"\0")[0].endswith(kind.encode()) for kind in LEFT_OUT)


def any_message(draw: random.Random) -> tuple[type[Message], bytes]:
    """A kind, and a body that may or may not be one of it."""
    kind = draw.choice(sorted(golden))
    body = golden[kind].body
    mutate: Callable[[], bytes] = draw.choice(
        (lambda: damaged(draw, body), lambda: pack_foreign(changed(draw, unpack_foreign(body))))
    )
    return MESSAGES[kind], mutate()


# ---------------------------------------------------------------- HTTP

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health/ready", "/metrics",
    "/add_remote_prefill_eps", "/ui", "/", "/%00", "/v1/" + "x" * 3000, "/v1/completions?x=%ff",
)  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"], "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "top_p": 0.9},
    "/v1/completions?": {"prompt": [5, 6, 7], "max_tokens": 2, "logit_bias": {"65": 1.0}, "n": 2},
    "/add_remote_prefill_eps": {"endpoints": ["http://127.0.0.1:1"]},
    "/detokenize": {"tokens": [65, 66]},
}
HEADERS = ("Transfer-Encoding: chunked", "Authorization: Bearer \x7f", "X: " + "y" * 9000, "no colon", ": x")
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW")


def request(draw: random.Random) -> bytes:
    """The bytes of one HTTP request, or of what is nearly one."""
    if draw.random() < 0.05:
        return draw.randbytes(draw.randrange(1, 400))
    at = draw.choice(sorted(BODIES))
    body = _body(draw, BODIES[at])
    path = at if draw.random() < 0.8 else draw.choice(PATHS)
    method = draw.choice(METHODS) if draw.random() < 0.1 else "POST"
    length = len(body) if draw.random() < 0.9 else draw.choice((0, -1, 5, 10**9, 10**20))
    lines = [
        f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json",
        f"Content-Length: {length}",
    ]  # fmt: skip
    if draw.random() < 0.2:
        lines.append(
            draw.choice(
                ("Transfer-Encoding: chunked", "Authorization: Bearer \x7f", "X: " + "y" * 9000, "no colon", ": x")
            )
        )
    whole = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
    return damaged(draw, whole) if draw.random() < 0.2 else whole


def _body(draw: random.Random, like: dict[str, Any]) -> bytes:
    if draw.random() < 0.02:
        return draw.choice((b"[" * DEPTH, b'{"a":' * DEPTH, b'"' + b"x" * 100_000 + b'"'))
    plain = msgspec.json.encode(like if draw.random() < 0.2 else changed(draw, like))
    return damaged(draw, plain) if draw.random() < 0.2 else plain
