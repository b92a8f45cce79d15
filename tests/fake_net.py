"""A fake beside the endpoint: Membership machines joined by links that lose nothing until told to, on a clock that
only tests move. What a real endpoint does is in tests/wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from pdbus.bus import members as ms
from pdbus.bus.known import USABLE
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Hello, Message
from pdbus.bus.wire import Header
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable

S = 1_000_000_000
GEOMETRY = geometry_for(2, 1, 4, 16, "float32")
E = TypeVar("E", bound=ms.MembershipEffect)


class Net:
    """Nodes by address. `deliver` carries everything that is under way, in order."""

    def __init__(self) -> None:
        self.now = 0
        self.at: dict[str, Node] = {}
        self.under_way: deque[tuple[Node, str, Header, Message]] = deque()
        self.links: dict[str, tuple[Node, str]] = {}  # a link's name -> who is at its other end, and its name there
        self.opened = 0
        self.drop: Callable[[Node, Message], bool] = lambda node, message: False
        self.slow: set[str] = set()  # links on which nothing arrives for now; on every link all keeps its order
        self.held_up: deque[tuple[Node, str, Header, Message]] = deque()

    def deliver(self) -> None:
        while self.under_way:
            node, link, header, message = self.under_way.popleft()
            if link in self.slow:
                self.held_up.append((node, link, header, message))
            elif self.at.get(node.address) is node and not self.drop(node, message):
                node.hear(link, header, message)

    def slow_down(self) -> None:
        """Whatever is said on the links that are open now arrives later than what is said on others."""
        self.slow = set(self.links)

    def catch_up(self) -> None:
        self.slow.clear()
        self.under_way = self.held_up + self.under_way
        self.held_up = deque()
        self.deliver()

    def run(self, seconds: float) -> None:
        """Let time pass: every node gets its ticks when they are due."""
        end = self.now + int(seconds * S)
        self.deliver()
        while True:
            awake = [n for n in self.at.values() if not n.frozen]
            due = [(d, n) for n in awake if (d := n.machine.next_deadline()) is not None]
            at, node = min(due, key=lambda pair: pair[0], default=(end + 1, None))
            if at > end or node is None:
                break
            self.now = max(self.now, at)
            node.handle(ms.Tick())
            self.deliver()
        self.now = end


class Node:
    """One life of a node."""

    def __init__(self, net: Net, name: str, role: str, *, life: int = 1, address: str = "", **hello: Any) -> None:
        self.net = net
        self.name = name
        self.address = address or f"tcp://{name}:7400"
        self.incarnation = f"{name}#{life}".encode().ljust(16, b".")
        fields: dict[str, Any] = {"geometry": GEOMETRY, "fingerprint": "f", "version": "0.1.0", **hello}
        hello_message = Hello(role=role, address=self.address, **fields)
        self.machine = Membership(
            ms.MembershipConfig(name=name, incarnation=self.incarnation, hello=hello_message), unreadable
        )
        self.effects: list[ms.MembershipEffect] = []
        self.seq = 0
        self.frozen = False
        self.waiting: list[ms.MembershipEvent] = []  # while it is frozen
        net.at[self.address] = self

    def handle(self, event: ms.MembershipEvent) -> list[ms.MembershipEffect]:
        if self.frozen:
            self.waiting.append(event)
            return []
        effects = self.machine.handle(event, self.net.now)
        self.effects += effects
        for effect in effects:
            self.perform(effect)
        return effects

    def hear(self, link: str, header: Header, message: Message) -> list[ms.MembershipEffect]:
        return self.handle(ms.event_of(link, header, message))

    def perform(self, effect: ms.MembershipEffect) -> None:
        match effect:
            case ms.OpenLink():
                self.open(effect.address)
            case ms.CloseLink():
                self.net.links.pop(effect.link, None)
            case ms.SendOn():
                self.send(effect.link, effect.message, effect.to, effect.to_inc, effect.cause)

    def open(self, address: str) -> None:
        net = self.net
        net.opened += 1
        ours, theirs = f"out:{net.opened}", f"in:{net.opened}"
        net.links[ours] = (net.at[address], theirs) if address in net.at else (self, "nowhere")
        net.links[theirs] = (self, ours)
        self.handle(ms.LinkOpened(link=ours, address=address))

    def send(self, link: str, message: Message, to: str = "", to_inc: bytes = b"", cause: int = 0) -> None:
        self.seq += 1
        header = Header(from_=self.name, from_inc=self.incarnation, to=to, to_inc=to_inc, seq=self.seq, cause=cause)
        other, name_there = self.net.links.get(link, (self, "nowhere"))
        current = self.net.at.get(other.address)  # a connection is re-made to whoever listens there now
        if name_there != "nowhere" and current is not None:
            self.net.under_way.append((current, name_there, header, message))

    def join(self, other: Node) -> None:
        self.handle(ms.JoinAsked(address=other.address))
        self.net.deliver()

    def thaw(self) -> None:
        """What has come meanwhile is heard in the order in which it came."""
        self.frozen = False
        waiting, self.waiting = self.waiting, []
        for event in waiting:
            self.handle(event)
            self.net.deliver()

    def die(self) -> None:
        del self.net.at[self.address]

    def got(self, kind: type[E]) -> list[E]:
        """Effects of that kind so far; they are forgotten with `forget`."""
        return [e for e in self.effects if isinstance(e, kind)]

    def sent(self, kind: type[Message]) -> list[Message]:
        return [e.message for e in self.got(ms.SendOn) if isinstance(e.message, kind)]

    def usable(self) -> list[str]:
        """Whom it takes for up or suspect."""
        return [p.name for p in self.machine.members() if p.state in USABLE]

    def forget(self) -> None:
        self.effects.clear()

    def state_of(self, name: str) -> str:
        return next((p.state.value for p in self.machine.members() if p.name == name), "unknown")
