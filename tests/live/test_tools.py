"""`pd status`, `connect`, `disconnect` and `drain` on real nodes: what people read, what scripts parse, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.nodes.node_process import NodeProcess

from .lone_nodes import Lone, lone_nodes

pytestmark = pytest.mark.live

PD = [sys.executable, "-P", "-c", "from pdbus.nodes.cli import main; main()"]


@pytest.fixture(scope="module")
def lone() -> Iterator[Lone]:
    with lone_nodes() as lone:
        p = lone.start("prefill", "p", http=False)
        lone.ready(p, lone.start("decode", "d", join=p.address), lone.start("prefill", "q", http=False))
        lone.until_peer(lone.nodes[1], name="p", state="up", detail="")
        yield lone
        lone.check_clean()


@pytest.fixture
def d(lone: Lone) -> NodeProcess:
    return lone.nodes[1]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    return {**clean, "COLUMNS": "160", "NO_COLOR": "1"}


def pd(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PD, *arguments], capture_output=True, text=True, timeout=60, env={**environment(), **environ}
    )


def test_status_for_people(lone: Lone, d: NodeProcess) -> None:
    result = pd("status", PD_ADDRESS=d.address)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("d (decode) ready\n")
    for said in (d.address, d.http, "coded", "128: 1", "peers", "prefill"):
        assert said in result.stdout


def test_status_for_scripts(lone: Lone, d: NodeProcess) -> None:
    result = pd("status", d.address, "--json")
    status: dict[str, Any] = json.loads(result.stdout)
    assert (result.returncode, result.stdout.count("\n")) == (0, 1)
    assert (status["name"], status["role"], status["ready"], status["not_ready"]) == ("d", "decode", True, [])
    assert [(peer["name"], peer["state"]) for peer in status["peers"]] == [("p", "up")]
    assert status["max_model_len"] == 2048
    assert status["metrics"]["kv_blocks"] == 128
    assert status["metrics"]["bus_received_total"] > 0


def test_metrics_tell_counters_from_gauges(lone: Lone, d: NodeProcess) -> None:
    said = lone.web.get(f"{d.http}/metrics").text
    for kind, name in (("counter", "bus_received_total"), ("counter", "bus_bad_body_total"), ("gauge", "kv_blocks")):
        assert f"# TYPE pdbus_{name} {kind}\n" in said
    assert "\npdbus_kv_blocks 128.0\n" in said and "\npdbus_node_up 1.0\n" in said


def test_the_ledger_is_an_exit_status_too(lone: Lone, d: NodeProcess) -> None:
    result = pd("status", d.address, "--ledger")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "clean: every block is free or cached")
    assert json.loads(pd("status", d.address, "--ledger", "--json").stdout)["clean"] is True


@pytest.mark.parametrize("options", [["--json"], ["--json", "--ledger"], []])
def test_watching_goes_on_until_ctrl_c(d: NodeProcess, options: list[str]) -> None:
    watching = subprocess.Popen(
        [*PD, "status", d.address, "--watch", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment(), "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored by background jobs
    )  # fmt: skip
    assert watching.stdout is not None
    try:
        lines = [watching.stdout.readline() for _ in range(2)]
        assert all(json.loads(line) for line in lines) if options else lines[0] == "d (decode) ready\n"
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)
        assert (watching.returncode, err) == (130, "")
    finally:
        watching.kill()


def test_connecting_says_what_became_of_each(lone: Lone, d: NodeProcess) -> None:
    p, _, q = lone.nodes
    result = pd("connect", d.address, p.address, q.address)
    assert result.returncode == 0
    assert result.stdout.splitlines() == [f"{p.address}  joined  p", f"{q.address}  joined  q"]
    result = pd("connect", d.address, d.address)
    assert (result.returncode, result.stdout) == (1, f"{d.address}  not joined  this is the node itself\n")


def test_disconnecting_holds_until_connected_again(lone: Lone, d: NodeProcess) -> None:
    p = lone.nodes[0]
    result = pd("disconnect", d.address, "p", "nobody")
    lines = ["p  removed  p", "nobody  not removed  no member of that name or address"]
    assert (result.returncode, result.stdout.splitlines()) == (1, lines)
    lone.until_peer(d, name="p", state="removed")
    assert pd("disconnect", d.address, p.address).returncode == 0, "it is removed already"
    assert pd("connect", d.address, p.address).stdout == f"{p.address}  joined  p\n"
    lone.until_peer(d, name="p", state="up", detail="")


def test_draining_ends_a_node_and_others_know_that_it_left(lone: Lone, d: NodeProcess) -> None:
    q = lone.nodes[2]
    result = pd("drain", q.address)
    assert (result.returncode, result.stdout) == (0, "")
    assert lone.run(q.wait()) == 0
    assert lone.until_peer(d, name="q", state="left")["detail"].startswith("it said goodbye: shutdown")
    lone.stop(q)
