"""Following a node's published events: a SUB socket, one EventStream for each topic, snapshots asked over the bus."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import Closed, DeadlineExceeded, PdError, RequestError
from .generation import listed
from .messages import EventsSnapshot, EventsSnapshotReply, Published
from .publisher import EVENT_GROUPS, Subscriber
from .stream import (
    Apply,
    AskSnapshot,
    EventCame,
    EventStream,
    NoSnapshots,
    Reset,
    SnapshotCame,
    StreamEffect,
    StreamEvent,
    StreamTick,
    Subscribed,
)
from .wire import Header

if TYPE_CHECKING:
    from .client import Client

QUEUE_EVENTS_MAX = 16_384  # unread ones; what is more is lost like on the way, and shows as a hole
TOPICS_MAX = 1024
SNAPSHOT = "snapshot"


class Subscription:
    """An async iterator over Published, each topic in order and without holes; use it within `async with`.

    Within it the subscription is in force: nothing that happens from then on is missed.
    Where the publisher has snapshots of a topic, the first event and the first after a hole is named `snapshot`:
    its data is the state as of then, instead of what was missed.
    """

    def __init__(self, client: Client, topics: Sequence[str]) -> None:
        self._client = client
        self._topics = _checked(topics)
        self._streams: dict[str, EventStream] = {}
        self._queue: deque[Published] = deque()
        self._news = asyncio.Event()
        self._subscriber: Subscriber | None = None
        self._asks: dict[str, asyncio.Task[None]] = {}
        self.closed = False

    async def __aenter__(self) -> Subscription:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Published:
        await self._start()
        while not self._queue:
            if self.closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        for task in self._asks.values():
            task.cancel()
        self._asks.clear()
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        self._news.set()

    async def _start(self) -> None:
        if self._subscriber is not None or self.closed:
            return
        node = await self._client.node()
        if not node.hello.events:
            raise RequestError(f"{node.name} at {self._client.address} publishes no events", code="no_events")
        for topic in self._topics:
            _check_published(topic, node.name)
        self._subscriber = Subscriber(
            node.hello.events, self._topics, self._on_published, secure=self._client.securing(node)
        )
        await self._in_force(self._subscriber, f"{node.name} at {node.hello.events}")
        for topic in () if self.closed else self._topics:
            if "@" in topic:
                self._feed(self._stream(topic), Subscribed())

    async def _in_force(self, subscriber: Subscriber, publisher: str) -> None:
        try:
            async with asyncio.timeout(self._client.timeout_s):
                await subscriber.in_force.wait()
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(
                f"{publisher} did not answer a subscription within {self._client.timeout_s:g} s: can its port for "
                f"events be reached from here?"
            ) from None
        except asyncio.CancelledError:
            self.close()
            raise

    def _on_published(self, header: Header, event: Published) -> None:
        if len(self._queue) >= QUEUE_EVENTS_MAX:
            return
        if event.topic in self._streams or len(self._streams) < TOPICS_MAX:
            came = EventCame(incarnation=header.from_inc, sequence=header.seq, event=event)
            self._feed(self._stream(event.topic), came)

    def _stream(self, topic: str) -> EventStream:
        return self._streams.setdefault(topic, EventStream(topic))

    def _feed(self, stream: EventStream, event: StreamEvent) -> None:
        for effect in stream.handle(event, time.monotonic_ns()):
            self._perform(stream, effect)

    def _perform(self, stream: EventStream, effect: StreamEffect) -> None:
        match effect:
            case AskSnapshot():
                self._ask(stream, effect)
            case Reset():
                self._put(Published(topic=effect.topic, event=SNAPSHOT, data=effect.state))
            case Apply():
                self._put(effect.event)

    def _put(self, event: Published) -> None:
        self._queue.append(event)
        self._news.set()

    def _ask(self, stream: EventStream, effect: AskSnapshot) -> None:
        earlier = self._asks.pop(effect.topic, None)
        if earlier is not None and earlier is not asyncio.current_task():
            earlier.cancel()
        self._asks[effect.topic] = asyncio.get_running_loop().create_task(self._snapshot(stream, effect))

    async def _snapshot(self, stream: EventStream, effect: AskSnapshot) -> None:
        try:
            incarnation, reply = await self._client.ask_any(EventsSnapshot(topic=effect.topic), EventsSnapshotReply)
        except RequestError:
            self._feed(stream, NoSnapshots(ask=effect.ask))
        except Closed:
            self.close()
        except PdError:
            await self._retry(stream)
        else:
            came = SnapshotCame(ask=effect.ask, incarnation=incarnation, sequence=reply.sequence, state=reply.state)
            self._feed(stream, came)

    async def _retry(self, stream: EventStream) -> None:
        due_ns = stream.next_deadline()
        if due_ns is not None:
            await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            self._feed(stream, StreamTick())


def _checked(topics: Any) -> tuple[str, ...]:
    given = listed(topics, "topics")
    if not given:
        raise RequestError("topics: give at least one; '' is all", param="topics")
    return given


def _check_published(topic: str, node: str) -> None:
    """Raises RequestError for a topic on which that node never says anything."""
    topics = [f"{group}@{node}" for group in EVENT_GROUPS]
    if not any(name.startswith(topic) for name in topics):
        problem = f"topics: {node} publishes nothing on {topic!r:.80}; there are {', '.join(topics)}"
        raise RequestError(problem, param="topics")
