"""Parsers under garbage and near misses: they raise what they say they raise, and nothing else. Pure and fast."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError, PdError, RequestError
from pdbus.bus.frames import Unreadable, unpack
from pdbus.bus.messages import KVLayout
from pdbus.bus.recording import read
from pdbus.bus.recording_part import VERSION, RawRecord, RecordingHeader
from pdbus.bus.wire import Header, Raw, decode, encode, pack_foreign, unpack_foreign
from pdbus.connector.layout import fault, geometry_for, layout_of
from pdbus.connector.plan import plan
from pdbus.nodes.http.schema import parse_chat, parse_completion

from .near_misses import BODIES, any_message, changed, damaged, frames
from tests.recordings import write

SEEDS = (1, 2, 3)
HEADER = Header(from_="fuzz", from_inc=bytes(16), to="d", to_inc=bytes(16), seq=1)
LAYOUT = layout_of(geometry_for(2, 2, 8, 16, "float32"), blocks=8)


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_are_a_message_or_unreadable(seed: int) -> None:
    draw = random.Random(seed)
    read_ = 0
    for _ in range(4000):
        with contextlib.suppress(Unreadable):
            unpack(frames(draw, HEADER))
            read_ += 1
    assert 0 < read_ < 4000, "near misses are some of each"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_read_is_written_and_read_as_the_same(seed: int) -> None:
    """No message means one thing to one node and another to the next."""
    draw = random.Random(seed)
    for _ in range(3000):
        kind, body = any_message(draw)
        with contextlib.suppress(PdError):
            message = decode(body, kind)
            assert decode(encode(message), kind) == message


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layout_is_refused_or_a_plan_can_be_made_of_it(seed: int) -> None:
    draw = random.Random(seed)
    whole = unpack_foreign(encode(LAYOUT))
    for _ in range(1500):
        with contextlib.suppress(PdError):
            layout = decode(pack_foreign(changed(draw, whole)), KVLayout)
            if fault(layout) is None:
                with contextlib.suppress(PdError):
                    plan((layout,), LAYOUT)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_recording_is_read_as_far_as_it_is_right(tmp_path: Path, seed: int) -> None:
    """Or refused in one line. What is read was there."""
    draw = random.Random(seed)
    header = RecordingHeader(
        version=VERSION, node="d", incarnation=bytes(16), monotonic_ns=1, wall_ns=2, boot="b", about=Raw(b"\xc0")
    )
    records = [
        RawRecord(sequence=i, now_ns=i, kind="Tick", payload=Raw(pack_foreign({"i": i})), cause=0) for i in range(1, 50)
    ]
    path = write(tmp_path / "whole.mcap", header, [(records[:20], 0), (records[20:], 0)])
    data, there = path.read_bytes(), {bytes(record.payload) for record in records}
    bad = tmp_path / "bad.mcap"
    for _ in range(150):
        bad.write_bytes(damaged(draw, data))
        with contextlib.suppress(PdError):
            assert {bytes(record.payload) for record in read(bad).raw()} <= there


@pytest.mark.parametrize("seed", SEEDS)
def test_an_http_body_is_a_request_or_a_problem_that_names_the_field(seed: int) -> None:
    import msgspec

    draw = random.Random(seed)
    for _ in range(2000):
        body = msgspec.json.encode(changed(draw, draw.choice(list(BODIES.values()))))
        body = damaged(draw, body) if draw.random() < 0.2 else body
        for parse in (parse_completion, parse_chat):
            with contextlib.suppress(RequestError, ConfigError):
                parse(body)
