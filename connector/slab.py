"""The memory that holds a node's KV cache: one memfd, mapped by control's children, registered with NIXL once.

A memfd has no name in the file system and dies with its last user. Control creates it and keeps it open;
worker and mover map it through /proc/<control pid>/fd/<n>, so that either can be replaced without losing a byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

from pdbus.bus.errors import Broken, ConfigError

MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by the mmap module of Python 3.11
_libc = ctypes.CDLL(None, use_errno=True)


class Slab:
    """A mapped region. Page aligned; `size_bytes` is what was asked for, unrounded."""

    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, page_rounded(size_bytes), mmap.MAP_SHARED)
        self.path = path
        self.size_bytes = size_bytes
        self.memory: memoryview = memoryview(self._map)[:size_bytes]
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, size_bytes: int) -> Slab:
        """A new zeroed region. Raises ConfigError naming `--kv-memory` when the machine has not that much."""
        check_available(size_bytes)
        fd = os.memfd_create("pdbus-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, page_rounded(size_bytes))
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}", size_bytes)
        except OSError as e:
            os.close(fd)
            raise ConfigError("--kv-memory", f"cannot map {size_bytes} bytes of shared memory: {e.strerror}") from None

    @classmethod
    def open(cls, path: str, size_bytes: int) -> Slab:
        """Map another process's region. Raises Broken when it is gone or smaller than `size_bytes`."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise Broken(f"cannot open the KV slab at {path}: {e.strerror}") from None
        if (there := os.fstat(fd).st_size) < size_bytes:
            os.close(fd)
            raise Broken(f"the KV slab at {path} has {there} bytes, not {size_bytes}")
        return cls(fd, path, size_bytes)

    def populate(self, size_bytes: int) -> None:
        """Fault the first pages in now rather than in the first read of each block. Older kernels skip it."""
        size = ctypes.c_size_t(page_rounded(size_bytes))
        _libc.madvise(ctypes.c_void_p(self.address), size, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap, unless tensors or arrays still look into it: then the mapping ends with the last of them."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


def page_rounded(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages; at least one."""
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def check_available(size_bytes: int) -> None:
    """Raises ConfigError when a slab of that size would not fit: a memfd itself fails only at a later touch."""
    if size_bytes < 1:
        raise ConfigError("--kv-memory", f"{size_bytes} bytes, but at least one KV block is needed")
    free = available_bytes()
    if size_bytes > free:
        raise ConfigError(
            "--kv-memory", f"the KV cache needs {size_bytes >> 20} MiB, but only {free >> 20} MiB of memory are free"
        )


def available_bytes() -> int:
    """Free memory, in bytes: what the kernel calls available, and what the control group leaves, if that is less."""
    return min(_meminfo_available(), _cgroup_left())


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_left() -> int:
    """From cgroup v2's memory.max, counting page cache as free; without a limit as good as infinite."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    return limit - used + int(stat.get("inactive_file", 0))
