"""Which processes are let in at once when they wake, as the kernel has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.connector.wakeups import SLICE_NS

SLICE_OF_SELF = """
import subprocess, threading
from pdbus.connector.wakeups import wake_at_once, wake_in_turn
def slice_of(task):
    return next(int(line.split()[-1]) for line in open(f"/proc/{task}/sched") if line.startswith("se.slice"))
"""


def run(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", SLICE_OF_SELF + code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.fixture(autouse=True)
def kernel_says() -> None:
    shown = Path("/proc/self/sched")
    if not shown.exists() or "se.slice" not in shown.read_text():
        pytest.skip("this kernel does not show slices (/proc/self/sched), or is older than 6.12")


def test_who_waits_for_messages_has_the_shortest_slices() -> None:
    assert run("wake_at_once(); print(slice_of('self'))") == [SLICE_NS]


def test_threads_and_children_inherit_them() -> None:
    """The threads of ZeroMQ are between a message and who waits for it."""
    code = """
wake_at_once()
thread = threading.Thread(target=lambda: print(slice_of("thread-self"), flush=True))
thread.start()
thread.join()
print(subprocess.run(["grep", "se.slice", "/proc/self/sched"], capture_output=True, text=True).stdout.split()[-1])
"""
    assert run(code) == [SLICE_NS, SLICE_NS]


def test_who_computes_has_the_systems_own_again() -> None:
    before, after = run("print(slice_of('self')); wake_at_once(); wake_in_turn(); print(slice_of('self'))")
    assert before == after > SLICE_NS
