"""A worker that awaits a step touches what it will need, and leaves off at once when the step comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pdbus.connector.ipc import ProbeWorker, RowResult, Step, StepRow, StopWorker, ToWorker, Warm
from pdbus.nodes import worker
from pdbus.nodes.engines import linear
from pdbus.nodes.engines.device import Cpu
from pdbus.nodes.engines.invariant import ROWS
from pdbus.nodes.engines.linear import LinearMaker

STEP = Step(step=1, rows=(StepRow(seq=1, start=0, count=1),))


class FakeEngine:
    """Says what it did, in order."""

    vocab_size = 0

    def __init__(self, did: list[str]) -> None:
        self.did = did

    def touch(self) -> Iterator[None]:
        for part in ("a", "b", "c"):
            self.did.append(part)
            yield

    def step(self, rows: Sequence[StepRow]) -> list[RowResult]:
        self.did.append("step")
        return []


class FakeDigests:
    def stepped(self, rows: Sequence[StepRow]) -> dict[int, bytes]:
        return {}


class FakeChannel:
    """What comes at each poll; polls that would have waited are noted."""

    def __init__(self, comes: list[list[ToWorker]], did: list[str]) -> None:
        self.comes = comes
        self.did = did

    def poll(self, wait_ms: int) -> list[ToWorker]:
        if wait_ms:
            self.did.append("wait")
        return self.comes.pop(0) if self.comes else [StopWorker()]

    def send(self, message: Any) -> None:
        pass


def done(*comes: list[ToWorker]) -> list[str]:
    did: list[str] = []
    digests: Any = FakeDigests()
    engine: Any = FakeEngine(did)
    channel: Any = FakeChannel(list(comes), did)
    worker.serve(worker.Tools(engine, Cpu(), digests, digests, None), channel)
    return did


def test_it_goes_over_everything_once_and_then_rests() -> None:
    assert done([Warm()], [], [], [], [], [])[:7] == ["wait", "a", "b", "c", "wait", "wait", "wait"]


@pytest.mark.parametrize("came", [[STEP], [ProbeWorker(probe=1), STEP]])
def test_a_step_ends_it(came: list[ToWorker]) -> None:
    assert done([Warm()], came)[:4] == ["wait", "a", "step", "wait"]


def test_a_step_that_comes_with_it_is_not_kept_waiting() -> None:
    assert done([Warm(), STEP])[:3] == ["wait", "step", "wait"]


def test_other_messages_do_not() -> None:
    assert done([Warm()], [ProbeWorker(probe=1)])[:3] == ["wait", "a", "b"]


@pytest.mark.parametrize("weights", ["float32", "fp16", "auto"])
def test_every_matrix_of_a_model_is_touched(weights: str) -> None:
    make = LinearMaker(weights, packs=True, deterministic=False)
    for shape in ((8, 4), (4, 8), (64, 4), (2, 8, 4)):
        make("w", torch.ones(shape))
    assert len(list(make.touch())) == 4


def test_where_rows_come_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that breaks of it takes the hand-off with it."""
    monkeypatch.setattr(linear, "measure_tiles", lambda *args: (ROWS,))
    make = LinearMaker("float32", packs=True, deterministic=True)
    make("w", torch.ones(8, 4))
    assert len(list(make.touch())) == 1


def test_of_whatever_type() -> None:
    make = LinearMaker("auto", packs=False, deterministic=False)
    make("w", torch.ones(8, 4, dtype=torch.bfloat16))
    assert len(list(make.touch())) == 1
