"""Following events over a channel that loses, doubles and reorders them, of a publisher that restarts."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.messages import Published
from pdbus.bus.stream import (
    Apply,
    AskSnapshot,
    EventCame,
    EventStream,
    NoSnapshots,
    Reset,
    SnapshotCame,
    StreamEffect,
    StreamState,
    StreamTick,
    Subscribed,
)

S = 1_000_000_000


class Publisher:
    """The truth: a map that events change, one life after the other."""

    def __init__(self) -> None:
        self.life = 1
        self.sequence = 0
        self.state: dict[str, int] = {}

    def restart(self) -> None:
        self.life += 1
        self.sequence = 0
        self.state = {}

    def put(self, key: str, value: int) -> EventCame:
        self.sequence += 1
        self.state[key] = value
        return self.came(Published(topic="t", event="put", data={"key": key, "value": value}))

    def came(self, event: Published) -> EventCame:
        return EventCame(incarnation=bytes([self.life]), sequence=self.sequence, event=event)

    def snapshot(self, ask: int) -> SnapshotCame:
        return SnapshotCame(
            ask=ask, incarnation=bytes([self.life]), sequence=self.sequence, state={"map": dict(self.state)}
        )


class Follower:
    """A consumer that keeps a copy."""

    def __init__(self) -> None:
        self.stream = EventStream("t")
        self.copy: dict[str, int] = {}
        self.asks: list[int] = []
        self.resets = 0

    def handle(self, effects: list[StreamEffect]) -> None:
        for effect in effects:
            match effect:
                case AskSnapshot():
                    self.asks.append(effect.ask)
                case Reset():
                    self.resets += 1
                    self.copy = dict(effect.state["map"])
                case Apply():
                    self.copy[effect.event.data["key"]] = effect.event.data["value"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 99)),
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 99)),
        st.tuples(st.just("restart"), st.just(""), st.just(0)),
        st.tuples(st.just("answer"), st.just(""), st.just(0)),
        st.tuples(st.just("late answer"), st.just(""), st.just(0)),
        st.tuples(st.just("tick"), st.just(""), st.integers(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(steps, st.integers(0, 2**16), st.floats(0, 0.6), st.floats(0, 0.4), st.floats(0, 0.5))
def test_once_the_channel_is_good_again_the_copy_equals_the_truth(
    script: list[tuple[str, str, int]], seed: int, loss: float, doubling: float, reordering: float
) -> None:
    chance = random.Random(seed)
    truth, follower, now = Publisher(), Follower(), 0
    held: list[EventCame] = []  # overtaken by later ones
    answers: list[SnapshotCame] = []  # made at some time, delivered at another
    follower.handle(follower.stream.handle(Subscribed(), now))

    def deliver(event: EventCame) -> None:
        follower.handle(follower.stream.handle(event, now))

    for what, key, value in script:
        if what == "put":
            event = truth.put(key, value)
            if chance.random() < loss:
                continue
            if chance.random() < reordering:
                held.append(event)
                continue
            deliver(event)
            if chance.random() < doubling:
                deliver(event)
            if held and chance.random() < 0.5:
                deliver(held.pop(chance.randrange(len(held))))
        elif what == "restart":
            truth.restart()
        elif what == "answer" and follower.asks:
            answers.append(truth.snapshot(follower.asks[-1]))
        elif what == "late answer" and answers:
            answer = answers.pop(0)
            follower.handle(follower.stream.handle(answer, now))
        elif what == "tick":
            now += value * S
            follower.handle(follower.stream.handle(StreamTick(), now))
    for _ in range(3):  # from now on nothing is lost, and time passes
        deliver(truth.put("last", now))
        now += 3 * S
        follower.handle(follower.stream.handle(StreamTick(), now))
        if follower.stream.state is StreamState.SYNCING:
            follower.handle(follower.stream.handle(truth.snapshot(follower.asks[-1]), now))
    assert follower.copy == truth.state
    assert follower.stream.state is StreamState.LIVE


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=20))
def test_a_good_channel_needs_one_snapshot_only(values: list[int]) -> None:
    truth, follower = Publisher(), Follower()
    follower.handle(follower.stream.handle(Subscribed(), 0))
    follower.handle(follower.stream.handle(truth.snapshot(follower.asks[-1]), 0))
    for value in values:
        follower.handle(follower.stream.handle(truth.put("k", value), 0))
        assert follower.copy == truth.state
    assert (len(follower.asks), follower.resets) == (1, 1)


def test_events_that_overtake_the_snapshot_are_applied_after_it_and_only_those() -> None:
    truth, follower = Publisher(), Follower()
    follower.handle(follower.stream.handle(Subscribed(), 0))
    early = truth.put("a", 1)
    answer = truth.snapshot(follower.asks[-1])
    newer = truth.put("a", 2)
    effects: list[StreamEffect] = []
    for event in (early, newer, answer):
        effects += follower.stream.handle(event, 0)
    assert [type(e).__name__ for e in effects] == ["Reset", "Apply"]


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    follower = Follower()
    follower.handle(follower.stream.handle(Subscribed(), 0))
    due = follower.stream.next_deadline()
    assert due is not None
    follower.handle(follower.stream.handle(StreamTick(), due - 1))
    assert follower.asks == [1]
    follower.handle(follower.stream.handle(StreamTick(), due))
    assert follower.asks == [1, 2]


def test_the_answer_to_an_earlier_question_no_longer_counts() -> None:
    """It may come from a life that has ended since, and would make the present one look like the old."""
    truth, follower = Publisher(), Follower()
    follower.handle(follower.stream.handle(Subscribed(), 0))
    follower.handle(follower.stream.handle(truth.put("a", 1), 0))
    late = truth.snapshot(follower.asks[-1])
    truth.restart()
    follower.handle(follower.stream.handle(truth.put("a", 2), 0))
    assert follower.stream.handle(late, 0) == []
    follower.handle(follower.stream.handle(truth.snapshot(follower.asks[-1]), 0))
    follower.handle(follower.stream.handle(truth.put("a", 3), 0))
    assert follower.copy == {"a": 3}


def test_a_topic_without_snapshots_is_followed_from_what_comes_first() -> None:
    truth, follower = Publisher(), Follower()
    truth.put("missed", 0)
    follower.handle(follower.stream.handle(truth.put("a", 1), 0))
    follower.handle(follower.stream.handle(NoSnapshots(ask=follower.asks[-1]), 0))
    follower.handle(follower.stream.handle(truth.put("b", 2), 0))
    assert follower.copy == {"a": 1, "b": 2}
