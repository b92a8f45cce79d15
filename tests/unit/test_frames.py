"""Frames: limits and blame, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.frames import HEADER_BYTES_MAX, Unreadable, pack, unpack
from pdbus.bus.messages import MESSAGES, Cancel, Error
from pdbus.bus.wire import Header, encode

from tests.wire.first_frame import first_frame

HEADER = Header(from_="a", from_inc=b"1")


def test_what_is_packed_is_unpacked() -> None:
    assert unpack(pack(HEADER, Cancel(client_id="c"), [b"x"])) == (HEADER, Cancel(client_id="c"), (b"x",))


def test_the_kind_can_be_read_without_decoding() -> None:
    assert pack(HEADER, Error(message="no"))[0].startswith(b"pd1.error\0")


def test_a_message_is_one_frame_and_its_raw_ones_as_the_protocol_says() -> None:
    message = Cancel(client_id="c")
    assert pack(HEADER, message, [b"x"]) == [first_frame(b"pd1.cancel", encode(HEADER), encode(message)), b"x"]


def test_a_header_that_no_peer_would_accept_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match=f"a header of .* bytes, at most {HEADER_BYTES_MAX}"):
        pack(Header(from_="a" * HEADER_BYTES_MAX, from_inc=b""), Cancel(client_id="c"))


def test_every_cut_of_a_first_frame_is_unreadable() -> None:
    """Wherever it ends: in the kind, the length, the header or the body."""
    (whole,) = pack(HEADER, Cancel(client_id="c"))
    for end in range(len(whole)):
        fault = fault_of([whole[:end]])
        assert fault is not None
        assert fault.why in ("unknown_kind", "bad_header", "bad_body")


def test_what_follows_a_body_makes_it_unreadable() -> None:
    (whole,) = pack(HEADER, Cancel(client_id="c"))
    fault = fault_of([whole + b"\x80"])
    assert fault is not None
    assert (fault.why, fault.field, fault.header) == ("bad_body", "body", HEADER)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=20))
def test_random_frames_are_unreadable_and_nothing_worse(frames: list[bytes]) -> None:
    with pytest.raises(Unreadable):
        unpack(frames)


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=64), st.binary(max_size=200))
def test_random_headers_and_bodies_of_known_kinds_are_read_or_unreadable(kind: str, header: bytes, body: bytes) -> None:
    for frames in (
        [first_frame(b"pd1." + kind.encode(), header, body)],
        [first_frame(b"pd1." + kind.encode(), encode(HEADER), body)],
        [b"pd1." + kind.encode() + b"\0" + header + body],
    ):
        fault = fault_of(frames)
        if fault is not None:
            assert fault.kind == kind
            assert fault.is_error == (kind == "error")


def fault_of(frames: list[bytes]) -> Unreadable | None:
    """What is wrong with these bytes; None when they are a message. Anything else that is raised fails the test."""
    try:
        unpack(frames)
    except Unreadable as e:
        return e
    return None
