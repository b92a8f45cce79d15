"""What defaults and checks of settings need to know of this machine."""

from __future__ import annotations

import os
import secrets
import tempfile

from pdbus.bus.wire import Declared

RUN_DIR_CHARS_MAX = 60  # a unix socket's path holds 107 characters; the node adds its own folder and socket names


class Host(Declared):
    """The machine, and the moment."""

    cpus: tuple[int, ...]
    memory_bytes: int  # available now
    run_dir: str
    name_suffix: str


def this_host() -> Host:
    """The machine as it is now, with a fresh random name suffix."""
    run_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isdir(run_dir) and os.access(run_dir, os.W_OK) and len(run_dir) <= RUN_DIR_CHARS_MAX
    return Host(
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=_memory_available_bytes(),
        run_dir=run_dir if usable else tempfile.gettempdir(),
        name_suffix=secrets.token_hex(2),
    )


def _memory_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 4 << 30
