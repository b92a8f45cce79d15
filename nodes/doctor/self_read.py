"""The real path once: two movers, one reads from the other, every byte is compared; and what UCX says it used."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pdbus.bus import wire
from pdbus.bus.errors import PdError
from pdbus.connector.ipc import Read, ReadEnded

from ..bench.movers import Movers, introduce
from .finding import Finding, ok, problem

BLOCK_BYTES = 64 << 10
BLOCKS = 128  # 8 MiB: a request's worth
SETTING = "UCX_TLS and UCX_NET_DEVICES (unset is best); then `pd bench transfer`"

_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_LANES = re.compile(r"UCX\s+INFO\s+\S+ (?:inter-node|intra-node|self) cfg#\d+ (.*)")
_TRANSPORT = re.compile(r"(\w+)/([\w:.-]+)")


class Ucx(NamedTuple):
    """`transports` as `tcp/lo`, those that connections of this machine use."""

    version: str
    transports: tuple[str, ...]


def look() -> tuple[list[Finding], Ucx]:
    with _ucx_log() as log:
        try:
            took_ns = asyncio.run(_read())
            found = f"{BLOCKS * BLOCK_BYTES >> 20} MiB, every byte right, {BLOCKS * BLOCK_BYTES / took_ns:.2f} GB/s"
            findings = [ok("self-read", found)]
        except (PdError, TimeoutError) as e:
            findings = [problem("self-read", str(e) or "no answer", SETTING)]
        ucx = heard("".join(file.read_text(errors="replace") for file in sorted(log.iterdir())))
    if ucx.version:
        findings.append(ok("UCX", f"{ucx.version}, between processes here: {', '.join(ucx.transports) or 'unknown'}"))
    return findings, ucx


async def _read() -> int:
    """ns from post to terminal status. Raises PdError."""
    async with Movers() as movers:
        owner = await movers.start(f"doctor-owner-{os.getpid()}", BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        reader = await movers.start(f"doctor-reader-{os.getpid()}", BLOCKS * BLOCK_BYTES, BLOCK_BYTES)
        owner.slab.memory[:] = os.urandom(BLOCKS * BLOCK_BYTES)
        await introduce(owner, reader)
        every = wire.pack_u32(range(BLOCKS))
        reader.say(Read(read=1, peer=owner.agent_name, begin=0, end=BLOCKS, source=every, target=every))
        ended = await reader.hear(ReadEnded)
        if ended.problem:
            raise PdError(ended.problem)
        if reader.slab.memory != owner.slab.memory:
            raise PdError("the read says done, but its bytes are wrong")
        return ended.transfer_ns


def heard(log: str) -> Ucx:
    """What UCX's log at level info tells."""
    version = _VERSION.search(log)
    lanes = [pair for line in _LANES.findall(log) for pair in _TRANSPORT.findall(line)]
    return Ucx(version[1] if version else "", tuple(dict.fromkeys("/".join(pair) for pair in lanes)))


@contextmanager
def _ucx_log() -> Iterator[Path]:
    """Children write UCX's log into the folder."""
    before = {name: os.environ.get(name) for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO")}
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        os.environ.update(UCX_LOG_LEVEL="info", UCX_LOG_FILE=f"{folder}/%p", UCX_PROTO_INFO="y")
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
