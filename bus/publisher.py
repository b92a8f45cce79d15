"""PUB and SUB: what may be lost and can be rebuilt.

ZeroMQ filters by the first bytes of frame 0, so the topic stands there and the message after it:
`[topic] [pd1.published ...]`. A topic is `<group>@<node>`; header.seq counts per topic, from 1.

A SUB socket connects and subscribes in the background: what is published before the subscription has arrived is lost.
So a subscriber subscribes, last, to a *mark* that is its own; the publisher answers a subscription to a mark with the
mark, one frame. Subscriptions arrive in order: when the mark comes back, all are in force.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from .curve import serve
from .door import EVENTS as DOOR_EVENTS
from .door import Door
from .errors import Closed, ConfigError, RequestError
from .frames import Unreadable, pack, unpack
from .keyring import Keyring
from .messages import EventsSnapshot, EventsSnapshotReply, Published
from .pump import Pump
from .sockets import configure
from .wire import Header

EVENT_GROUPS = ("kv", "lease", "node", "request")  # what nodes publish
MARK = b"\xff"  # how a mark begins: no topic does, since this is no UTF-8; and it sorts behind all of them
MARK_BYTES = 16  # random ones that follow
SUBSCRIBED, LEFT = b"\x01", b"\x00"  # how XPUB tells of a subscription, and of its end; the topic follows
SUBSCRIPTION_BYTES_MAX = 4096  # of one; CURVE's handshake has frames of some 400
SUBSCRIBED_BYTES_MAX = 256 << 10  # of all: thousands of subscribers. ZeroMQ keeps some 50 bytes for each byte
REBIND_S = 0.02  # until the port is free again; ZeroMQ gives it up in the background
FRAMES = 2  # topic, message

log = logging.getLogger("pdbus")


class Publisher:
    """The PUB socket of a node (XPUB, to see marks). A subscriber that is too slow loses events silently, and sees the
    hole. Bind it on an event loop. With a `keyring` only keys on its allow-list may subscribe; the context must be that
    of an endpoint which is bound with the same one."""

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        keyring: Keyring | None = None,
        on_door: Callable[[str], None] | None = None,
    ) -> None:
        """`on_door` is told like an Endpoint's."""
        self._name = name
        self._incarnation = incarnation
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._keyring = keyring
        self._address = ""  # where it is bound
        self._rebinding: asyncio.TimerHandle | None = None
        self._pump: Pump | None = None
        self._on_door = on_door or (lambda problem: None)
        self._door: Door | None = None
        self._watch: Pump | None = None  # the monitor
        self._subscribed_bytes, self._too_many = 0, False
        self._sequences: dict[str, int] = {}
        self._states: dict[str, Callable[[], dict[str, Any]]] = {}

    def bind(self, address: str, *, setting: str = "--events") -> str:
        """Publish at `address` and return the real one. Raises ConfigError naming `setting`."""
        socket = self._context.socket(zmq.XPUB)
        configure(socket, address)
        if self._keyring is not None:
            serve(socket, self._keyring)
        socket.set(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX)
        self._subscribed_bytes, self._too_many = 0, False
        watch = socket.get_monitor_socket(DOOR_EVENTS)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.disable_monitor()
            watch.close(linger=0)
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot listen on {address}: {e.strerror}") from None
        if address.startswith("tcp://"):
            self._door = Door(self._on_door)
        self._watch = Pump(watch, self._on_monitor)
        self._pump = Pump(socket, self._on_subscription, frames_max=1)
        self._address = bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        return self._address

    def turn_out(self) -> None:
        """Cut every subscriber's connection, so that each has to show its key again: ZeroMQ cannot cut one alone.
        They come back by themselves, and see a hole."""
        if self._pump is None:
            return
        self._unbind()
        self._rebind()

    def _rebind(self) -> None:
        self._rebinding = None
        try:
            self.bind(self._address)
        except ConfigError:
            self._rebinding = asyncio.get_running_loop().call_later(REBIND_S, self._rebind)

    def publish(self, group: str, event: str, data: dict[str, Any] | None = None) -> int:
        """Publish one event on `<group>@<node>` and return its sequence. Numbered even while not bound."""
        topic = f"{group}@{self._name}"
        sequence = self._sequences[topic] = self._sequences.get(topic, 0) + 1
        if self._pump is not None:
            header = Header(from_=self._name, from_inc=self._incarnation, seq=sequence)
            message = Published(topic=topic, event=event, data=data or {})
            self._pump.send([topic.encode(), *pack(header, message)])
        return sequence

    def provide(self, group: str, state: Callable[[], dict[str, Any]]) -> None:
        """`state` gives what it takes to rebuild the group's topic as of the last event that was published."""
        self._states[f"{group}@{self._name}"] = state

    def snapshot(self, asked: EventsSnapshot) -> EventsSnapshotReply:
        """The answer to events.snapshot. Raises RequestError when the topic has none."""
        state = self._states.get(asked.topic)
        if state is None:
            raise RequestError(f"no snapshots of {asked.topic!r} here", param="topic", code="no_snapshot")
        return EventsSnapshotReply(topic=asked.topic, sequence=self._sequences.get(asked.topic, 0), state=state())

    def close(self) -> None:
        if self._rebinding is not None:
            self._rebinding.cancel()
        if self._pump is not None:
            self._unbind()
        if self._owns_context:
            self._context.term()

    @property
    def door_problem(self) -> str:
        """Like an Endpoint's."""
        return self._door.problem if self._door is not None else ""

    def _unbind(self) -> None:
        assert self._pump is not None and self._watch is not None
        if self._door is not None:
            self._door.close()
        self._pump.socket.disable_monitor()
        self._watch.close()
        self._pump.close()
        self._pump = self._watch = self._door = None

    def _on_monitor(self, frames: list[bytes]) -> None:
        said = parse_monitor_message(frames)
        if self._door is not None and said["event"] & DOOR_EVENTS:
            self._door.heard(said["event"], said["value"])

    def _on_subscription(self, frames: list[bytes]) -> None:
        self._count(frames[0])
        mark = frames[0].removeprefix(SUBSCRIBED)
        if self._pump is not None and mark != frames[0] and mark.startswith(MARK) and len(mark) <= 1 + MARK_BYTES:
            self._pump.send([mark])

    def _count(self, said: bytes) -> None:
        """Who subscribes to more than a node can keep cannot be told from the others."""
        self._subscribed_bytes += {SUBSCRIBED: len(said), LEFT: -len(said)}.get(said[:1], 0)
        if self._subscribed_bytes > SUBSCRIBED_BYTES_MAX and not self._too_many:
            self._too_many = True
            log.warning("events: subscriptions of more than %d bytes; all subscribers are cut", SUBSCRIBED_BYTES_MAX)
            asyncio.get_running_loop().call_soon(self.turn_out)


class Subscriber:
    """A SUB socket: hands what comes on `topics` (their first characters; '' is all) to `on_published`.

    `in_force` is set once the publisher has answered: nothing that it publishes from then on is missed; and at the
    end, so that nobody waits on."""

    def __init__(
        self,
        address: str,
        topics: Iterable[str],
        on_published: Callable[[Header, Published], None],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        setting: str = "events address",
        secure: Callable[[zmq.Socket[bytes]], None] | None = None,  # called before it connects
    ) -> None:
        self.unreadable = 0
        self.in_force = asyncio.Event()
        self._mark = MARK + os.urandom(MARK_BYTES)
        self._on_published = on_published
        self._context = context or zmq.Context()
        self._owns_context = context is None
        socket = self._context.socket(zmq.SUB)
        configure(socket, address)
        if secure is not None:
            secure(socket)
        try:
            socket.connect(address)
            for topic in topics:
                socket.subscribe(topic)
            socket.subscribe(self._mark)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot connect to {address}: {e.strerror}") from None
        self._pump = Pump(socket, self._on_frames, frames_max=FRAMES)

    def close(self) -> None:
        if self._pump.closed:
            raise Closed("the subscriber is closed")
        self._pump.close()
        self.in_force.set()
        if self._owns_context:
            self._context.term()

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) == 1 and frames[0].startswith(MARK):
            if frames[0] == self._mark:  # who follows all topics sees the others' too
                self.in_force.set()
            return
        try:
            header, message, _ = unpack(frames[1:] or [b""])
        except Unreadable:
            self.unreadable += 1
            return
        if isinstance(message, Published) and message.topic.encode() == frames[0]:
            self._on_published(header, message)
        else:
            self.unreadable += 1
