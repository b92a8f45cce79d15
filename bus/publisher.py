"""PUB and SUB: what may be lost and can be rebuilt.

ZeroMQ filters by the first bytes of frame 0, so the topic stands there and the message after it:
`[topic] [pd1.published] [header] [body]`. A topic is `<group>@<node>`; header.seq counts per topic, from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import zmq

from .endpoint import configure
from .errors import Closed, ConfigError, RequestError
from .frames import Unreadable, pack, unpack
from .messages import EventsSnapshot, EventsSnapshotReply, Published
from .pump import Pump
from .wire import Header

TOPIC_BYTES_MAX = 256
FRAMES = 5  # topic, kind, header, body, and one more that tells of too many


class Publisher:
    """The PUB socket of a node. A subscriber that is too slow loses events silently, and sees the hole."""

    def __init__(self, name: str, incarnation: bytes, *, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._name = name
        self._incarnation = incarnation
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._socket: zmq.Socket[bytes] | None = None
        self._sequences: dict[str, int] = {}
        self._states: dict[str, Callable[[], dict[str, Any]]] = {}

    def bind(self, address: str, *, setting: str = "--events") -> str:
        """Publish at `address` and return the real one. Raises ConfigError naming `setting`."""
        socket = self._context.socket(zmq.PUB)
        configure(socket, address)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot listen on {address}: {e.strerror}") from None
        self._socket = socket
        return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def publish(self, group: str, event: str, data: dict[str, Any] | None = None) -> int:
        """Publish one event on `<group>@<node>` and return its sequence. Numbered even while not bound."""
        topic = f"{group}@{self._name}"
        sequence = self._sequences[topic] = self._sequences.get(topic, 0) + 1
        if self._socket is not None:
            header = Header(from_=self._name, from_inc=self._incarnation, seq=sequence)
            message = Published(topic=topic, event=event, data=data or {})
            self._socket.send_multipart([topic.encode(), *pack(header, message)])
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
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._owns_context:
            self._context.term()


class Subscriber:
    """A SUB socket: hands what comes on `topics` (their first characters; '' is all) to `on_published`."""

    def __init__(
        self,
        address: str,
        topics: Iterable[str],
        on_published: Callable[[Header, Published], None],
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        setting: str = "events address",
    ) -> None:
        self.unreadable = 0
        self._on_published = on_published
        self._context = context or zmq.Context()
        self._owns_context = context is None
        socket = self._context.socket(zmq.SUB)
        configure(socket, address)
        try:
            for topic in topics:
                socket.subscribe(topic)
            socket.connect(address)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot connect to {address}: {e.strerror}") from None
        self._pump = Pump(socket, self._on_frames, frames_max=FRAMES)

    def close(self) -> None:
        if self._pump.closed:
            raise Closed("the subscriber is closed")
        self._pump.close()
        if self._owns_context:
            self._context.term()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            header, message, _ = unpack(frames[1:] or [b""])
        except Unreadable:
            self.unreadable += 1
            return
        if isinstance(message, Published) and message.topic.encode() == frames[0]:
            self._on_published(header, message)
        else:
            self.unreadable += 1
