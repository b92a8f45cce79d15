"""Time, chance and the bus of a simulated cluster.

One thread, one clock, one random generator: the same seed gives the same run. The bus does what ZeroMQ does for
`Endpoint`: a link keeps its order, is re-made by itself to whoever listens at the address then, keeps what was queued
for it meanwhile, and loses what was on its way when it was cut. Beyond that, messages of the hand-off may be lost,
doubled and delayed past later ones, which no TCP does and every rule has to survive.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdbus.bus.messages import Message
from pdbus.bus.wire import Header
from pdbus.nodes.replay.driver import Driver

if TYPE_CHECKING:
    from .cluster_node import SimNode

MS = 1_000_000
S = 1_000_000_000
HANDOFF = ("prefill.", "transfer.", "lease.")


class World(Driver):
    """The clock and all that is to happen, and chance."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.counters: Counter[str] = Counter()
        self.trace: list[str] = []
        self._tracing = tracing

    def after_ms(self, low: float, high: float, do: Callable[[], None]) -> None:
        self.after(self.between_ms(low, high), do)

    def between_ms(self, low: float, high: float) -> int:
        return int(self.random.uniform(low, high) * MS)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def note(self, who: str, what: object) -> None:
        if self._tracing:
            self.trace.append(f"{self.now / S:11.6f} {who:6} {what}")


class Weather(NamedTuple):
    """What happens to messages of the hand-off: chances per message, and single ones, as (kind, which one of it)."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_ms: int = 3000
    lose: tuple[tuple[str, int], ...] = ()


class Packet(NamedTuple):
    header: Header
    message: Message
    raw: tuple[int, ...]  # the prompt of a prefill.request


@dataclass
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
    seq: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by: to the listener
    busy_until: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


class Bus:
    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.listening: dict[str, SimNode] = {}
        self.links: list[Link] = []
        self._opened = 0
        self._sent: Counter[str] = Counter()

    # ------------------------------------------------------------ connections

    def open(self, opener: SimNode, address: str) -> Link:
        self._opened += 1
        link = Link(f"out:{self._opened}", f"in:{self._opened}", opener, address)
        self.links.append(link)
        self._connect_later(link)
        return link

    def close(self, link: Link, flush: bool) -> None:
        """What has left is still delivered; what is queued only with `flush`, if anyone listens."""
        if link.closed:
            return
        link.closed = True
        self.links.remove(link)
        if link.listener is not None:
            link.listener.inbound.pop(link.inbound, None)
        if not flush:
            link.queue.clear()

    def cut(self, link: Link, lose: bool = True) -> None:
        """The connection breaks; what is on its way is lost, or comes still; it is re-made soon."""
        if link.listener is None:
            return
        self.world.note("bus", f"cut {link.key} of {link.opener.name} to {link.address}")
        link.listener.inbound.pop(link.inbound, None)
        link.listener = None
        link.connections += lose
        self.world.after_ms(0.1, 2, lambda: link.opener.lost_link(link))
        self._connect_later(link)

    def cut_all(self, node: SimNode, lose: bool) -> None:
        """The process of a node has ended."""
        for link in list(self.links):
            if link.opener is node:
                self.close(link, flush=True)
            elif link.listener is node:
                self.cut(link, lose)

    def _connect_later(self, link: Link) -> None:
        self.world.after_ms(0.1, 1 if not link.connections else 200, lambda: self._connect(link))

    def _connect(self, link: Link) -> None:
        if link.closed or link.listener is not None:
            return
        listener = self.listening.get(link.address)
        if listener is None:
            self.world.after_ms(50, 400, lambda: self._connect(link))
            return
        link.listener = listener
        listener.inbound[link.inbound] = link
        queue, link.queue = link.queue, []
        for packet in queue:
            self._transmit(link, packet, to_listener=True)

    # ------------------------------------------------------------ messages

    def send(self, link: Link, sender: SimNode, packet: Packet) -> bool:
        """False: it cannot be sent, as ROUTER_MANDATORY tells."""
        to_listener = sender is link.opener
        if link.listener is None:
            if to_listener and not link.closed:
                link.queue.append(packet)
            return to_listener
        self._transmit(link, packet, to_listener)
        return True

    def _transmit(self, link: Link, packet: Packet, to_listener: bool) -> None:
        world = self.world
        copies, late_ns = self._fate(packet.message.KIND) if packet.message.KIND.startswith(HANDOFF) else (1, 0)
        if copies != 1 or late_ns:
            world.counters["weather"] += 1
            world.note("bus", f"copies {copies} late {late_ns / MS:.0f} ms: {packet.message}")
        for _ in range(copies):
            at = max(world.now + world.between_ms(0.1, 1), link.busy_until[to_listener])
            link.busy_until[to_listener] = at
            if copies == 2:
                late_ns = world.between_ms(0, 50)
            receiver, connection = link.listener if to_listener else link.opener, link.connections
            assert receiver is not None
            world.after(at + late_ns - world.now, self._arrival(link, receiver, connection, packet, to_listener))

    def _fate(self, kind: str) -> tuple[int, int]:
        """How many copies arrive, and how much later than they should."""
        weather, roll = self.weather, self.world.random.random()
        self._sent[kind] += 1
        if roll < weather.lost or (kind, self._sent[kind]) in weather.lose:
            return 0, 0
        if roll < weather.lost + weather.doubled:
            return 2, 0
        if roll < weather.lost + weather.doubled + weather.delayed:
            return 1, self.world.between_ms(1, weather.delay_ms)
        return 1, 0

    def _arrival(
        self, link: Link, receiver: SimNode, connection: int, packet: Packet, to_listener: bool
    ) -> Callable[[], None]:
        def arrive() -> None:
            if link.connections != connection or (link.closed and not to_listener):
                return
            if to_listener and not link.closed:
                receiver.inbound[link.inbound] = link  # forgotten by a close, known again by a message
            receiver.enter(lambda: receiver.hear(link.inbound if to_listener else link.key, packet))

        return arrive
