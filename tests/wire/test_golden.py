"""The bytes on the wire are a promise to other versions: what was written once must always be readable alike."""

from __future__ import annotations

import json

import pytest

from pdbus.bus.frames import unpack
from pdbus.bus.messages import MESSAGES

from tests.wire.golden import FILE, HEADER, example, frames_hex

GOLDEN: dict[str, list[str]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_recorded_bytes_are_read_as_the_example(kind: str) -> None:
    header, message, raw = unpack([bytes.fromhex(frame) for frame in GOLDEN[kind]])
    assert (header, message, raw) == (HEADER, example(MESSAGES[kind]), (b"raw",))


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_same_bytes_are_written_today(kind: str) -> None:
    assert frames_hex(MESSAGES[kind]) == GOLDEN[kind]
