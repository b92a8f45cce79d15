"""A message as ZeroMQ frames and back: `[pd1.<kind>] [header] [body] [raw...]`, the routing id not counted.

Knows limits and blame, nothing of sockets: whatever bytes come in, the answer is a Parsed or an Unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .errors import LocalProtocolError, RemoteProtocolError
from .messages import MESSAGES, Message
from .wire import FRAME_BYTES_MAX, FRAMES_MAX, PREFIX, Header, decode, encode

HEADER_BYTES_MAX = 4096  # a header is two names, two incarnations and two counters
KIND_BYTES_MAX = 64  # the longest kind has 21; what is longer is echoed cut
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX  # all frames together: ZeroMQ limits only one frame

Why = Literal["other_major", "unknown_kind", "bad_header", "bad_body", "too_many_frames", "oversize"]

_FRAME_OF: dict[type[Message], bytes] = {m: PREFIX + m.KIND.encode() for m in MESSAGES.values()}
_CLASS_OF: dict[bytes, type[Message]] = {frame: m for m, frame in _FRAME_OF.items()}
_ANY_MAJOR = re.compile(rb"pd(\d{1,9})\.(.*)", re.DOTALL)


class Parsed(NamedTuple):
    header: Header
    message: Message
    raw: tuple[bytes, ...]


class Unreadable(RemoteProtocolError):
    """Bytes that are no message of ours. `why` names the counter, `header` is there if at least that was readable.

    `is_error`: it was itself an `error`, which is never answered by one.
    """

    def __init__(
        self, why: Why, problem: str, *, kind: str = "", field: str = "", header: Header | None = None
    ) -> None:
        super().__init__(problem, kind=kind, field=field)
        self.why: Why = why
        self.header = header
        self.is_error = kind == "error"


def pack(header: Header, message: Message, raw: Sequence[bytes] = ()) -> list[bytes]:
    """The frames of one message. Raises LocalProtocolError for what no peer would accept."""
    frames = [_FRAME_OF[type(message)], encode(header), encode(message), *raw]
    if len(frames) > FRAMES_MAX:
        raise LocalProtocolError(f"{message.KIND}: {len(frames)} frames, at most {FRAMES_MAX}")
    size = sum(map(len, frames))
    if size > MESSAGE_BYTES_MAX:
        raise LocalProtocolError(f"{message.KIND}: {size} bytes, at most {MESSAGE_BYTES_MAX}")
    return frames


def unpack(frames: Sequence[bytes]) -> Parsed:
    """The inverse of pack. Raises Unreadable, and nothing else, for any other bytes."""
    message_class = _CLASS_OF.get(frames[0])
    if message_class is None:
        raise _not_ours(frames[0])
    kind = message_class.KIND
    if len(frames) > FRAMES_MAX:
        raise Unreadable("too_many_frames", f"{len(frames)} frames, at most {FRAMES_MAX}", kind=kind, field="raw")
    if len(frames) < 3:
        raise Unreadable("bad_body", f"{len(frames)} frames, at least 3: kind, header, body", kind=kind, field="body")
    header = _header(frames[1], kind)
    if sum(map(len, frames)) > MESSAGE_BYTES_MAX:
        problem = f"more than {MESSAGE_BYTES_MAX} bytes in all frames together"
        raise Unreadable("oversize", problem, kind=kind, field="raw", header=header)
    try:
        message = decode(frames[2], message_class, name=kind)
    except RemoteProtocolError as e:
        raise Unreadable("bad_body", str(e), kind=kind, field=e.field or "body", header=header) from None
    return Parsed(header, message, tuple(frames[3:]))


def _header(data: bytes, kind: str) -> Header:
    if len(data) > HEADER_BYTES_MAX:
        problem = f"a header of {len(data)} bytes, at most {HEADER_BYTES_MAX}"
        raise Unreadable("oversize", problem, kind=kind, field="header")
    try:
        return decode(data, Header, name=kind)
    except RemoteProtocolError as e:
        raise Unreadable("bad_header", str(e), kind=kind, field=f"header.{e.field}".removesuffix(".")) from None


def _not_ours(frame: bytes) -> Unreadable:
    match = _ANY_MAJOR.fullmatch(frame[:KIND_BYTES_MAX])
    if match is None:
        return Unreadable("unknown_kind", f"expected {PREFIX.decode()}<kind> in the first frame", kind=_text(frame))
    major, kind = match[1], _text(match[2])
    if b"pd" + major + b"." != PREFIX:
        return Unreadable("other_major", f"major version {int(major)} is not spoken here, only 1", kind=kind)
    return Unreadable("unknown_kind", f"unknown kind {kind!r}", kind=kind)


def _text(data: bytes) -> str:
    return data[:KIND_BYTES_MAX].decode("ascii", "backslashreplace")
