"""A message as ZeroMQ frames and back: `[pd1.<kind> 0 length header body] [raw...]`, the routing id not counted.

All that is said stands in one frame, since each is sealed and opened by itself where there are keys. A zero byte ends
the kind; the length is the header's, two bytes, big-endian. Knows limits and blame, nothing of sockets: whatever bytes
come in, the answer is a Parsed or an Unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .errors import LocalProtocolError, RemoteProtocolError
from .messages import MESSAGES, Message
from .wire import FRAME_BYTES_MAX, FRAMES_MAX, PREFIX, Header, decode, encode

HEADER_BYTES_MAX = 4096  # a header is two names, two incarnations and two counters
NAME_CHARS_MAX, INCARNATION_BYTES_MAX = 256, 64  # of the sender: an answer's header has them beside ours
LENGTH_BYTES = 2  # of the header's length
KIND_BYTES_MAX = 64  # the longest kind has 21; what is longer is echoed cut
KIND_END = b"\0"
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX  # all frames together: ZeroMQ limits only one frame

Why = Literal["other_major", "unknown_kind", "bad_header", "bad_body", "too_many_frames", "oversize"]

_START_OF: dict[type[Message], bytes] = {m: PREFIX + m.KIND.encode() + KIND_END for m in MESSAGES.values()}
_CLASS_OF: dict[bytes, type[Message]] = {start.removesuffix(KIND_END): m for m, start in _START_OF.items()}
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
    head = encode(header)
    if len(head) > HEADER_BYTES_MAX:
        raise LocalProtocolError(f"{message.KIND}: a header of {len(head)} bytes, at most {HEADER_BYTES_MAX}")
    length = len(head).to_bytes(LENGTH_BYTES, "big")
    frames = [b"".join((_START_OF[type(message)], length, head, encode(message))), *raw]
    if len(frames) > FRAMES_MAX:
        raise LocalProtocolError(f"{message.KIND}: {len(frames)} frames, at most {FRAMES_MAX}")
    size = sum(map(len, frames))
    if size > MESSAGE_BYTES_MAX:
        raise LocalProtocolError(f"{message.KIND}: {size} bytes, at most {MESSAGE_BYTES_MAX}")
    return frames


def unpack(frames: Sequence[bytes]) -> Parsed:
    """The inverse of pack. Raises Unreadable, and nothing else, for any other bytes."""
    first = frames[0]
    kind_end = first.find(KIND_END)
    message_class = _CLASS_OF.get(first[:kind_end] if kind_end >= 0 else first)
    if message_class is None:
        raise _not_ours(first)
    kind = message_class.KIND
    if len(frames) > FRAMES_MAX:
        raise Unreadable("too_many_frames", f"{len(frames)} frames, at most {FRAMES_MAX}", kind=kind, field="raw")
    header, end = _header(first, len(kind) + len(PREFIX) + len(KIND_END), kind)
    if sum(map(len, frames)) > MESSAGE_BYTES_MAX:
        problem = f"more than {MESSAGE_BYTES_MAX} bytes in all frames together"
        raise Unreadable("oversize", problem, kind=kind, field="raw", header=header)
    try:
        message = decode(first[end:], message_class, name=kind)
    except RemoteProtocolError as e:
        raise Unreadable("bad_body", str(e), kind=kind, field=e.field or "body", header=header) from None
    return Parsed(header, message, tuple(frames[1:]))


def _header(first: bytes, at: int, kind: str) -> tuple[Header, int]:
    """The header whose length stands at `at`, and where the body begins."""
    begin = at + LENGTH_BYTES
    length = int.from_bytes(first[at:begin], "big")
    if length > HEADER_BYTES_MAX:
        problem = f"a header of {length} bytes, at most {HEADER_BYTES_MAX}"
        raise Unreadable("oversize", problem, kind=kind, field="header")
    end = begin + length
    if not length or end > len(first):
        raise Unreadable(
            "bad_header",
            "a zero byte, two of the header's length, header and body must follow the kind",
            kind=kind,
            field="header",
        )
    try:
        header = decode(first[begin:end], Header, name=kind)
    except RemoteProtocolError as e:
        raise Unreadable("bad_header", str(e), kind=kind, field=f"header.{e.field}".removesuffix(".")) from None
    if len(header.from_) > NAME_CHARS_MAX:
        problem = f"a name of {len(header.from_)} characters, at most {NAME_CHARS_MAX}"
        raise Unreadable("bad_header", problem, kind=kind, field="header.from")
    if len(header.from_inc) > INCARNATION_BYTES_MAX:
        problem = f"an incarnation of {len(header.from_inc)} bytes, at most {INCARNATION_BYTES_MAX}"
        raise Unreadable("bad_header", problem, kind=kind, field="header.from_inc")
    return header, end


def _not_ours(first: bytes) -> Unreadable:
    start = first[:KIND_BYTES_MAX].partition(KIND_END)[0]
    match = _ANY_MAJOR.fullmatch(start)
    if match is None:
        return Unreadable("unknown_kind", f"expected {PREFIX.decode()}<kind> in the first frame", kind=_text(start))
    major, kind = match[1], _text(match[2])
    if b"pd" + major + b"." != PREFIX:
        return Unreadable("other_major", f"major version {int(major)} is not spoken here, only 1", kind=kind)
    return Unreadable("unknown_kind", f"unknown kind {kind!r}", kind=kind)


def _text(data: bytes) -> str:
    return data[:KIND_BYTES_MAX].decode("ascii", "backslashreplace")
