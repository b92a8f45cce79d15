"""Devices that PyTorch drives: their memory is a tensor, copies go along a stream of their own, beside the steps.

    python -m pdbus.nodes.engines.torch_device cuda:1

says in one line what keeps such a device from being used, with exit status 2, or nothing. Control asks so: it imports
no torch, and a broken driver or extension ends that process and not control.

Untested on real devices: what the tests have is a driver made up in Python.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdbus.bus.errors import ConfigError
from pdbus.nodes.kv_view import Bytes

from .ipex import load_ipex

KINDS = ("cuda", "xpu")


class StreamEvent:
    """Where a stream stood: a hint, as device.py says of events."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def query(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()


class TorchDevice:
    """`driver` is PyTorch's module of that kind of device: torch.cuda, torch.xpu."""

    def __init__(self, name: str, driver: Any = None) -> None:
        """Raises ConfigError naming `--device` when it is not there."""
        self.device = torch.device(name)
        self._driver = driver or getattr(torch, self.device.type)
        check_there(name, self._driver)
        self._driver.set_device(self.device)
        self._stream = self._driver.Stream(device=self.device)

    def allocate(self, size_bytes: int) -> Tensor:
        """Raises ConfigError naming `--kv-memory` when the device has not that much."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            problem = f"{self.device} has no {size_bytes >> 20} MiB free for KV: give less, or fewer --kv-blocks"
            raise ConfigError("--kv-memory", problem) from None

    def pin(self, memory: memoryview) -> None:
        """PyTorch has no call for it that all kinds know. Copies from memory that is not pinned are slower."""

    def copy(self, source: Tensor | Bytes, target: Tensor | Bytes) -> StreamEvent:
        """Without a wait where both lie in one piece. Else PyTorch goes through a copy of its own in host memory, which
        it may read before it is filled, unless it waits."""
        source, target = _tensor(source), _tensor(target)
        piece = source.is_contiguous() and target.is_contiguous()
        self._stream.wait_stream(self._driver.current_stream(self.device))
        with self._driver.stream(self._stream):
            target.copy_(source, non_blocking=piece)
        return StreamEvent(self._stream.record_event())

    def fence(self) -> None:
        self._stream.synchronize()

    def settle(self) -> None:
        self._driver.current_stream(self.device).synchronize()


class Cuda(TorchDevice):
    """NVIDIA's. (AMD's, where PyTorch calls them cuda, are untested, too.)"""

    def pin(self, memory: memoryview) -> None:
        """Says on standard error when it cannot be: copies are slower then."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        error = int(self._driver.cudart().cudaHostRegister(address, len(memory), 0))
        if error:
            print(f"cannot pin {len(memory) >> 20} MiB of host memory (CUDA error {error}): copies of KV are slower",
                  file=sys.stderr)  # fmt: skip


class Xpu(TorchDevice):
    """Intel's. ONEAPI_DEVICE_SELECTOR chooses among several, as everywhere."""

    def __init__(self, name: str, driver: Any = None) -> None:
        load_ipex()
        super().__init__(name, driver)


def _tensor(part: Tensor | Bytes) -> Tensor:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def torch_device(name: str) -> TorchDevice:
    """`cuda`, `xpu`, or one of several: `cuda:1`. Raises ConfigError naming `--device`."""
    return (Cuda if name.partition(":")[0] == "cuda" else Xpu)(name)


def check_there(name: str, driver: Any) -> None:
    """Raises ConfigError naming `--device`, and what there is."""
    kind, _, index = name.partition(":")
    count = driver.device_count() if driver.is_available() else 0
    if int(index or 0) < count:
        return
    some = [f"{kind}:{i} ({driver.get_device_name(i)})" for i in range(count)]
    here = ", ".join(["cpu", *some])
    raise ConfigError("--device", f"there is no {name} for PyTorch {torch.__version__}; there is {here}")


def check_type(name: str, driver: Any, dtype: str) -> None:
    """Raises ConfigError naming `--dtype` for one that it lacks. PyTorch would emulate it."""
    has = getattr(driver, "is_bf16_supported", None)
    if dtype == "bfloat16" and has is not None and not has(False):  # without emulation, both kinds' first argument
        raise ConfigError("--dtype", f"{name} computes no bfloat16; give float16 or float32")


def main(name: str) -> int:
    try:
        torch_device(name)
    except ConfigError as e:
        print(f"{e.setting}: {e.problem}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
