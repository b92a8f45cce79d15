"""The demo's second act: the prefill node is killed while its KV cache is being read, and the recording says why the
client noticed nothing but a pause."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError

from .chat_stream import Answered
from .cluster import Cluster
from .models.cache import cache_root
from .node_process import NodeProcess

LOOK_S = 0.005  # between looks at the decode node; a chunk takes a hundred times as long
READ_WAIT_S = 60.0  # until the first chunk has been read, on a busy machine


def recording_folder() -> Path:
    """An empty folder for the demo's recording; the last one's is thrown away."""
    folder = cache_root() / "demo-recording"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


async def killed_in_mid_read(cluster: Cluster, asking: Awaitable[Answered], console: Console) -> Answered:
    """The answer to a prompt whose prefill node is killed when its first chunk has been read. Raises Broken when the
    answer breaks off, TimeoutError when nothing is ever read."""
    answer = asyncio.ensure_future(asking)
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    try:
        async with asyncio.timeout(READ_WAIT_S):
            await _first_read(decode)
        prefill.kill_all()
        console.print(Text(f"  kill -9 {prefill.name} after its first chunk was read", style="bold red"))
        return await answer
    finally:
        answer.cancel()


async def _first_read(decode: NodeProcess) -> None:
    async with Client(decode.address) as client:
        while True:
            reads = (await client.status()).get("reads", [])
            if any(read["blocks_posted"] for read in reads):
                return
            await asyncio.sleep(LOOK_S)


def explained(folder: Path, request: str, console: Console) -> bool:
    """Whether every node's decisions come out the same again and no invariant is broken; shows what became of the
    request (as HTTP names it), on both nodes."""
    from .replay.verify import verify

    request = request.rpartition("-")[2]
    console.print(Text(f"\n$ pd-replay verify {folder} --request {request}", style="bold"), soft_wrap=True)
    try:
        return verify([folder], request=request) == 0
    except PdError as e:
        console.print(str(e))
        return False
