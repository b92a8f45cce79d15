"""`pd up` and Cluster over FakeNodeProcess: lines, readiness, signals, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdbus.bus.errors import Broken
from pdbus.nodes.cluster import Cluster, command_line, http_ok, partition_cores
from pdbus.nodes.node_process import NodeProcess, descendants

pytestmark = pytest.mark.live

FAKE = Path(__file__).with_name("fake_node_process.py")


async def fake_ready(node: NodeProcess) -> bool:
    return not node.http or await http_ok(f"{node.http}/health/ready")


def fake_cluster(mode: str = "", logs: Path | None = None) -> Cluster:
    return Cluster(command=(sys.executable, str(FAKE)), ready=fake_ready, environment={"FAKE_NODE": mode}, logs=logs)


@contextlib.contextmanager
def pd_up(mode: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "cluster"], stderr=subprocess.PIPE, text=True, env={**os.environ, "FAKE_NODE": mode}
    )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if wanted in line:
            return seen
    raise AssertionError(f"no {wanted!r} in:\n{seen}")


def rest_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def watch_below(pid: int) -> list[int]:
    """A pidfd of every process below `pid`: readable once it has ended."""
    return [os.pidfd_open(below) for below in descendants(pid)]


def assert_all_end(pidfds: list[int]) -> None:
    assert pidfds
    for pidfd in pidfds:
        ended, _, _ = select.select([pidfd], [], [], 10)
        os.close(pidfd)
        assert ended


def assert_closed(text: str) -> None:
    """Every port that was named can be bound again."""
    ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text)}
    assert ports
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_lines_of_all_nodes_are_told_apart_and_the_end_says_where_to_curl() -> None:
    with pd_up() as up:
        seen = read_until(up, "Ctrl-C")
    assert re.search(r"^prefill-1  prefill-1 is here, \[bold\]joining\[/bold\] nobody$", seen, re.M)
    assert re.search(r"^decode-1   decode-1 is here, \[bold\]joining\[/bold\] tcp://127\.0\.0\.1:\d+$", seen, re.M)
    assert re.search(r"curl http://127\.0\.0\.1:\d+/v1/chat/completions", seen)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_and_leaves_no_process_and_no_port(number: signal.Signals) -> None:
    with pd_up() as up:
        seen = read_until(up, "Ctrl-C")
        below = watch_below(up.pid)
        up.send_signal(number)
        seen += rest_of(up)
        assert up.wait() == 0
    assert "prefill-1 drains" in seen and "decode-1 drains" in seen
    assert_all_end(below)
    assert_closed(seen)


def signalled_while_draining(mode: str, more: int = 0) -> str:
    """All lines when a second signal, and then `more`, come while decode-1 drains; nothing is left."""
    with pd_up(mode) as up:
        seen = read_until(up, "Ctrl-C")
        below = watch_below(up.pid)
        up.send_signal(signal.SIGINT)
        seen += read_until(up, "decode-1 drains")
        up.send_signal(signal.SIGINT)
        seen += read_until(up, "decode-1 tells its clients")
        for _ in range(more):
            up.send_signal(signal.SIGINT)
        seen += rest_of(up)
        assert up.wait() == 0
    assert_all_end(below)
    assert_closed(seen)
    return seen


def test_a_second_signal_reaches_the_nodes_which_tell_their_clients() -> None:
    """Killed at once, they would leave broken connections behind."""
    assert "decode-1 tells its clients" in signalled_while_draining("decode-1:slow")


@pytest.mark.parametrize("more", [0, 1])
def test_a_node_that_does_not_end_is_killed_after_a_while_or_at_the_third_signal(more: int) -> None:
    signalled_while_draining("decode-1:stubborn", more)


UP = "from pdbus.nodes.cli import main; main()"


@contextlib.contextmanager
def real_up(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", UP, "up", "--engine", "coded", "--kv-blocks", "64", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_second_signal_tells_a_client_in_mid_stream() -> None:
    with real_up("--prefill", "0", "--coded-step-ms", "200") as up:
        seen = read_until(up, "Ctrl-C")
        port = int(re.findall(r"curl http://127\.0\.0\.1:(\d+)", seen)[0])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", '{"prompt": "x", "max_tokens": 500, "stream": true}')
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: ")
            up.send_signal(signal.SIGINT)
            read_until(up, "draining")
            up.send_signal(signal.SIGINT)
            last = answer.read().strip().splitlines()[-1]
        assert b'"error"' in last and b'"unavailable"' in last
        rest_of(up)
        assert up.wait() == 0


def test_ports_that_give_way_are_said() -> None:
    with contextlib.ExitStack() as stack:
        for port in (7400, 8080):
            with contextlib.suppress(OSError):  # another program has it: as good
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        seen = read_until(stack.enter_context(real_up("--prefill", "0")), "pd status")
    assert re.search(r"^taken: port 7400, .*port 8080.*; the next free ones are used$", seen, re.M)
    bus = int(re.findall(r"pd status tcp://127\.0\.0\.1:(\d+)", seen)[0])
    assert bus > 7400 and (bus - 7400) % 3 == 0


def test_a_node_that_fails_at_start_ends_all_with_its_message() -> None:
    with pd_up("decode-1:die") as up:
        seen = rest_of(up)
        assert up.wait() == 1
    assert "pd: decode-1 ended with status 1: --model: there is no such model" in seen
    assert "Traceback" not in seen


def test_a_node_that_is_lost_is_told_and_the_others_go_on() -> None:
    with pd_up() as up:
        read_until(up, "Ctrl-C")
        prefill = next(pid for pid in descendants(up.pid) if b"prefill-1" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(prefill, signal.SIGKILL)
        read_until(up, "ended with status -9")
        up.send_signal(signal.SIGINT)
        assert "decode-1 drains" in rest_of(up)
        assert up.wait() == 1


async def start_kill_restart(cluster: Cluster) -> None:
    async with cluster:
        prefill = cluster.prefill[0]
        first, address = prefill.pid, prefill.address
        await cluster.kill(prefill)
        assert not prefill.running
        await cluster.restart(prefill)
        assert (prefill.running, prefill.address) == (True, address)
        assert prefill.pid != first


def test_a_killed_node_comes_back_on_its_address() -> None:
    asyncio.run(start_kill_restart(fake_cluster()))


def test_logs_go_to_files(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_cluster(logs=tmp_path):
            pass

    asyncio.run(run())
    assert (tmp_path / "decode-1.log").read_text().splitlines()[-1] == "decode-1 drains"


def test_a_failed_start_leaves_no_node() -> None:
    cluster = fake_cluster("decode-1:die")

    async def run() -> None:
        async with cluster:
            raise AssertionError("it cannot start")

    with pytest.raises(Broken, match="decode-1 ended with status 1: --model"):
        asyncio.run(run())
    assert not any(node.running for node in cluster.nodes)


def test_a_command_that_is_not_there_is_named() -> None:
    cluster = Cluster(command=("/nowhere/pd-node",))

    async def run() -> None:
        async with cluster:
            pass

    with pytest.raises(Broken, match="cannot start /nowhere/pd-node"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("cores", "nodes", "shares"),
    [
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
        ([0, 1], 3, [(), (), ()]),
        ([4, 7, 9], 1, [(4, 7, 9)]),
    ],
)
def test_cores_are_shared_out_whole_or_not_at_all(cores: list[int], nodes: int, shares: list[tuple[int, ...]]) -> None:
    assert partition_cores(cores, nodes) == shares


def test_settings_become_options() -> None:
    settings: dict[str, str | int | float | bool] = {
        "kv_blocks": 64,
        "deterministic": True,
        "insecure": False,
        "lease": "2s",
    }
    assert command_line(settings) == ["--kv-blocks", "64", "--deterministic", "--no-insecure", "--lease", "2s"]
