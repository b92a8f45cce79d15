"""Children of control: spawned apart from the terminal, watched, and ended by ever firmer means."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pdbus.bus.wire import Declared
from pdbus.connector.process import Child, Exit, child_environment, describe_exit, nixl_environment, spawn

pytestmark = pytest.mark.live


class Nothing(Declared):
    pass


SCRIPTS = {
    "quits": "raise SystemExit(3)",
    "sleeps": "import time; time.sleep(60)",
    "stubborn": (
        "import signal, pathlib, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(__file__).with_suffix('.ready').write_bytes(b''); time.sleep(60)"
    ),
    "tells": (
        "import os, pathlib, sys; pathlib.Path(__file__).with_suffix('.told').write_text("
        "' '.join([str(os.getsid(0)), os.environ['OMP_NUM_THREADS'], sys.argv[1]]))"
    ),
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def start(scripts: Path, name: str, exits: list[Exit], threads: int = 1) -> Coroutine[Any, Any, Child]:
    environment = {"PYTHONPATH": str(scripts)}
    return spawn(name, Nothing(), on_exit=exits.append, threads=threads, environment=environment)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(test())


def test_exit_is_told_once_with_its_code(scripts: Path) -> None:
    async def test() -> None:
        exits: list[Exit] = []
        child = await start(scripts, "quits", exits)
        ended = await child.wait()
        assert (ended.code, ended.signal, child.running) == (3, "", False)
        assert exits == [ended] and str(ended) == f"process {child.pid} exited with 3"

    run(test)


def test_child_has_its_own_session_and_thread_count(scripts: Path) -> None:
    """A Ctrl-C in the terminal must reach control alone, which then decides."""

    async def test() -> None:
        child = await start(scripts, "tells", [], threads=2)
        await child.wait()
        assert (scripts / "tells.told").read_text() == f"{child.pid} 2 {{}}"

    run(test)


def test_stop_asks_then_terminates(scripts: Path) -> None:
    async def test() -> None:
        asked: list[bool] = []
        child = await start(scripts, "sleeps", [])
        ended = await child.stop(lambda: asked.append(True), 0.0)
        assert asked == [True] and ended.signal == "SIGTERM"
        assert await child.stop(lambda: asked.append(False), 0.0) == ended
        assert asked == [True]

    run(test)


def test_stop_kills_what_ignores_sigterm(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.connector.process.TERM_WAIT_S", 0.1)

    os.mkfifo(scripts / "stubborn.ready")

    async def test() -> None:
        child = await start(scripts, "stubborn", [])
        await asyncio.to_thread((scripts / "stubborn.ready").read_bytes)  # a fifo: opened when it ignores the signal
        assert (await child.stop(lambda: None, 0.0)).signal == "SIGKILL"

    run(test)


def test_child_killed_by_a_signal_says_which(scripts: Path) -> None:
    async def test() -> None:
        child = await start(scripts, "sleeps", [])
        os.kill(child.pid, signal.SIGSEGV)
        assert str(await child.wait()) == f"process {child.pid} was ended by SIGSEGV"

    run(test)


def test_user_settings_of_malloc_and_nixl_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "DEBUG")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = child_environment(1)
    assert environment["NIXL_LOG_LEVEL"] == "DEBUG"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == str(256 << 20)
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("listen", "there", "devices"),
    [
        ("tcp://127.0.0.1:0", "", {"UCX_NET_DEVICES": "lo"}),
        ("tcp://[::1]:7400", "", {"UCX_NET_DEVICES": "lo"}),
        ("tcp://0.0.0.0:7400", "", {}),
        ("tcp://127.0.0.1:0", "eth0", {}),
    ],
)
def test_nixl_listens_where_the_node_does(
    listen: str, there: str, devices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said where."""
    monkeypatch.setenv("UCX_NET_DEVICES", there)
    if not there:
        monkeypatch.delenv("UCX_NET_DEVICES")
    assert nixl_environment(listen) == devices


ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-m", sys.argv[1], str(os.getppid()), *sys.argv[2:]])
sys.exit(child.wait())
"""


@pytest.mark.parametrize("module", ["pdbus.nodes", "pdbus.nodes.gateway"])
def test_a_node_whose_parent_died_before_it_could_watch_it_does_not_start(module: str) -> None:
    """The parent that it is told of is another one than it has, as when that one was killed meanwhile."""
    ended = subprocess.run([sys.executable, "-c", ORPHAN, module], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, f"its parent, process {os.getpid()}, has ended\n")


def test_exit_of_an_unknown_signal() -> None:
    assert describe_exit(1, -40).signal == "signal 40"
