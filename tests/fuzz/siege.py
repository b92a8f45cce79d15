"""A real pair of nodes under garbage and near misses, on the bus and over HTTP; python -m tests.fuzz does it at length.

What is asked: both still serve, right to the token and remotely; memory is flat once it is warm; no traceback stands in
a log; nothing is left in a ledger; no HTTP answer says that the server is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio

from pdbus.bus.client import Client
from pdbus.bus.messages import Hello
from pdbus.bus.wire import Header, encode, replace
from pdbus.nodes.cluster import Cluster, http_ok
from pdbus.nodes.node_process import NodeProcess, descendants

from .near_misses import frames, golden, request
from tests.live.faults import OPTIONS, TCP, ask_remotely, until_clean, until_status
from tests.wire.first_frame import first_frame, parts

BURST = 500  # messages, between two looks at the node
CONNECTIONS = 64
ANSWER_S = 10.0
ENOUGH_S = 0.3  # for a whole request to be answered
RSS_GROWTH_MAX_KIB = 24 << 10  # of one process, after a tenth of the siege has warmed it up


@dataclass
class Siege:
    """What was sent, and what came of it."""

    wire: int = 0
    http: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by HTTP status
    refused: int = 0  # messages that were counted as unreadable
    growth_kib: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def told(self) -> str:
        grown = ", ".join(f"{name} {kib} KiB" for name, kib in self.growth_kib.items() if kib > 1024)
        return (
            f"{self.wire:,} messages ({self.refused:,} unreadable), {self.http:,} HTTP requests "
            f"({', '.join(f'{n:,} {status}' for status, n in sorted(self.answers.items()))}); "
            f"memory grown by more than 1 MiB: {grown or 'none'}"
        )


async def besiege(folder: Path, *, wire: int, http: int, seed: int) -> Siege:
    siege, draw = Siege(), random.Random(seed)
    async with _pair(folder) as cluster:
        p, d = cluster.nodes
        async with Client(d.address) as asking:
            await ask_remotely(asking, seed)
        for part in range(10):
            if part == 1:
                before = _memory(cluster)
            for node in (p, d):
                await _shoot(siege, node, draw, wire // 20)
            await _knock(siege, d, draw, http // 10)
        for name, kib in _memory(cluster).items():
            siege.growth_kib[name] = kib - before.get(name, kib)
        await _look_after(siege, cluster, seed)
    for log in sorted((folder / "logs").iterdir()):
        if "Traceback" in (text := log.read_text(errors="replace")):
            siege.problems.append(f"{log.name}: {text[text.index('Traceback') :][:3000]}")
    grown = {name: kib for name, kib in siege.growth_kib.items() if kib > RSS_GROWTH_MAX_KIB}
    siege.problems += [f"{name} has grown by {kib} KiB" for name, kib in grown.items()]
    siege.problems += [f"{n} answers of {status}" for status, n in siege.answers.items() if status.startswith("5")]
    return siege


@asynccontextmanager
async def _pair(folder: Path) -> AsyncIterator[Cluster]:
    (folder / "logs").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="pd") as run_dir:
        options = {**OPTIONS, "run_dir": run_dir, "kv_blocks": 256}
        cluster = Cluster(1, 1, options=options, environment=TCP, logs=folder / "logs")
        try:
            async with cluster:
                yield cluster
        finally:
            await cluster.kill_all()


async def _look_after(siege: Siege, cluster: Cluster, seed: int) -> None:
    """They serve, and nothing is left."""
    p, d = cluster.nodes
    if not await http_ok(f"{d.http}/health/ready"):
        siege.problems.append("HTTP does not answer any more")
    async with Client(p.address) as first, Client(d.address) as second:
        await ask_remotely(second, seed + 1)
        for client in (first, second):
            await until_clean(client)
            said = (await client.status())["metrics"]
            siege.refused += int(sum(said[f"bus_{why}_total"] for why in UNREADABLE))


UNREADABLE = ("other_major", "unknown_kind", "bad_header", "bad_body", "too_many_frames", "oversize")


# ---------------------------------------------------------------- the bus


async def _shoot(siege: Siege, node: NodeProcess, draw: random.Random, count: int) -> None:
    """Half of it as a stranger, half as a decode node that has been welcomed."""
    context = zmq.asyncio.Context()
    try:
        async with Client(node.address) as client:
            to = await client.node()
            for _ in range(-(-count // BURST)):
                some = min(BURST, count)
                count -= some
                await _burst(context, node, to.hello, Header(
                    from_=f"fuzz-{draw.getrandbits(40)}", from_inc=draw.randbytes(16), to=to.name,
                    to_inc=to.incarnation, seq=1,
                ), draw, some)  # fmt: skip
                siege.wire += some
                await until_status(client, lambda status: status["ready"])
    finally:
        context.destroy(linger=0)


async def _burst(
    context: zmq.asyncio.Context, node: NodeProcess, like: Hello, header: Header, draw: random.Random, count: int
) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 1000
    dealer.connect(node.address)
    try:
        if draw.random() < 0.5:
            hello = replace(like, role="decode", address="tcp://127.0.0.1:9", http="", events="")
            await dealer.send(first_frame(golden["hello"].start, encode(header), encode(hello)))
        for seq in range(2, count + 2):
            async with asyncio.timeout(ANSWER_S):
                await dealer.send_multipart(frames(draw, replace(header, seq=seq)))
        last = encode(replace(header, seq=count + 2))
        await dealer.send(first_frame(golden["status"].start, last, golden["status"].body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while parts((await dealer.recv_multipart())[0])[0] != golden["status.reply"].start:
                    pass
    finally:
        dealer.close()


# ---------------------------------------------------------------- HTTP


async def _knock(siege: Siege, node: NodeProcess, draw: random.Random, count: int) -> None:
    made = iter([request(draw) for _ in range(count)])

    async def one_after_the_other() -> None:
        for data in made:
            siege.answers[await _status_of(node.http, data)] += 1
            siege.http += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(CONNECTIONS)))


async def _status_of(http: str, data: bytes) -> str:
    """'none' for a connection that ends without an answer."""
    host, _, port = http.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                answer = await _all_of(reader, writer)
            finally:
                writer.close()
    except TimeoutError:
        return "late"
    except OSError:
        return "none"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"


async def _all_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What comes; who waits for more of the request hears that there is none."""
    reading = asyncio.create_task(reader.read())
    done, _ = await asyncio.wait([reading], timeout=ENOUGH_S)
    if not done and writer.can_write_eof():
        writer.write_eof()
    return await reading


# ---------------------------------------------------------------- memory


def _memory(cluster: Cluster) -> dict[str, int]:
    """KiB of anonymous memory of every process."""
    found: dict[str, int] = {}
    for node in cluster.nodes:
        for number, pid in enumerate((node.pid, *sorted(descendants(node.pid)))):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found[f"{node.name} process {number}"] = next(
                    (int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0
                )
    return found
