"""Devices and the copier: copies are asynchronous, events lie, and only what is behind a fence is told."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from pdbus.bus.errors import Closed, ConfigError
from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import Declared, pack_u32, replace
from pdbus.connector.ipc import Copied, Copy
from pdbus.connector.layout import layout_of
from pdbus.connector.staging import Way
from pdbus.nodes.copier import Copier, runs_of
from pdbus.nodes.engines.coded import coded_geometry
from pdbus.nodes.engines.device import GARBAGE, Cpu, Device, FakeDevice, device_of
from pdbus.nodes.kv_view import view_of

BLOCKS = 8


@pytest.mark.parametrize("wait", ["query", "wait"])
def test_the_events_of_the_fake_lie_and_its_fence_does_not(wait: str) -> None:
    """Whoever trusts an event of it reads garbage, so that no test can pass by trusting one."""
    device = FakeDevice(late_s=0.05)
    source, target = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    event = device.copy(source, target)
    assert event.query()
    getattr(event, wait)()
    assert (target == GARBAGE).all()
    device.fence()
    assert (target == 7).all()


def test_the_fake_copies_what_stands_there_late() -> None:
    """A source that is given away too early is seen by what arrives."""
    device = FakeDevice(late_s=0.05)
    source, target = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    device.copy(source, target)
    source[:] = 8
    device.fence()
    assert (target == 8).all()


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^--device: 'tpu' is none of cpu, cuda, xpu, fake"):
        device_of("tpu")


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [((), []), ((3,), [(3, 4)]), ((1, 2, 3, 7, 8, 5), [(1, 4), (7, 9), (5, 6)]), ((2, 1), [(2, 3), (1, 2)])],
)
def test_neighbours_are_copied_together(blocks: tuple[int, ...], runs: list[tuple[int, int]]) -> None:
    assert list(runs_of(blocks)) == runs


# ---------------------------------------------------------------- the copier


class Bench:
    """A copier between two memories full of random bytes."""

    def __init__(self, device: Device, layout: KVLayout) -> None:
        chooser = np.random.default_rng(1)
        self.memory = device.allocate(layout.region_bytes)
        self.mirror = bytearray(layout.region_bytes)
        self.views = {Way.UP: view_of(self.memory, layout), Way.DOWN: view_of(self.mirror, layout)}
        for view in self.views.values():
            view[...] = chooser.integers(0, 256, view.shape, np.uint8)
        self.said: list[Declared] = []
        self._heard = threading.Condition()
        self.copier = Copier(device, self.memory, self.mirror, layout, self._hear)

    def _hear(self, message: Declared) -> None:
        with self._heard:
            self.said.append(message)
            self._heard.notify()

    def until(self, count: int) -> list[Any]:
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.said) >= count, timeout=10)
        return list(self.said)


@pytest.fixture(params=["native", "NHD", "HND"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return layout_of(replace(coded_geometry(), layout=request.param), BLOCKS)


@pytest.fixture(params=[Cpu, FakeDevice])
def bench(request: pytest.FixtureRequest, layout: KVLayout) -> Bench:
    return Bench(request.param(), layout)


@pytest.mark.parametrize("way", Way)
def test_these_blocks_are_copied_and_no_others(bench: Bench, layout: KVLayout, way: Way) -> None:
    """Whatever the layout: it is the same on both sides."""
    blocks = (2, 3, 6)
    source = bench.views[Way.DOWN if way is Way.UP else Way.UP]
    target = bench.views[way]
    before, after = target.copy(), target.copy()
    after[list(blocks)] = source[list(blocks)]
    bench.copier.begin(Copy(copy=1, way=way, blocks=pack_u32(blocks)))
    (copied,) = bench.until(1)
    assert np.array_equal(target, after) and not np.array_equal(target, before)
    assert copied == Copied(copy=1, bytes=3 * layout.region_bytes // BLOCKS, copy_ns=copied.copy_ns, in_step=False)


def test_copies_are_told_in_order_each_behind_its_fence(bench: Bench) -> None:
    for number in range(5):
        bench.copier.begin(Copy(copy=number, way=Way.DOWN, blocks=pack_u32((number,))))
    assert [copied.copy for copied in bench.until(5)] == list(range(5))
    assert np.array_equal(bench.views[Way.DOWN][:5], bench.views[Way.UP][:5])


def test_a_copy_goes_on_beside_a_step(bench: Bench) -> None:
    """A step that ends only after the copy: had one waited for the other, this would not end."""
    with bench.copier.beside_step():
        bench.copier.begin(Copy(copy=1, way=Way.DOWN, blocks=pack_u32((0,))))
        (copied,) = bench.until(1)
    assert copied.in_step


def test_without_control_the_copier_ends_quietly(layout: KVLayout) -> None:
    told = threading.Event()

    def gone(message: Declared) -> None:
        told.set()
        raise Closed("control has ended")

    memory = bytearray(layout.region_bytes)
    Copier(Cpu(), memory, bytearray(layout.region_bytes), layout, gone).begin(Copy(copy=1, way=Way.UP, blocks=b""))
    assert told.wait(10)
