"""The one wrapper around NIXL: an agent over one region of host memory.

What it hides: the flavour's import (never `import nixl`, which pulls in torch to choose one), descriptor lists,
and exceptions: the only terminal one is RemoteDisconnect (or a read that could not even be prepared), any other
proves nothing. The methods and errors are those of agent.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.errors import Broken, ConfigError, PdError

from .agent import ReadDoubtful, ReadFailed
from .apply import Runs
from .flavours import NIXL_FLAVOURS

WARM_UP_BYTES = 64

_HINTS = (
    ("UCX_TLS and UCX_NET_DEVICES must name a transport and a device that exist here, or be unset", "BACKEND"),
    ("the metadata is damaged or of another NIXL version", "MISMATCH"),
    ("raise the limit on open files (`ulimit -n`)", "too many open files"),
)  # fmt: skip


class RemotePeer:
    """A peer's agent as loaded here: its name, and where its region begins."""

    def __init__(self, name: str, base_address: int) -> None:
        self.name = name
        self.base_address = base_address


class NixlAgent:
    """One NIXL agent over `size_bytes` at `address`, for one thread. Nobody must ever have used `name` before."""

    def __init__(self, name: str, address: int, size_bytes: int, *, progress_thread: bool = False) -> None:
        """With NIXL's `progress_thread` there is no need to `pump`, but it takes a core: benches compare.
        Raises Broken when NIXL cannot, ConfigError naming --kv-memory when it cannot register so much."""
        api = load_flavour()
        self._bindings = importlib.import_module(f"{api.__package__}._bindings")
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)  # where warm-up reads land
        self._scratch_address = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
        self._address = address
        self._regions: list[Any] = []
        with translated(f"cannot create the NIXL agent {name}"):
            config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
            self._agent = api.nixl_agent(name, config)
        try:
            self._register(self._scratch_address, mmap.PAGESIZE)
            self._register(address, size_bytes)
            with translated(f"cannot describe the NIXL agent {name}"):
                self.metadata: bytes = self._agent.get_agent_metadata()
        except PdError:
            with contextlib.suppress(Broken):
                self.close()
            raise

    def _register(self, address: int, size_bytes: int) -> None:
        try:
            self._regions.append(self._agent.register_memory([(address, size_bytes, 0, "")], "DRAM"))
        except Exception as e:
            raise ConfigError(
                "--kv-memory",
                f"NIXL cannot register {size_bytes} bytes of memory ({_text(e)}); {_locked_limit()}",
            ) from None

    def add_peer(self, name: str, metadata: bytes, base_address: int, region_bytes: int) -> RemotePeer:
        """Load a peer. Raises Broken when the metadata cannot be used or is another agent's than `name`."""
        with translated(f"cannot load the metadata of agent {name}"):
            loaded = self._agent.add_remote_agent(metadata)
        loaded = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
        if loaded != name:
            raise Broken(f"the metadata is of agent {loaded}, not of {name}")
        with translated(f"the region of agent {name} is not what its metadata says"):
            self._agent.prep_xfer_dlist(name, np.array([[base_address, region_bytes, 0]], np.uint64), "DRAM").release()
        return RemotePeer(name, base_address)

    def remove_peer(self, peer: RemotePeer) -> None:
        """Forget a peer to which no handle is left. (With one left, its status would be lost.)"""
        with translated(f"cannot remove agent {peer.name}"):
            self._agent.remove_remote_agent(peer.name)

    def make_warm_up(self, peer: RemotePeer) -> Any:
        """A read of a few bytes into scratch: it makes both sides connect."""
        with translated(f"cannot reach agent {peer.name}", ReadFailed):
            here = self._agent.get_xfer_descs([(self._scratch_address, WARM_UP_BYTES, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(peer.base_address, WARM_UP_BYTES, 0)], "DRAM")
            return self._agent.initialize_xfer("READ", here, there, peer.name)

    def make_read(self, peer: RemotePeer, runs: Runs) -> Any:
        """A handle for reading runs of bytes, not yet posted. Raises ReadFailed: there is no handle."""
        with translated(f"cannot prepare a read from agent {peer.name}", ReadFailed):
            here = self._agent.get_xfer_descs(_rows(self._address, runs.target, runs.length), "DRAM")
            there = self._agent.get_xfer_descs(_rows(peer.base_address, runs.source, runs.length), "DRAM")
            return self._agent.initialize_xfer("READ", here, there, peer.name)

    def post(self, handle: Any) -> bool:
        """Start a read; True when it is already done, as one within a machine is when asked after at once. Raises
        ReadFailed or ReadDoubtful."""
        with self._judged():
            return bool(self._agent.transfer(handle) == "DONE" or self._agent.check_xfer_state(handle) == "DONE")

    def check(self, handle: Any) -> bool:
        """True when done. Raises ReadFailed or ReadDoubtful."""
        with self._judged():
            return bool(self._agent.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        """Give up a handle whose read is terminal."""
        with translated("cannot release a finished read"):
            handle.release()

    def pump(self) -> None:
        """Let NIXL progress, for our reads and for those who read from us. Nothing else does."""
        with translated("NIXL cannot progress"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """End the agent. With every handle released, nothing is written or read afterwards."""
        with translated("cannot deregister memory"):
            while self._regions:
                self._agent.deregister_memory(self._regions.pop())
        del self._agent

    @contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
        except self._bindings.nixlRemoteDisconnectError as e:
            raise ReadFailed(f"the peer has gone: {_text(e)}") from None
        except Exception as e:
            raise ReadDoubtful(_text(e)) from None


def load_flavour() -> Any:
    """The API module of the installed NIXL flavour. Raises Broken when none can be loaded."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it reads this when imported, and logs to stdout
    problems = []
    for flavour in NIXL_FLAVOURS:
        try:
            return importlib.import_module(f"{flavour}._api")
        except ImportError as e:
            problems.append(f"{flavour}: {e}")
    raise Broken("no NIXL can be loaded; install pdbus[node] (" + "; ".join(problems) + ")")


@contextmanager
def translated(what: str, error: type[Broken] = Broken) -> Iterator[None]:
    """NIXL's and UCX's bare exceptions as `error`, saying what failed and what may help."""
    try:
        yield
    except Exception as e:
        text = _text(e)
        hint = next((f"; {hint}" for hint, sign in _HINTS if sign.lower() in text.lower()), "")
        raise error(f"{what}: {text}{hint}") from None


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "locked memory is not limited (`ulimit -l`): give less memory"
    return f"the limit on locked memory is {limit} bytes (`ulimit -l`): raise it, or give less memory"


def _text(e: Exception) -> str:
    return " ".join(str(e).split()) or type(e).__name__


def _rows(address: int, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> Any:
    """Descriptors, one a row: [address, length, device]."""
    rows = np.zeros((len(offsets), 3), np.uint64)
    rows[:, 0] = offsets + np.uint64(address)
    rows[:, 1] = lengths
    return rows
