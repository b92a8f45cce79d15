"""What several benches compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

USER, SYSTEM = 11, 12  # of the fields after the name in /proc/PID/stat
TICKS = os.sysconf("SC_CLK_TCK")  # of CPU time, a second


def p99(values: Sequence[float]) -> float:
    """Of at least two."""
    return quantiles(values, n=100)[98]


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and system mode (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[USER]) + int(fields[SYSTEM])) / TICKS
