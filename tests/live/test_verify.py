"""A recorded incident verifies: 2P + 2D, 200 requests, cancels and a kill -9, byte for byte, under any hash seed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.bus.recording import read
from pdbus.bus.recording_part import RawRecord
from pdbus.nodes.cluster import Cluster

from .faults import OPTIONS, prompt
from tests.recordings import flipped, missed, rewrite

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

REQUESTS, CANCELS, AT_ONCE = 200, 40, 12
KILL_AFTER = 60  # requests that have ended
LAST = 24  # requests that wait until the killed node is back and linked
VERIFY = "from pdbus.nodes.cli import replay_main; replay_main()"


class Storm:
    """Requests of all sizes at both decode nodes, some cancelled; one prefill node is killed on the way."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.ended = 0
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._enough, self._whole = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        d1, d2 = self.cluster.decode
        async with Client(d1.address, record=self.folder) as first, Client(d2.address, record=self.folder) as second:
            requests = [self._request(client, i) for i in range(REQUESTS // 2) for client in (first, second)]
            await asyncio.gather(self._accident(), *requests)

    async def _accident(self) -> None:
        victim = self.cluster.prefill[0]
        await self._enough.wait()
        await self.cluster.kill(victim)
        await self.cluster.restart(victim)
        for node in self.cluster.decode:
            await self.cluster.wait_ready(node)
        self._whole.set()

    async def _request(self, client: Client, i: int) -> None:
        async with self._gate:
            if i >= (REQUESTS - LAST) // 2:
                await self._whole.wait()
            length = 1 + i * 37 % 300
            tokens = [*prompt(64, i % 5), *prompt(length, 1000 + i)][:length]
            generation = client.generate(tokens, max_tokens=1 + i % 24)
            leave_after = i % 4 if i < CANCELS // 2 else None
            if leave_after == 0:
                await generation.cancel()
            async for _ in generation:
                if leave_after is not None and len(generation.tokens) >= leave_after:
                    await generation.cancel()
                    break
        self.ended += 1
        if self.ended == KILL_AFTER:
            self._enough.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of five lives, and of two clients. The nodes' hash seed is none of those that verify."""
    return recorded(tmp_path_factory.mktemp("recordings"), hash_seed="77")


def recorded(folder: Path, hash_seed: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", hash_seed)
        asyncio.run(asyncio.wait_for(incident(folder), 120))
    return folder


async def incident(folder: Path) -> None:
    options = {**OPTIONS, "record": str(folder), "kv_blocks": 256, "http_port": 0}
    cluster = Cluster(2, 2, options=options, role_options={"prefill": {"coded_token_us": 50}})
    for node in cluster.nodes:
        node.http = ""
    async with cluster:
        storm = Storm(cluster, folder)
        await storm.run()
    assert storm.ended == REQUESTS


def verified(folder: Path, *options: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", VERIFY, "verify", str(folder), *options],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_an_incident_verifies(folder: Path, hash_seed: str) -> None:
    check_verifies(folder, hash_seed)


@pytest.mark.long
@pytest.mark.parametrize("hash_seed", ["1", "2", "3"])
def test_other_incidents_verify(tmp_path: Path, hash_seed: str) -> None:
    recorded(tmp_path, hash_seed)
    for other in ("0", "4242"):
        check_verifies(tmp_path, other)


def check_verifies(folder: Path, hash_seed: str) -> None:
    """Five lives, one of them cut short: the same decisions again, no invariant broken."""
    result = verified(folder, hash_seed=hash_seed)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("the same") == 5 and result.stdout.count("a client") == 2
    assert result.stdout.count("shut down") == 4 and result.stdout.count("cut at byte") == 1
    assert "no divergence, no violation" in result.stdout


def test_what_is_asked_for_is_told(folder: Path) -> None:
    told = verified(folder, "--lease", "prefill-2/1/1", "--block", "decode-1/0")
    out = told.stdout
    assert told.returncode == 0
    assert "lease 1 of prefill-2" in out and "lease.began" in out and "lease.ended" in out
    assert "block 0 of decode-1" in out


def test_recordings_hold_no_tokens(folder: Path) -> None:
    """What P sampled crosses the hand-off as an opaque payload, and that is not what stands in the file."""
    hidden = [value for file in folder.iterdir() for record in read(file) for value in _payloads(record.payload)]
    assert hidden
    assert {len(value) for value in hidden} == {16}


def _payloads(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield from (v for k, v in value.items() if k in ("first_token", "payload") and v is not None)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _payloads(item)


def first_target(payload: bytes | bytearray) -> int:
    """Where the first id of a StartRead's `target` stands, after the one byte that begins a short list."""
    return payload.index(b"target") + len(b"target") + 1


def is_short_read(record: RawRecord) -> bool:
    """A StartRead of up to 15 blocks whose first target is one byte: an id below 128, in msgpack."""
    payload = bytes(record.payload)
    at = first_target(payload) if record.kind == "StartRead" else 0
    return at > 0 and 0x91 <= payload[at - 1] <= 0x9F and payload[at] < 0x80


def test_a_changed_effect_of_an_incident_is_found(folder: Path, tmp_path: Path) -> None:
    """One byte of one block id in the middle of a real recording."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    victim = next(tmp_path.glob("decode-1-*"))
    reads = [record for record in read(victim).raw() if is_short_read(record)]
    changed = reads[len(reads) // 2]
    at = first_target(bytes(changed.payload))
    rewrite(victim, lambda r: flipped(r, at, 1) if r.sequence == changed.sequence else r)
    result = verified(tmp_path)
    assert result.returncode == 1
    assert f"divergence decode-1 ({victim.name[9:21]}) record {changed.sequence}" in result.stdout
    assert "target[0] was" in result.stdout


def test_any_changed_byte_of_an_effect_is_found(folder: Path, tmp_path: Path) -> None:
    """Anywhere in what a node decided: a decode node, a prefill node, and one that was killed."""
    chooser = random.Random(11)
    cut = [file for file in sorted(folder.glob("prefill-1-*")) if not has_ended(file)]
    for file in (next(folder.glob("decode-2-*")), next(folder.glob("prefill-2-*")), *cut):
        assert missed(file, tmp_path / "changed.mcap", chooser, 15) == []


def has_ended(file: Path) -> bool:
    recording = read(file)
    list(recording.raw())
    return not recording.truncated
