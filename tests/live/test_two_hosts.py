"""Two hosts, as network namespaces with one wire between them: KV crosses it over TCP, under the addresses that nodes
advertise. Needs root and iproute2, and is skipped where one is missing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from pdbus.nodes.cluster import GATEWAY_COMMAND, NODE_COMMAND, command_line
from pdbus.nodes.node_process import NodeProcess

from .faults import OPTIONS, expected, prompt

pytestmark = [pytest.mark.live, pytest.mark.long]

HOSTS = (f"pda{os.getpid()}", f"pdb{os.getpid()}")
ADDRESSES = {"IPv4": ("10.77.0.1", "10.77.0.2"), "IPv6": ("fd77::1", "fd77::2")}
TRIES, TRY_S = 60, 0.5
ASK = """
import json, sys
from pdbus.bus import SyncClient
with SyncClient(sys.argv[1]) as client:
    answer = client.generate(json.loads(sys.argv[2]), max_tokens=6, ignore_eos=True)
    for _ in answer:
        pass
    peers = client.status()["peers"]
    t = answer.finished.timeline
    print(json.dumps({"tokens": answer.tokens, "remote": t.remote, "bytes": t.read_bytes, "peers": peers}))
"""
OVER_HTTP = """
import json, sys, urllib.request
asked = {"prompt": json.loads(sys.argv[2]), "max_tokens": 6, "ignore_eos": True, "temperature": 0}
asked["return_token_ids"] = True
request = urllib.request.Request(sys.argv[1], json.dumps(asked).encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


class Host(NamedTuple):
    name: str
    address: str  # as it stands in a URL

    def command(self, *words: str) -> tuple[str, ...]:
        return "ip", "netns", "exec", self.name, *words

    def python(self, script: str, *words: str) -> Any:
        """What a script says there; None where it fails."""
        said = subprocess.run(
            self.command(sys.executable, "-P", "-c", script, *words), capture_output=True, text=True, timeout=40
        )
        return json.loads(said.stdout) if said.returncode == 0 else None

    def node(self, role: str, name: str, **settings: Any) -> NodeProcess:
        bus = f"tcp://{self.address}:7400"
        words = command_line({**OPTIONS, "role": role, "name": name, "insecure": True, "http_port": 0, **settings})
        environment = {"PD_KEYS": "", "UCX_TLS": "tcp"}  # shared memory would know that both hosts are one
        return NodeProcess(name, role, self.command(*NODE_COMMAND, *words), address=bus, environment=environment)


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


@pytest.fixture(params=sorted(ADDRESSES))
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    addresses = ADDRESSES[request.param]
    wires = [f"{name}w"[-15:] for name in HOSTS]
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", wires[0], "netns", HOSTS[0], "type", "veth", "peer", "name", wires[1], "netns", HOSTS[1])
        for name, wire, address in zip(HOSTS, wires, addresses, strict=True):
            width = ("64", "nodad") if ":" in address else ("24",)
            ip("-n", name, "addr", "add", f"{address}/{width[0]}", "dev", wire, *width[1:])
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as e:
        for name in HOSTS:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {e.stderr.decode().strip()}")
    one, other = (f"[{a}]" if ":" in a else a for a in addresses)
    yield Host(HOSTS[0], one), Host(HOSTS[1], other)
    for name in HOSTS:
        subprocess.run(("ip", "netns", "del", name), capture_output=True)


def test_a_prompt_is_handed_from_one_host_to_the_other(hosts: tuple[Host, Host]) -> None:
    """P binds every interface and says what it is to be called; D binds its own address. A gateway stands on P's host
    and is asked from D's."""
    asyncio.run(asyncio.wait_for(handed(*hosts), 100))


async def handed(here: Host, there: Host) -> None:
    wild = "[::]" if "[" in here.address else "0.0.0.0"
    p = here.node(
        "prefill", "p1", listen=f"tcp://{wild}:7400", advertise=f"tcp://{here.address}:7400",
        events=f"tcp://{wild}:7401",
    )  # fmt: skip
    d = there.node(
        "decode", "d1", listen=f"tcp://{there.address}:7400", events=f"tcp://{there.address}:7401",
        join=f"tcp://{here.address}:7400",
    )  # fmt: skip
    words = ("--join", f"tcp://{here.address}:7400", "--http", f"{here.address}:8000", "--insecure", "--name", "front")
    gate = NodeProcess("front", "gateway", here.command(*GATEWAY_COMMAND, *words), address="")
    nodes = (p, d, gate)
    try:
        for node in nodes:
            await node.start()
        said = await until_remote(there)
        assert said["bytes"] > 0
        (peer,) = said["peers"]
        assert (peer["name"], peer["address"], peer["state"]) == ("p1", p.address, "up")
        assert peer["read_bytes_per_s"] > 0
        asked = prompt(100, 2)
        url = f"http://{here.address}:8000/v1/completions"
        answer = await asyncio.to_thread(there.python, OVER_HTTP, url, json.dumps(list(asked)))
        assert answer["choices"][0]["token_ids"] == expected(asked, 6)
        assert answer["pd_timeline"]["prefill_node"] == "p1"
    finally:
        for node in nodes:
            node.kill_all()
            await node.wait()
            await node.close()


async def until_remote(host: Host) -> dict[str, Any]:
    """Answers, until one's prompt was read from the other host: nodes meet by themselves. Each prompt is a new one,
    that none is cached."""
    for i in range(TRIES):
        asked = prompt(200, 10 + i)
        said = await asyncio.to_thread(host.python, ASK, f"tcp://{host.address}:7400", json.dumps(list(asked)))
        if said is not None:
            assert said["tokens"] == expected(asked, 6)
            if said["remote"]:
                return dict(said)
        await asyncio.sleep(TRY_S)
    raise AssertionError(f"the last answer: {said}")
