"""Control's children: spawned (never forked), watched, ended. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

from pdbus.bus import wire
from pdbus.bus.errors import Broken
from pdbus.bus.ports import is_loopback, parse_address
from pdbus.bus.wire import Declared

TERM_WAIT_S = 2.0  # from SIGTERM to SIGKILL; a child that handles SIGTERM needs far less


class Exit(Declared):
    """How a child ended: `code` as the shell sees it, or the signal's name."""

    pid: int
    code: int
    signal: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} " + (f"was ended by {self.signal}" if self.signal else f"exited with {self.code}")


class Child:
    """One running child process. Made by `spawn`."""

    def __init__(self, process: Process, on_exit: Callable[[Exit], None]) -> None:
        self.pid = process.pid
        self._process = process
        self._on_exit = on_exit
        self._watch = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> Exit:
        ended = describe_exit(self.pid, await self._process.wait())
        asyncio.get_running_loop().call_soon(self._on_exit, ended)
        return ended

    @property
    def running(self) -> bool:
        return not self._watch.done()

    async def wait(self) -> Exit:
        """Wait for the child's end; cancelling the wait does not touch the child."""
        return await asyncio.shield(self._watch)

    async def stop(self, ask: Callable[[], None], wait_s: float) -> Exit:
        """End it: `ask` (a stop message), after `wait_s` SIGTERM, after TERM_WAIT_S more SIGKILL."""
        if self.running:
            ask()
        for patience_s, then in ((wait_s, signal.SIGTERM), (TERM_WAIT_S, signal.SIGKILL)):
            try:
                async with asyncio.timeout(patience_s):
                    return await self.wait()
            except TimeoutError:
                self.signal(then)
        return await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.running and self._process.returncode is None:
            self._process.send_signal(number)


async def spawn(
    module: str,
    args: Declared,
    *,
    on_exit: Callable[[Exit], None],
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `python -P -m module '<args as JSON>'` in its own session: a terminal's Ctrl-C reaches control alone.

    `on_exit` is called once, in the event loop. Its stdout goes to our stderr: libraries print there.
    `environment` is set over ours and over the defaults of `child_environment`; `pass_fds` are inherited under their
    numbers. Raises Broken when it cannot start.
    """
    env = {**child_environment(threads), **(environment or {})}
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, wire.to_json(args).decode(),
            stdin=asyncio.subprocess.DEVNULL, stdout=sys.__stderr__, env=env, start_new_session=True,
            pass_fds=pass_fds,
        )  # fmt: skip
    except OSError as e:
        raise Broken(f"cannot start {module}: {e.strerror}") from None
    return Child(process, on_exit)


def child_environment(threads: int) -> dict[str, str]:
    """Our environment, one thread count for every numeric library, and a malloc that keeps big temporaries and takes
    huge pages.

    What the user set for malloc, NIXL and UCX wins. Stock glibc returns big buffers to the kernel and faults them
    in again at every step. Weights on huge pages make a decode step up to 1.15 times as fast, and more after a rest.
    UCX would spend seconds on a backtrace when it aborts; control has the exit status.
    """
    count = str(threads)
    defaults = {
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # madvise; glibc 2.35
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_HANDLE_ERRORS": "none",
        "PYTHONUNBUFFERED": "1",
    }
    forced = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
    return {**defaults, **os.environ, **forced}


def nixl_environment(listen: str) -> dict[str, str]:
    """For a mover of a node that listens at this address. NIXL authenticates nobody and would listen on every device:
    where only this machine can reach the node, only it shall reach NIXL. What the user set wins."""
    local = is_loopback(parse_address(listen, "--listen", port_zero=True).host) and "UCX_NET_DEVICES" not in os.environ
    return {"UCX_NET_DEVICES": "lo"} if local else {}


def keep_what_is_loaded() -> None:
    """Once a process is ready: what is there now stays, and no garbage collection shall walk through it again. It
    would stop whoever waits for the next message for tens of milliseconds."""
    gc.collect()
    gc.freeze()


def describe_exit(pid: int, returncode: int) -> Exit:
    """asyncio's return code (negative: a signal) as an Exit."""
    if returncode >= 0:
        return Exit(pid=pid, code=returncode)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return Exit(pid=pid, code=128 - returncode, signal=name)
