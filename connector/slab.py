"""The memory that holds a node's KV cache: one memfd, mapped by control's children, registered with NIXL once.

A memfd has no name in the file system and dies with its last user. Control creates it and keeps it open;
worker and mover map it through /proc/<control pid>/fd/<n>, so that either can be replaced without losing a byte.

It lies on huge pages where the kernel can give them: a read by CMA pins and walks every page of both sides, and goes
1.4 times as fast for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

from pdbus.bus.errors import Broken, ConfigError

# Not named by the mmap module of Python 3.11
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1; huge pages at once, whatever shmem_enabled says but `deny`
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Slab:
    """A mapped region, aligned to a huge page; `size_bytes` is what was asked for, unrounded."""

    def __init__(self, fd: int, path: str, size_bytes: int) -> None:
        """Raises OSError when it cannot be mapped."""
        self._fd = fd
        self._map, offset = _mapped(fd, page_rounded(size_bytes))
        self.path = path
        self.size_bytes = size_bytes
        self.memory: memoryview = memoryview(self._map)[offset : offset + size_bytes]
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._map, offset))

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
        """Fault so many bytes in now rather than in the first read of each block, as huge pages where there are any.
        Older kernels skip it."""
        for at in range(0, size_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
            self.memory[at]
            if _libc.madvise(self.address + at, HUGE_PAGE_BYTES, MADV_COLLAPSE):
                break  # no huge page is left, or none is wanted here
        _libc.madvise(self.address, page_rounded(size_bytes), MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap, unless tensors or arrays still look into it: then the mapping ends with the last of them."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


def _mapped(fd: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    """The file laid over a reservation that is large enough to align it; (the reservation, where the file begins).
    The mmap module cannot place a mapping, but it can own the place."""
    place = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(place)) % HUGE_PAGE_BYTES
    begin = ctypes.addressof(ctypes.c_char.from_buffer(place, offset))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(begin, size_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != begin:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))
    return place, offset


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
