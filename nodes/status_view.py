"""What a node says of itself, for people and as JSON; and the things a tool may ask of it: join, part, drain."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from pdbus.bus.client import Client
from pdbus.bus.keyring import client_keyring
from pdbus.bus.messages import Outcome

from .printable import printable
from .tables import output, pairs, print_json, table

WATCH_S = 1.0
REQUEST_CHARS = 8  # of a request's id
EXIT_UNCLEAN = 1
PEERS = ("name", "role", "state", "circuit", "draining", "leases", "fetches", "address", "detail")
REQUESTS = ("request", "state", "age_ms", "prompt_tokens", "cached_tokens", "generated", "attempts", "prefill_node")

Status = Mapping[str, Any]


def show_status(address: str, *, ledger: bool, as_json: bool, watch: bool, keys: str = "") -> int:
    """Prints it, again every second with `watch`. 1 when a ledger that was asked for is not clean."""
    return asyncio.run(_show(address, ledger, as_json, watch, keys))


def _client(address: str, keys: str) -> Client:
    return Client(address, keys=client_keyring(keys, setting="--keys") if keys else None)


async def _show(address: str, ledger: bool, as_json: bool, watch: bool, keys: str) -> int:
    async with _client(address, keys) as client:
        read = _ledger if ledger else _status
        if not watch:
            said = await read(client)
            print_json(said) if as_json else output().print(_view(said, ledger))
            return EXIT_UNCLEAN if ledger and not said["clean"] else 0
        await (_watch_json(client, read) if as_json else _watch(client, read, ledger))
    return 0


async def _status(client: Client) -> dict[str, Any]:
    return await client.status()


async def _ledger(client: Client) -> dict[str, Any]:
    reply = await client.ledger()
    return {"clean": reply.clean, **reply.ledger}


async def _watch(client: Client, read: Any, ledger: bool) -> None:
    console = output()
    while not console.is_terminal:  # nothing can be redrawn there: one below the other
        console.print(_view(await read(client), ledger))
        await asyncio.sleep(WATCH_S)
    with Live(_view(await read(client), ledger), auto_refresh=False) as live:
        while True:
            live.update(_view(await read(client), ledger), refresh=True)
            await asyncio.sleep(WATCH_S)


async def _watch_json(client: Client, read: Any) -> None:
    while True:
        print_json(await read(client))
        await asyncio.sleep(WATCH_S)


def _view(said: Status, ledger: bool) -> RenderableType:
    return ledger_view(said) if ledger else status_view(said)


def status_view(said: Status) -> RenderableType:
    """The node in a line, then its blocks, peers, leases and requests; what there is none of is left out."""
    parts: list[RenderableType] = [_headline(said), pairs(_facts(said))]
    for name, columns in (("peers", PEERS), ("leases", ()), ("reads", ()), ("requests", REQUESTS)):
        rows = said.get(name)
        if isinstance(rows, Sequence) and rows and not isinstance(rows, str):
            parts += [Text(f"\n{name}", style="bold"), table([_brief(row) for row in rows], columns)]
    return Group(*parts)


def _headline(said: Status) -> Text:
    ready = Text("ready", style="green")
    if not said.get("ready"):
        why = "; ".join(said.get("not_ready") or ["it does not say why"])
        ready = Text(f"not ready: {printable(why)}", style="red")
    name = (printable(str(said.get("name", "?"))), "bold")
    return Text.assemble(name, printable(f" ({said.get('role', '?')}) "), ready)


def _facts(said: Status) -> dict[str, Any]:
    facts = {key: said[key] for key in ("model", "engine", "address", "http", "epoch") if said.get(key)}
    blocks = (said.get("ledger") or {}).get("blocks")
    return {**facts, **({"blocks": blocks_line(blocks)} if blocks else {})}


def _brief(row: Status) -> dict[str, Any]:
    """A request id as far as `pd-replay show` needs it."""
    return {
        key: value[:REQUEST_CHARS] if key == "request" and isinstance(value, str) else value
        for key, value in row.items()
    }


def blocks_line(blocks: Status) -> str:
    """`512: 500 free, 12 cached, 0 in use, 0 quarantined`."""
    parts = (f"{blocks.get(key, 0)} {key.replace('_', ' ')}" for key in ("free", "cached", "in_use", "quarantined"))
    return f"{blocks.get('total', 0)}: {', '.join(parts)}"


def ledger_view(said: Status) -> RenderableType:
    """Whether everything is accounted for, and what is not."""
    verdict = Text("clean: every block is free or cached", style="green")
    if not said.get("clean"):
        verdict = Text("not clean", style="red")
    counts = {key: value for key, value in said.items() if key not in ("clean", "blocks")}
    return Group(verdict, pairs({"blocks": blocks_line(said.get("blocks") or {}), **counts}))


def connect_nodes(node: str, members: Sequence[str], keys: str = "") -> int:
    """Asks `node` to join, prints one line for each member. 1 when one of them could not be joined."""
    return asyncio.run(_connect(node, members, keys))


async def _connect(node: str, members: Sequence[str], keys: str) -> int:
    async with _client(node, keys) as client:
        return _told(await client.connect(members), "joined")


def disconnect_nodes(node: str, members: Sequence[str], keys: str = "") -> int:
    """Asks `node` to part, prints one line for each member. 1 when one of them is no member."""
    return asyncio.run(_disconnect(node, members, keys))


async def _disconnect(node: str, members: Sequence[str], keys: str) -> int:
    async with _client(node, keys) as client:
        return _told(await client.disconnect(members), "removed")


def _told(outcomes: Sequence[Outcome], done: str) -> int:
    for outcome in outcomes:
        said = f"[green]{done}[/green]" if outcome.ok else f"[red]not {done}[/red]"
        output().print(f"{escape(outcome.target)}  {said}  {escape(printable(outcome.detail))}".rstrip())
    return int(not all(outcome.ok for outcome in outcomes))


def drain_node(address: str, keys: str = "") -> int:
    """Asks it to drain; it ends when its last lease and request have."""
    asyncio.run(_drain(address, keys))
    print(f"{address} drains", file=sys.stderr)
    return 0


async def _drain(address: str, keys: str) -> None:
    async with _client(address, keys) as client:
        await client.drain()
