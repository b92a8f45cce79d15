"""All nodes that the gateway knows: those that it was told to join, and those that these know.

Each is followed by a task of its own: greeted, asked how it is every second and at once when its connection changes,
called again for ever when it is gone. So gateways need no word between them: each sees the same nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdbus.bus.compatibility import DECODE_ROLES
from pdbus.bus.errors import Broken, ConfigError
from pdbus.bus.ports import parse_address
from pdbus.bus.station import Station

from .fleet_node import ONLY_PREFILLS, FleetNode

POLL_S = 1.0
NODES_MAX = 256  # followed at once; each costs a status a second
FORGET_S = 600.0  # a node that was found, not named, and has not answered for so long is not called any more

log = logging.getLogger("pdbus.gateway")


class Fleet:
    """Use it within `async with`. `on_look` is called after every look at a node that can be asked, `on_lost` when one
    cannot be asked any more, `on_gone` when one is not followed any more."""

    def __init__(
        self,
        station: Station,
        joins: Iterable[str],
        *,
        on_look: Callable[[FleetNode], None],
        on_gone: Callable[[FleetNode], None],
        on_lost: Callable[[FleetNode], None],
    ) -> None:
        self._station = station
        self._on_look, self._on_gone, self._on_lost = on_look, on_gone, on_lost
        self._joins = tuple(joins)
        self.nodes: dict[str, FleetNode] = {}  # by address
        self.aliases: dict[str, str] = {}  # other addresses of nodes that are followed, by their own
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Future[list[None]] | None = None
        self._model = ""
        self._told: dict[str, bool] = {}  # by address, what the log says of a node
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of a mistake of ours

    async def __aenter__(self) -> Fleet:
        for address in self._joins:
            self.join(address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        for node in self.nodes.values():
            node.close()

    def join(self, address: str) -> None:
        """Follow the node at this address, which the user named."""
        self._follow(address, joined=True, role="")

    @property
    def model(self) -> str:
        """What is served here: the model of the first node that could be asked."""
        return self._model

    def ready(self) -> list[FleetNode]:
        """Nodes that can be asked; of two under one name the one that answered last."""
        by_name = {node.name: node for node in sorted(self.nodes.values(), key=lambda n: n.answered_s) if node.ready}
        return list(by_name.values())

    def decode(self) -> list[FleetNode]:
        """Those known to decode, ready or not, and those that have not said what they do."""
        return [node for node in self.nodes.values() if node.may_decode]

    async def look(self) -> None:
        """Ask all at once how they are, since none seems ready: one may just have come."""
        if self._looking is None or self._looking.done():  # once for all who ask meanwhile
            self._looking = asyncio.gather(*(node.look() for node in self.decode()))
        await asyncio.wait((self._looking,), timeout=POLL_S)

    def none_ready(self) -> Broken:
        reasons = "; ".join(node.why for node in self.decode()) or "none is known"
        return Broken(f"no decode node is ready: {reasons}")

    # ------------------------------------------------------------ one node

    def _follow(self, address: str, *, joined: bool, role: str) -> None:
        if address in self.nodes or address in self.aliases or len(self.nodes) >= NODES_MAX:
            return
        node = FleetNode(address, self._station, joined=joined, role=role, unfit=self._unfit, on_change=self._tell)
        self.nodes[address] = node
        self._tasks[address] = task = asyncio.get_running_loop().create_task(self._watch(node))
        task.add_done_callback(self._watched)

    def _watched(self, task: asyncio.Task[None]) -> None:
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not self.failed.done():
            self.failed.set_exception(problem)

    async def _watch(self, node: FleetNode) -> None:
        while not self._is_over(node):
            await node.look()
            self._discover(node.status.get("peers", ()))
            if node.ready:
                self._on_look(node)
            try:
                async with asyncio.timeout(POLL_S):
                    await node.news.wait()
            except TimeoutError:
                pass
        self._on_gone(node)
        node.close()
        self.nodes.pop(node.address)
        self._tasks.pop(node.address)
        self._told.pop(node.address, None)
        self.aliases = {alias: own for alias, own in self.aliases.items() if own != node.address}

    def _is_over(self, node: FleetNode) -> bool:
        """Found under another address too, or gone for long."""
        twin = next((n for n in self.nodes.values() if n is not node and n.life == node.life and n.name), None)
        if twin is not None and twin.works and not (node.joined and not twin.joined):
            self.aliases[node.address] = twin.address
            return True
        return not node.joined and asyncio.get_running_loop().time() - node.answered_s > FORGET_S

    def _unfit(self, status: dict[str, Any]) -> str:
        """Why a node that says this is not to be asked; '' when it is. All behind one gateway serve one model."""
        if not status.get("ready"):
            return "; ".join(status.get("not_ready") or ["it does not say why"])
        if status.get("role") not in DECODE_ROLES:
            return ONLY_PREFILLS
        model = str(status.get("model", ""))
        self._model = self._model or model
        if model == self._model:
            return ""
        return f"it serves {model!r}, this gateway {self._model!r}, the first it saw: start it again for another one"

    def _discover(self, peers: Sequence[dict[str, Any]]) -> None:
        for peer in peers:
            address = str(peer.get("address", ""))
            role = str(peer.get("role", ""))
            if peer.get("state") == "up" and _callable(address) and self._is_wanted(address, role):
                self._follow(address, joined=False, role=role)

    def _is_wanted(self, address: str, role: str) -> bool:
        """A decode node in any case; a prefill node is only looked at, and not where keys say that we are strangers."""
        return role in DECODE_ROLES or self._station.has_key_of(address)

    def _tell(self, node: FleetNode) -> None:
        """Log what has become of it: once when it can be asked, once when no longer."""
        if self._told.get(node.address) is node.ready or not node.may_decode:
            return
        self._told[node.address] = node.ready
        if node.ready:
            log.info("%s at %s is ready", node.name, node.address)
        else:
            log.info("not ready: %s", node.why)
            self._on_lost(node)


def _callable(address: str) -> bool:
    try:
        parse_address(address, "address")
    except ConfigError:
        return False
    return True
