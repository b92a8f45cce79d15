"""Devices that PyTorch drives, on a driver that is made up: none of them is here.

Its memory is the host's. Its copies take place at once, but it keeps what was asked of it, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
import torch

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import Copy, StepRow
from pdbus.connector.layout import layout_of
from pdbus.connector.staging import Way
from pdbus.nodes import setup
from pdbus.nodes.config import load
from pdbus.nodes.copier import Copier
from pdbus.nodes.digests import KvDigests
from pdbus.nodes.engines import ipex, torch_device
from pdbus.nodes.engines.coded import coded_geometry
from pdbus.nodes.engines.torch_device import Cuda, TorchDevice, check_there, check_type
from pdbus.nodes.host import Host
from pdbus.nodes.kv_view import view_of

from tests.unit.test_device import BLOCKS

HOST = Host(cpus=(0,), memory_bytes=1 << 30, run_dir="/tmp", name_suffix="3f2a")


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self._name}")

    def record_event(self) -> Any:
        return type("FakeEvent", (), {"query": lambda _: True, "wait": lambda _: None})()


class FakeDriver:
    """torch.cuda of a machine with `count` devices."""

    def __init__(self, count: int = 1, bfloat16: bool = True) -> None:
        self.log: list[str] = []
        self.pinned: list[tuple[int, int]] = []
        self._count, self._bfloat16 = count, bfloat16
        self._steps = FakeStream(self.log, "steps")

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count

    def get_device_name(self, index: int) -> str:
        return f"Made up {index}"

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._bfloat16

    def set_device(self, device: torch.device) -> None:
        pass

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.log, "copies")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._steps

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append("copy")
        yield

    def cudart(self) -> Any:
        def register(address: int, size: int, flags: int) -> int:
            self.pinned.append((address, size))
            return 0 if size % 2 == 0 else 1

        return type("FakeCudart", (), {"cudaHostRegister": staticmethod(register)})


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(params=["native", "NHD", "HND"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return layout_of(replace(coded_geometry(), layout=request.param), BLOCKS)


@pytest.mark.parametrize("way", Way)
def test_blocks_are_copied_between_a_tensor_and_the_mirror(driver: FakeDriver, layout: KVLayout, way: Way) -> None:
    device = TorchDevice("cpu", driver)
    memory, mirror = device.allocate(layout.region_bytes), bytearray(layout.region_bytes)
    chooser = np.random.default_rng(2)
    for some in (memory.numpy(), np.frombuffer(mirror, np.uint8)):
        some[:] = chooser.integers(0, 256, len(some), np.uint8)
    views = {Way.UP: view_of(memory.numpy(), layout), Way.DOWN: view_of(mirror, layout)}
    source = views[Way.DOWN if way is Way.UP else Way.UP]
    wanted = views[way].copy()
    wanted[[2, 3, 6]] = source[[2, 3, 6]]
    copier = Copier(device, memory, mirror, layout, lambda message: None)
    copier._carry_out(Copy(copy=1, way=way, blocks=pack_u32((2, 3, 6))))
    assert np.array_equal(views[way], wanted)


def test_a_copy_comes_after_the_steps_before_it_and_is_told_behind_a_fence(driver: FakeDriver) -> None:
    """Not after an event: those are hints."""
    device = TorchDevice("cpu", driver)
    device.copy(torch.zeros(4), torch.ones(4))
    device.fence()
    assert driver.log == ["copies waits for steps", "copy", "host waits for copies"]


def test_a_step_has_ended_when_its_stream_has(driver: FakeDriver) -> None:
    TorchDevice("cpu", driver).settle()
    assert driver.log == ["host waits for steps"]


@pytest.mark.parametrize(("shape", "waits"), [((4, 4), False), ((4, 8), True)])
def test_only_one_piece_is_copied_without_waiting(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], waits: bool
) -> None:
    asked = []
    made = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_",
        lambda to, of, non_blocking=False: asked.append(non_blocking) or made(to, of, non_blocking),
    )  # fmt: skip
    TorchDevice("cpu", driver).copy(torch.zeros(shape)[:, :4], torch.ones(4, 4))
    assert asked == [not waits]


def test_the_mirror_is_pinned_for_cuda_and_said_where_it_cannot_be(
    driver: FakeDriver, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Cuda("cpu", driver)
    device.pin(memoryview(bytearray(64)))
    assert [size for _, size in driver.pinned] == [64] and capfd.readouterr().err == ""
    device.pin(memoryview(bytearray(63)))
    assert "cannot pin 0 MiB of host memory (CUDA error 1): copies of KV are slower" in capfd.readouterr().err


def test_digests_of_a_device_s_memory_are_those_of_the_host_s(layout: KVLayout) -> None:
    memory = np.random.default_rng(3).integers(0, 256, layout.region_bytes, np.uint8)
    of_tensor, of_array = KvDigests(torch.from_numpy(memory), layout), KvDigests(memory, layout)
    row = StepRow(seq=1, start=0, count=40, new_blocks=pack_u32([5, 1, 2]))
    for digests in (of_tensor, of_array):
        digests.open(1, 0, 40)
    assert of_tensor.stepped([row]) == of_array.stepped([row])


# ---------------------------------------------------------------- what is not there


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [("cuda", 0, "there is no cuda for .*; there is cpu$"), ("xpu:2", 2, r"xpu:2 .* cpu, xpu:0 \(Made up 0\), xpu:1")],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(name: str, count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--device: .*{said}"):
        check_there(name, FakeDriver(count))


def test_a_type_that_the_device_only_emulates_is_refused() -> None:
    check_type("cuda", FakeDriver(), "bfloat16")
    with pytest.raises(ConfigError, match=r"^--dtype: cuda computes no bfloat16; give float16 or float32"):
        check_type("cuda", FakeDriver(bfloat16=False), "bfloat16")


def test_memory_that_the_device_has_not_is_refused(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = TorchDevice("cpu", driver)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch_device.torch, "empty", full)
    with pytest.raises(ConfigError, match=r"^--kv-memory: cpu has no 4096 MiB free for KV"):
        device.allocate(4 << 30)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_control_asks_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is looked at, let alone fetched."""
    from pdbus.nodes.models import config

    monkeypatch.setattr(config, "resolve_model", pytest.fail)
    with pytest.raises(ConfigError, match=r"^--device: there is no cuda:1 for PyTorch .*; there is cpu$"):
        setup.set_up(load({"device": "cuda", "tp": "2", "model": "smollm2-135m-instruct"}, host=HOST))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.abort()", "--device: asking for xpu ended with status -6"),
        ("import sys; print('noise\\n--dtype: x: y'); sys.exit(2)", "--dtype: x: y"),
        ("import time; time.sleep(60)", "--device: xpu has not answered for 1 s"),
    ],
)
def test_whatever_becomes_of_who_asks_is_one_line(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver or an extension that does not fit may end the process."""
    made = setup.subprocess.run
    monkeypatch.setattr(setup, "DEVICE_WAIT_S", 1)
    monkeypatch.setattr(setup.subprocess, "run", lambda asked, **how: made([asked[0], "-c", program], **how))
    with pytest.raises(ConfigError, match=f"^{said}"):
        setup._check_there("xpu")


# ---------------------------------------------------------------- intel-extension-for-pytorch


def versions(**known: str) -> Any:
    def version_of(package: str) -> str:
        if package not in known:
            raise PackageNotFoundError(package)
        return known[package]

    return version_of


def test_without_the_extension_nothing_is_imported() -> None:
    assert not ipex.check_ipex(versions(torch="2.13.0"))


@pytest.mark.parametrize("own", ["2.8.0", "2.8.10+xpu"])
def test_one_of_the_same_release_fits(own: str) -> None:
    assert ipex.check_ipex(versions(torch="2.8.0+cpu", intel_extension_for_pytorch=own))


def test_another_release_s_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would end the process."""
    monkeypatch.setattr(ipex.importlib, "import_module", pytest.fail)
    monkeypatch.setattr(
        ipex, "check_ipex", lambda: check(versions(torch="2.13.0", intel_extension_for_pytorch="2.8.0"))
    )
    said = r"^pdbus\[ipex\]: intel_extension_for_pytorch 2.8.0 needs torch 2.8, here is torch 2.13.0: pip install"
    with pytest.raises(ConfigError, match=said):
        ipex.load_ipex()


check = ipex.check_ipex
