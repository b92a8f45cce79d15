"""Idle is idle: a cluster with nothing to do leaves the machine to others."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from pdbus.connector.pace import COURTSHIP_NS

from .conftest import Live

pytestmark = pytest.mark.live

WATCHED_S = 5.0
SHARE_MAX = 0.02  # of a core


def test_every_process_of_an_idle_cluster_stays_under_two_percent_of_a_core(coded: Live) -> None:
    """CPU time, not wall time: a busy machine does not count against it."""
    controls = [psutil.Process(node.pid) for node in coded.cluster.nodes]
    processes = [p for control in controls for p in (control, *control.children(recursive=True))]
    assert len(processes) == 7  # control, worker and mover of each, HTTP of the decode node
    coded.run(asyncio.sleep(COURTSHIP_NS / 1e9))  # peers that have just met are polled fast, to connect
    before = [cpu_s(p) for p in processes]
    coded.run(asyncio.sleep(WATCHED_S))
    shares = {" ".join(p.cmdline()[:4]): (cpu_s(p) - b) / WATCHED_S for p, b in zip(processes, before, strict=True)}
    assert max(shares.values()) < SHARE_MAX, shares


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
