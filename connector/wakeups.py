"""How soon a process gets its core back when what it waits for has come.

Linux lets whoever computes go on to the end of its slice, some milliseconds, before it lets in who has just woken. On
the one core of a node each message would wait so long behind a step or a read, and one hop follows another. Since 6.12
a process may ask for shorter slices (sched_setattr(2), `sched_runtime` of SCHED_OTHER): it is let in at once, and its
share of the core stays what it was.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # glibc has no function for it before 2.41
SLICE_NS = 100_000  # the shortest that there is


def wake_at_once() -> None:
    """For who waits for messages and is soon done with each. Threads and children that it makes later inherit it."""
    _ask_for_slices(SLICE_NS)


def wake_in_turn() -> None:
    """For who computes: the system's own slices."""
    _ask_for_slices(0)


def _ask_for_slices(slice_ns: int) -> None:
    """Of this thread. Where the kernel does not know it, or a sandbox forbids it, all stays as it is."""
    call = SYS_SCHED_SETATTR.get(platform.machine())
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    asked = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    ctypes.CDLL(None).syscall(call, 0, asked, 0)
