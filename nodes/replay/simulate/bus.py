"""The simulated bus: what ZeroMQ does for an `Endpoint`, with a time for each message.

A link keeps its order, is re-made by itself to whoever listens at the address then, keeps what was queued for it
meanwhile, and loses what was on its way when it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdbus.bus.messages import Message
from pdbus.bus.wire import Header

from ..driver import Driver

if TYPE_CHECKING:
    from .node import SimNode

CONNECT_NS = 500_000
RECONNECT_NS = 50_000_000  # after a cut, and between tries at an address where nobody listens
NOTICE_NS = 1_000_000  # until who opened a link is told of its cut


class Packet(NamedTuple):
    header: Header
    message: Message
    block_hashes: tuple[bytes, ...]  # of the prompt of a prefill.request


Fate = Callable[["SimNode", "SimNode", Packet], tuple[int, int]]  # how many copies, and how much later


@dataclass(slots=True)
class Link:
    """One connection, named `key` by who opened it and `inbound` by who listens."""

    key: str
    inbound: str
    opener: SimNode
    address: str
    listener: SimNode | None = None
    queue: list[Packet] = field(default_factory=list)
    connections: int = 0
    closed: bool = False
    sent: int = 0  # by who opened it
    answered: int = 0
    latest: dict[bool, int] = field(default_factory=dict)  # when the last late message comes, by: to the listener


class Bus:
    """All links. `fate`, when there is one, decides about every message; without it none is lost or late."""

    def __init__(self, driver: Driver, message_ns: int) -> None:
        self.listening: dict[str, SimNode] = {}
        self.fate: Fate | None = None
        self._driver = driver
        self._message_ns = message_ns
        self._links: dict[str, Link] = {}
        self._opened = 0

    # ------------------------------------------------------------ connections

    def open(self, opener: SimNode, address: str) -> Link:
        self._opened += 1
        link = Link(f"out:{self._opened}", f"in:{self._opened}", opener, address)
        self._links[link.key] = link
        self._driver.after(CONNECT_NS, self._connect, link)
        return link

    def close(self, link: Link, flush: bool) -> None:
        """What has left is still delivered; what is queued only with `flush`, if anyone listens."""
        if link.closed:
            return
        link.closed = True
        del self._links[link.key]
        if link.listener is not None:
            link.listener.inbound.pop(link.inbound, None)
        if not flush:
            link.queue.clear()

    def cut(self, link: Link) -> None:
        """The connection breaks; what is on its way is lost; it is re-made soon."""
        if link.listener is None:
            return
        link.listener.inbound.pop(link.inbound, None)
        link.listener = None
        link.connections += 1
        self._driver.after(NOTICE_NS, link.opener.lost_link, link)
        self._driver.after(RECONNECT_NS, self._connect, link)

    def between(self, node: SimNode, peer: str = "") -> list[Link]:
        """The links of a node, or only those to one other by name."""
        links = [link for link in self._links.values() if node in (link.opener, link.listener)]
        return [link for link in links if not peer or peer in (link.opener.name, link.listener and link.listener.name)]

    def process_ended(self, node: SimNode) -> None:
        for link in self.between(node):
            if link.opener is node:
                self.close(link, flush=True)
            else:
                self.cut(link)

    def _connect(self, link: Link) -> None:
        if link.closed or link.listener is not None:
            return
        listener = self.listening.get(link.address)
        if listener is None:
            self._driver.after(RECONNECT_NS, self._connect, link)
            return
        link.listener = listener
        listener.inbound[link.inbound] = link
        queue, link.queue = link.queue, []
        for packet in queue:
            self._transmit(link, packet, to_listener=True)

    # ------------------------------------------------------------ messages

    def send(self, link: Link, sender: SimNode, packet: Packet) -> None:
        to_listener = sender is link.opener
        if link.listener is not None:
            self._transmit(link, packet, to_listener)
        elif to_listener and not link.closed:
            link.queue.append(packet)

    def _transmit(self, link: Link, packet: Packet, to_listener: bool) -> None:
        receiver = link.listener if to_listener else link.opener
        assert receiver is not None
        copies, late_ns = 1, 0
        if self.fate is not None and link.listener is not None:
            copies, late_ns = self.fate(link.opener if to_listener else link.listener, receiver, packet)
        at_ns = self._driver.now + self._message_ns + late_ns
        if late_ns or link.latest:
            at_ns = link.latest[to_listener] = max(at_ns, link.latest.get(to_listener, 0))
        for _ in range(copies):
            self._driver.at(at_ns, self._arrive, link, receiver, link.connections, packet, to_listener)

    def _arrive(self, link: Link, receiver: SimNode, connection: int, packet: Packet, to_listener: bool) -> None:
        if link.connections != connection or (link.closed and not to_listener):
            return
        if to_listener and not link.closed:
            receiver.inbound[link.inbound] = link  # forgotten by a close, known again by a message
        receiver.enter(receiver.hear, link.inbound if to_listener else link.key, packet)
