"""The first frame of a message, made and taken apart as docs/protocol.md says, without the code that is tested."""

from __future__ import annotations

import struct


def first_frame(start: bytes, header: bytes, body: bytes = b"") -> bytes:
    """`start` is like b"pd1.status"."""
    return start + b"\0" + struct.pack(">H", len(header)) + header + body


def parts(frame: bytes) -> tuple[bytes, bytes, bytes]:
    """Start, header and body."""
    start, _, rest = frame.partition(b"\0")
    (length,) = struct.unpack(">H", rest[:2])
    return start, rest[2 : 2 + length], rest[2 + length :]
