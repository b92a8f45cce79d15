"""The machine: limits, memory, cores, ports, what the kernel permits."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from pdbus.bus.ports import BUS_PORT, HTTP_PORT, is_free
from pdbus.connector.slab import available_bytes

from .finding import Finding, ok, problem, warning

DESCRIPTORS_MIN = 1024  # a link takes about four, and NIXL two for each peer
MEMORY_MIN_BYTES = 1 << 30  # a worker with torch and no model takes half of it
DEVICES = ("nvidia[0-9]*", "dri/renderD*", "kfd")
GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
COLLAPSE_SINCE = (6, 1)  # MADV_COLLAPSE
PORTS = {BUS_PORT: "bus", BUS_PORT + 1: "events", HTTP_PORT: "HTTP"}
THREADS_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def look() -> Iterator[Finding]:
    yield memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield memory(available_bytes())
    yield huge_pages(_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), platform.release())
    given = {name: os.environ[name] for name in THREADS_VARIABLES if name in os.environ}
    yield cores(len(os.sched_getaffinity(0)), given)
    yield accelerators([str(path) for pattern in DEVICES for path in sorted(Path("/dev").glob(pattern))])
    yield clock(_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    yield peeking(_read("/proc/sys/kernel/yama/ptrace_scope"), is_root=os.geteuid() == 0)
    yield from (port(number, what) for number, what in PORTS.items())


def memlock(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    setting = "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in a unit: RDMA pins the KV slab; TCP and CMA do not"
    return warning("memlock", f"{limit >> 10} KiB", setting)


def descriptors(soft: int, hard: int) -> Finding:
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}"
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_MIN:
        return ok("open files", found)
    setting = f"`ulimit -n {DESCRIPTORS_MIN}` or more, or LimitNOFILE= in a unit: a link takes about four"
    return warning("open files", f"{found}, at most {hard}", setting)


def memory(free: int) -> Finding:
    if free < MEMORY_MIN_BYTES:
        return problem("memory", f"{free >> 20} MiB free", "more memory, or a smaller --kv-memory and model")
    return ok("memory", f"{free >> 20} MiB free")


def huge_pages(shmem_enabled: str, release: str) -> Finding:
    if "[deny]" in shmem_enabled:
        setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled to `never` or `advise`: reads go 1.4 times as fast"
        return warning("huge pages", "denied for shared memory", setting)
    if _version(release) < COLLAPSE_SINCE:
        return warning("huge pages", f"Linux {release}", "Linux 6.1 or newer puts the KV slab on huge pages")
    return ok("huge pages", f"Linux {release} gives them to the KV slab")


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())


def cores(count: int, variables: dict[str, str]) -> Finding:
    said = f"{count} usable"
    if variables:
        names = ", ".join(f"{name}={value}" for name, value in variables.items())
        return warning(
            "cores", f"{said}; {names} in the environment", "a node sets these itself: use --threads, --cpus"
        )
    return ok("cores", said)


def accelerators(devices: list[str]) -> Finding:
    if devices:
        return warning("accelerators", ", ".join(devices), "--device cpu is what is tested; cuda, xpu are not")
    return ok("accelerators", "none: nodes compute on the CPU")


def clock(source: str) -> Finding:
    if source and source not in GOOD_CLOCKS:
        return warning("clock", source, "a clock source in user space (tsc): every event reads the clock")
    return ok("clock", source or "unknown")


def peeking(scope: str, *, is_root: bool) -> Finding:
    """CMA (process_vm_readv) reads another process's memory under the rules of ptrace."""
    if scope in ("", "0") or (is_root and scope != "3"):
        return ok("reads between processes", "permitted (CMA)")
    setting = "kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE in a container: else reads on one host go over TCP"
    return warning("reads between processes", f"ptrace_scope is {scope}", setting)


def port(number: int, what: str) -> Finding:
    if is_free("127.0.0.1", number):
        return ok(f"port {number}", f"free ({what})")
    return warning(
        f"port {number}", f"taken ({what})", "a node takes the next free one and says so; or give its address"
    )


def _read(path: str) -> str:
    """'' where there is no such file."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
