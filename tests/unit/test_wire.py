"""Bytes of formats that are not ours: read within limits, and never with an exception of another kind."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.errors import RemoteProtocolError
from pdbus.bus.wire import FRAME_BYTES_MAX, pack_foreign, unpack_foreign

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back(value: object) -> None:
    assert unpack_foreign(pack_foreign(value)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        unpack_foreign(data)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", bytes(FRAME_BYTES_MAX + 1)])
def test_damaged_deep_and_large_ones_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_foreign(data)


def test_only_who_expects_more_than_a_frame_is_given_it() -> None:
    data = pack_foreign(bytes(FRAME_BYTES_MAX))
    with pytest.raises(RemoteProtocolError, match=f"at most {FRAME_BYTES_MAX}"):
        unpack_foreign(data)
    assert len(unpack_foreign(data, len(data))) == FRAME_BYTES_MAX
