"""What `pd doctor` makes of what it reads: every doubt names the setting that ends it."""

from __future__ import annotations

import resource

import pytest

from pdbus.nodes.doctor import machine, software
from pdbus.nodes.doctor.finding import Finding, State
from pdbus.nodes.doctor.self_read import heard

GIB = 1 << 30


@pytest.mark.parametrize(
    "finding",
    [
        machine.memlock(resource.RLIM_INFINITY),
        machine.descriptors(1024, 4096),
        machine.descriptors(resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        machine.memory(2 * GIB),
        machine.huge_pages("always within_size advise [never] deny force", "6.1.0-13-amd64"),
        machine.huge_pages("", "6.18.44-fc"),
        machine.cores(2, {}),
        machine.accelerators([]),
        machine.clock("tsc"),
        machine.clock(""),
        machine.peeking("0", is_root=False),
        machine.peeking("1", is_root=True),
        machine.peeking("", is_root=False),
        software.ranged("nixl", "1.5.1", (1, 5), (1, 6)),
        software.ranged("torch", "2.13.0+cpu", (2, 9), (2, 14)),
        software.ipex("", "2.13.0"),
        software.ipex("2.8.0+xpu", "2.8.1"),
    ],
)
def test_what_is_well_asks_for_nothing(finding: Finding) -> None:
    assert finding.state is State.OK and not finding.setting


@pytest.mark.parametrize(
    ("finding", "setting"),
    [
        (machine.memlock(8 << 20), "ulimit -l"),
        (machine.descriptors(128, 4096), "ulimit -n 1024"),
        (machine.huge_pages("always within_size advise never [deny] force", "6.18.0"), "shmem_enabled"),
        (machine.huge_pages("", "5.15.0-91-generic"), "Linux 6.1"),
        (machine.cores(8, {"OMP_NUM_THREADS": "8"}), "--threads"),
        (machine.accelerators(["/dev/nvidia0"]), "--device cpu"),
        (machine.clock("hpet"), "tsc"),
        (machine.peeking("1", is_root=False), "ptrace_scope=0"),
        (machine.peeking("3", is_root=True), "CAP_SYS_PTRACE"),
        (software.ipex("2.8.0", "2.13.0+cpu"), "torch 2.8"),
        (software.ipex("2.8.0", ""), "torch 2.8"),
    ],
)
def test_a_doubt_names_its_setting(finding: Finding, setting: str) -> None:
    assert finding.state is State.WARNING and setting in finding.setting


@pytest.mark.parametrize(
    ("finding", "setting"),
    [
        (machine.memory(GIB // 2), "--kv-memory"),
        (software.ranged("nixl", "", (1, 5), (1, 6)), "pip install 'pdbus[node]'"),
        (software.ranged("nixl", "1.6.0", (1, 5), (1, 6)), "below 1.6"),
        (software.ranged("torch", "2.8.0", (2, 9), (2, 14)), "from 2.9"),
    ],
)
def test_what_a_node_cannot_work_with_is_a_problem(finding: Finding, setting: str) -> None:
    assert finding.state is State.PROBLEM and setting in finding.setting


def test_transports_are_read_out_of_what_ucx_says() -> None:
    log = """[1.8] [vm:3:0]  ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so)
[1.9] [vm:3:0]   ucp_worker.c:1997 UCX  INFO    doc-a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
[2.0] [vm:3:0]   ucp_worker.c:1997 UCX  INFO    doc-a inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  ka(tcp/eth0)
"""
    ucx = heard(log)
    assert ucx.version == "1.23.0"
    assert ucx.transports == ("tcp/lo", "cma/memory", "rc_mlx5/mlx5_0:1", "tcp/eth0")
    assert heard("") == ("", ())
