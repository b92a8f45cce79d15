"""`pd up`: a cluster in the foreground: all nodes' lines, where to curl, an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pdbus.bus.errors import Broken, ConfigError

from .cluster import Cluster
from .config import NodeConfig, load
from .http.tls import Tls
from .node_process import NodeProcess
from .setup import set_up
from .values import DEMO_MODEL, show_duration

__all__ = ["Cluster", "run_up", "serve"]

BUS_PORT = 7400
SHARED = ("http_keys", "http_tls_cert", "http_tls_key", "record", "record_tokens")  # of nodes and gateway
KILL_AFTER_S = 8.0  # from the second signal: a node tells its clients at once, and gives its processes at most 5 s
COLOURS = {
    "prefill": ("cyan", "blue"),
    "decode": ("magenta", "red"),
    "both": ("green", "yellow"),
    "gateway": ("white",),
}
NAME_CHARS = 10
QUESTION = (
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0}'
)


def run_up(
    prefill: int,
    decode: int,
    both: int,
    *,
    http_port: int,
    gateway_port: int | None = None,
    settings: Mapping[str, str],
    config: Path | None,
) -> int:
    """Runs until Ctrl-C or SIGTERM, or until every node has ended. Exit status: 0, or 1 when a node failed."""
    if decode + both == 0:
        raise ConfigError("--decode", "no node would answer requests; give at least 1, or --both 1")
    if os.environ.get("PD_KEYS"):
        raise ConfigError("PD_KEYS", "these nodes stay on one machine, without keys: unset it, or use pd-node")
    chosen = load({**settings, "role": "both"}, _environment(), file=config)
    try:
        set_up(chosen)  # one clear line instead of one from every node
        Tls(chosen.http_tls_cert, chosen.http_tls_key).check()
    except ConfigError as e:
        raise chosen.as_written(e) from None
    options = for_all(with_model(settings), chosen)
    console = Console(stderr=True, highlight=False)
    cluster = Cluster(
        prefill, decode, both, options=options, config=config, bus_port=BUS_PORT, http_port=http_port,
        gateway_port=gateway_port,
        on_line=lambda node, line: print_line(console, node, line),
    )  # fmt: skip
    if cluster.taken:
        ports = ", ".join(f"port {port}" for port in sorted(cluster.taken))
        console.print(f"taken: {ports}; the next free ones are used", style="dim", soft_wrap=True)
    return asyncio.run(serve(cluster, console))


def for_all(options: Mapping[str, str], chosen: NodeConfig) -> dict[str, str]:
    """With what a gateway must know like the nodes, wherever it was said: it does not read the file of --config."""
    shared = {name: str(getattr(chosen, name)) for name in SHARED if getattr(chosen, name)}
    return {**options, **shared, "request_deadline": show_duration(chosen.request_deadline_ns)}


def with_model(settings: Mapping[str, str]) -> dict[str, str]:
    """The demo model's name becomes its folder: fetched once, not by every node."""
    options = dict(settings)
    if options.get("model", os.environ.get("PD_MODEL")) == DEMO_MODEL:
        from .models.demo import fetch_demo_model

        options["model"] = str(fetch_demo_model())
    return options


def _environment() -> dict[str, str]:
    """What nodes will see of ours: `pd up` decides on addresses itself."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PD_LISTEN", "PD_ADVERTISE", "PD_EVENTS", "PD_KEYS")
    }


async def serve(cluster: Cluster, console: Console) -> int:
    """Starts the cluster and stays until it ends or the first SIGINT or SIGTERM, which drains. The second is passed on:
    nodes then tell their clients and end; what has not after KILL_AFTER_S, or at the third, is killed."""
    asked = asyncio.Event()
    with _on_signals(cluster, asked):
        try:
            if not await _unless(asked, cluster.start()):
                return 0
            console.print(welcome(cluster), soft_wrap=True)
            return await _until_end(cluster, asked, console)
        except Broken as e:
            print(f"pd: {e}", file=sys.stderr)
            return 1
        finally:
            await cluster.stop()


@contextmanager
def _on_signals(cluster: Cluster, asked: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        asked.set()
        if signals == 2:
            for node in cluster.nodes:
                node.signal(signal.SIGINT)  # means the same as SIGTERM: two of that could arrive as one
            loop.call_later(KILL_AFTER_S, kill)
        elif signals > 2:
            kill()

    def kill() -> None:
        for node in cluster.nodes:
            node.kill_all()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless(asked: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Awaits `work` and returns True; False when it was cut short by a signal."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(asked.wait())
    await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    await asyncio.wait([task])
    return False


async def _until_end(cluster: Cluster, asked: asyncio.Event, console: Console) -> int:
    """A node that ends unasked is told and left behind: the others go on. 1 when one failed, not when it drained."""
    ends = {asyncio.create_task(node.wait()): node for node in cluster.nodes}
    failed = False
    while ends and await _unless(asked, _one_of(ends)):
        for task in [task for task in ends if task.done()]:
            print_line(console, ends.pop(task), f"ended with status {task.result()}")
            failed |= task.result() != 0
    if ends:
        console.print("draining; again to end at once", style="dim")
    return int(failed)


async def _one_of(tasks: Iterable[asyncio.Task[int]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def print_line(console: Console, node: NodeProcess, line: str) -> None:
    """One line of a node, behind its name in its colour."""
    palette = COLOURS[node.role]
    colour = palette[int(node.name.rpartition("-")[2]) % len(palette)]
    console.print(Text.assemble((f"{node.name:<{NAME_CHARS}} ", colour), Text.from_ansi(line)), soft_wrap=True)


def welcome(cluster: Cluster) -> Text:
    """Where to curl."""
    text = Text("\n")
    for node in cluster.nodes:
        text.append(f"  {node.name:<{NAME_CHARS}}", style=COLOURS[node.role][0])
        text.append("  ".join(filter(None, (node.address, node.http))) + "\n")
    asked, front = (cluster.decode or cluster.both)[0], (cluster.gateway or cluster.decode or cluster.both)[0]
    text.append(
        f"\n  curl {front.http}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{QUESTION}'\n"
    )
    text.append(f"  pd status {asked.address}\n\n")
    text.append("Ctrl-C drains and ends all nodes.\n", style="dim")
    return text
