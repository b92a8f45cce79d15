"""Following one topic of published events without missing any: subscribe, then snapshot, then apply what is newer.

Theory of operation. A publisher numbers a topic's events from 1 in each of its lives. While *syncing*, events are
kept and not applied; the snapshot says up to which number it already holds them, and those that are newer follow.
While *live*, the next number is applied, an old one is a duplicate, and a gap (a *hole*), or another life of the
publisher, means syncing again. Lives that were left are remembered, so that a late event does not bring them back;
the answer to our latest question is believed whatever life it comes from, since that life was there to be asked,
unless an event has shown another life after we asked: then we ask again.
A topic without snapshots is followed from what comes first, with its holes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .messages import Published
from .wire import Declared

BUFFER_EVENTS_MAX = 4096  # kept while syncing; what overflows shows as a hole afterwards
LIVES_MAX = 16  # incarnations of the publisher that are remembered as left
RETRY_NS = 2_000_000_000  # a snapshot that has not come by then is asked for again


class StreamState(StrEnum):
    IDLE = "idle"
    SYNCING = "syncing"
    LIVE = "live"


# What happens to the state. Anything not listed changes nothing.
STREAM: dict[tuple[StreamState, str], StreamState] = {
    (StreamState.IDLE, "subscribed"): StreamState.SYNCING,
    (StreamState.IDLE, "event"): StreamState.SYNCING,
    (StreamState.SYNCING, "snapshot"): StreamState.LIVE,
    (StreamState.SYNCING, "no snapshots"): StreamState.LIVE,
    (StreamState.LIVE, "hole"): StreamState.SYNCING,
    (StreamState.LIVE, "new life"): StreamState.SYNCING,
}


class StreamEvent(Declared, tag_field="t", tag=True):
    pass


class Subscribed(StreamEvent):
    """Events may come from now on: time for the first snapshot."""


class EventCame(StreamEvent):
    incarnation: bytes
    sequence: int
    event: Published


class SnapshotCame(StreamEvent):
    """Answers AskSnapshot number `ask`. `sequence`: the last event that `state` already holds."""

    ask: int
    incarnation: bytes
    sequence: int
    state: dict[str, Any]


class NoSnapshots(StreamEvent):
    """Answers AskSnapshot number `ask`: the publisher has none for this topic."""

    ask: int


class StreamTick(StreamEvent):
    pass


class StreamEffect(Declared, tag_field="t", tag=True):
    pass


class AskSnapshot(StreamEffect):
    """Ask the publisher. The answer to an earlier question no longer counts."""

    topic: str
    ask: int


class Reset(StreamEffect):
    """Forget what was known of the topic: this is its state now."""

    topic: str
    sequence: int
    state: dict[str, Any]


class Apply(StreamEffect):
    """The next event."""

    sequence: int
    event: Published


class EventStream:
    """The machine of one topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.state = StreamState.IDLE
        self.sequence = 0  # of the last event that was applied or that the snapshot held
        self.holes = 0
        self._incarnation = b""
        self._left: dict[bytes, None] = {}
        self._kept: dict[int, Published] = {}
        self._asked = 0  # number of the latest question
        self._met = 0  # which question was open when an event showed the life that we follow
        self._retry_ns: int | None = None

    def handle(self, event: StreamEvent, now_ns: int) -> list[StreamEffect]:
        match event:
            case Subscribed():
                return self._sync("subscribed", now_ns)
            case EventCame():
                return self._came(event, now_ns)
            case SnapshotCame():
                return self._snapshot(event, now_ns)
            case NoSnapshots():
                return self._no_snapshots(event)
            case StreamTick() if self._retry_ns is not None and now_ns >= self._retry_ns:
                return self._ask(now_ns)
        return []

    def next_deadline(self) -> int | None:
        return self._retry_ns

    def _came(self, event: EventCame, now_ns: int) -> list[StreamEffect]:
        if event.incarnation in self._left:
            return []
        effects: list[StreamEffect] = []
        if event.incarnation != self._incarnation:
            effects = self._new_life(event.incarnation, now_ns)
        elif self.state is StreamState.LIVE and event.sequence > self.sequence + 1:
            self.holes += 1
            effects = self._sync("hole", now_ns)
        if self.state is StreamState.SYNCING:
            self._keep(event)
            return effects
        if event.sequence == self.sequence + 1:
            self.sequence = event.sequence
            return [Apply(sequence=event.sequence, event=event.event)]
        return []

    def _new_life(self, incarnation: bytes, now_ns: int) -> list[StreamEffect]:
        first = not self._incarnation
        self._adopt(incarnation)
        self._met = self._asked
        if self.state is StreamState.SYNCING:
            return [] if first else self._ask(now_ns)
        return self._sync("event" if self.state is StreamState.IDLE else "new life", now_ns)

    def _adopt(self, incarnation: bytes) -> None:
        if self._incarnation:
            self._left[self._incarnation] = None
            while len(self._left) > LIVES_MAX:
                del self._left[next(iter(self._left))]
        self._incarnation = incarnation
        self._left.pop(incarnation, None)
        self._kept.clear()
        self.sequence = 0

    def _keep(self, event: EventCame) -> None:
        if len(self._kept) >= BUFFER_EVENTS_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[event.sequence] = event.event

    def _snapshot(self, event: SnapshotCame, now_ns: int) -> list[StreamEffect]:
        if self.state is not StreamState.SYNCING or event.ask != self._asked:
            return []
        if event.incarnation != self._incarnation:
            if self._met == self._asked:
                return self._ask(now_ns)  # the question is older than the event: nobody knows which life is newer
            self._adopt(event.incarnation)
        self._move("snapshot")
        self._retry_ns = None
        self.sequence = event.sequence
        reset = Reset(topic=self.topic, sequence=event.sequence, state=event.state)
        return [reset, *self._release(now_ns)]

    def _release(self, now_ns: int) -> list[StreamEffect]:
        """Apply what was kept and is newer; a hole in it means another snapshot."""
        kept, self._kept = self._kept, {}
        effects: list[StreamEffect] = []
        for sequence in sorted(s for s in kept if s > self.sequence):
            effects += self._came(
                EventCame(incarnation=self._incarnation, sequence=sequence, event=kept[sequence]), now_ns
            )
        return effects

    def _no_snapshots(self, event: NoSnapshots) -> list[StreamEffect]:
        if event.ask != self._asked or not self._move("no snapshots"):
            return []
        self._retry_ns = None
        kept, self._kept = self._kept, {}
        self.sequence = max(kept, default=self.sequence)
        return [Apply(sequence=s, event=kept[s]) for s in sorted(kept)]

    def _sync(self, verb: str, now_ns: int) -> list[StreamEffect]:
        return self._ask(now_ns) if self._move(verb) else []

    def _ask(self, now_ns: int) -> list[StreamEffect]:
        self._retry_ns = now_ns + RETRY_NS
        self._asked += 1
        return [AskSnapshot(topic=self.topic, ask=self._asked)]

    def _move(self, verb: str) -> bool:
        after = STREAM.get((self.state, verb))
        if after is None:
            return False
        self.state = after
        return True
