"""Frames: limits and blame, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.frames import Unreadable, pack, unpack
from pdbus.bus.messages import MESSAGES, Cancel, Error
from pdbus.bus.wire import Header

HEADER = Header(from_="a", from_inc=b"1")


def test_what_is_packed_is_unpacked() -> None:
    assert unpack(pack(HEADER, Cancel(client_id="c"), [b"x"])) == (HEADER, Cancel(client_id="c"), (b"x",))


def test_the_kind_can_be_read_without_decoding() -> None:
    assert pack(HEADER, Error(message="no"))[0] == b"pd1.error"


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=20))
def test_random_frames_are_unreadable_and_nothing_worse(frames: list[bytes]) -> None:
    with pytest.raises(Unreadable):
        unpack(frames)


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=64), st.binary(max_size=200))
def test_random_headers_and_bodies_of_known_kinds_are_read_or_unreadable(kind: str, header: bytes, body: bytes) -> None:
    for frames in (
        [b"pd1." + kind.encode(), header, body],
        [b"pd1." + kind.encode(), pack(HEADER, Cancel(client_id=""))[1], body],
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
