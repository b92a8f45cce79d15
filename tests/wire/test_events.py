"""Published events over real sockets: filtered by topic, numbered, and whole again after a hole."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import zmq

from pdbus.bus import Client, RequestError
from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import EventsSnapshot, Published
from pdbus.bus.publisher import Publisher, Subscriber
from pdbus.bus.wire import Header

from tests.fake_node import FakeNode
from tests.loop import on_loop, until

ANY_PORT = "tcp://127.0.0.1:0"


def ready(publisher: Publisher, heard: list[Any], group: str = "ping") -> Any:
    """Publishes until something is heard: what is said before the subscription has arrived is lost."""

    def look() -> bool:
        publisher.publish(group, "ping")
        return bool(heard)

    return look


@on_loop
async def test_topics_are_filtered_by_their_first_characters_and_numbered_each_from_one() -> None:
    heard: list[tuple[Header, Published]] = []
    publisher = Publisher("n", os.urandom(16))
    subscriber = Subscriber(publisher.bind(ANY_PORT), ["load", "ping"], lambda h, p: heard.append((h, p)))
    await until(ready(publisher, heard))
    heard.clear()
    publisher.publish("request", "finished")
    assert [publisher.publish("load", "now", {"v": i}) for i in (1, 2)] == [1, 2]
    await until(lambda: len([h for h, p in heard if p.topic == "load@n"]) == 2)
    loads = [(h.seq, h.from_inc == publisher._incarnation, p) for h, p in heard if p.topic == "load@n"]
    assert loads == [(i, True, Published(topic="load@n", event="now", data={"v": i})) for i in (1, 2)]
    assert not [p for _, p in heard if p.topic.startswith("request")]
    subscriber.close()
    publisher.close()


@on_loop
async def test_a_subscriber_survives_any_bytes() -> None:
    heard: list[Published] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.XPUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}", [""], lambda h, p: heard.append(p))
    await until(lambda: socket.poll(0))
    for frames in ([b"x"], [b"", b"", b"", b""], [b"t", b"pd1.published", b"\xc1", b"\xc1"], [b"t"] * 30):
        socket.send_multipart(frames)
    await until(lambda: subscriber.unreadable == 4)
    assert heard == []
    subscriber.close()
    context.destroy(linger=0)


@on_loop
async def test_a_taken_events_address_is_a_config_error() -> None:
    one, two = Publisher("a", b"1"), Publisher("b", b"2")
    address = one.bind(ANY_PORT)
    with pytest.raises(ConfigError, match="--events: cannot listen on"):
        two.bind(address)
    one.close()
    two.close()


def test_a_topic_without_a_snapshot_is_a_request_error() -> None:
    publisher = Publisher("n", b"1")
    with pytest.raises(RequestError, match="no snapshots of 'load@n'"):
        publisher.snapshot(EventsSnapshot(topic="load@n"))
    publisher.close()


def test_a_snapshot_says_up_to_which_event_it_goes() -> None:
    publisher = Publisher("n", b"1")
    publisher.provide("load", lambda: {"v": 2})
    publisher.publish("load", "now")
    publisher.publish("load", "now")
    reply = publisher.snapshot(EventsSnapshot(topic="load@n"))
    assert (reply.sequence, reply.state) == (2, {"v": 2})
    publisher.close()


@on_loop
async def test_a_subscription_begins_with_the_state_and_goes_on_with_what_is_newer() -> None:
    node = FakeNode()
    node.bind()
    state = {"v": 0}
    node.publisher.provide("load", lambda: dict(state))

    def put(value: int) -> None:
        state["v"] = value
        node.publisher.publish("load", "put", {"v": value})

    put(1)
    async with Client(node.address) as client, client.subscribe(["load@fake"]) as events:
        first = await anext(events)
        assert (first.event, first.data) == ("snapshot", {"v": 1})
        copy, value = first.data["v"], 1
        while copy < 20:
            value += 1
            put(value)
            await asyncio.sleep(0.001)
            while events._queue:
                copy = (await anext(events)).data["v"]
        assert copy == value
    node.close()


@on_loop
async def test_a_hole_is_mended_by_a_snapshot() -> None:
    """A slow subscriber loses events silently; it must see that it has."""
    node = FakeNode()
    node.bind()
    node.publisher.provide("load", lambda: {"all": node.publisher._sequences.get("load@fake", 0)})
    async with Client(node.address) as client, client.subscribe(["load@fake"]) as events:
        assert (await anext(events)).event == "snapshot"
        await until(ready(node.publisher, events._queue, "load"))
        await until(lambda: events._streams["load@fake"].sequence == node.publisher._sequences["load@fake"])
        while events._queue:
            await anext(events)
        node.publisher._sequences["load@fake"] += 5  # as if five had been lost on the way
        node.publisher.publish("load", "after", {})
        mended = await anext(events)
        assert mended.event == "snapshot"
        assert mended.data["all"] == node.publisher._sequences["load@fake"]
    node.close()


@on_loop
async def test_a_topic_without_snapshots_is_followed_as_it_comes() -> None:
    node = FakeNode()
    node.bind()
    async with Client(node.address) as client, client.subscribe(["request"]) as events:
        await until(ready(node.publisher, events._queue, "request"))
        assert (await anext(events)).topic == "request@fake"
    node.close()


@on_loop
async def test_closing_a_subscription_ends_the_iteration_and_leaves_no_descriptor() -> None:
    node = FakeNode()
    node.bind()
    async with Client(node.address) as client:
        before = len(os.listdir("/proc/self/fd"))
        events = client.subscribe([""])
        reading = asyncio.create_task(anext(events, None))  # type: ignore[arg-type]
        await until(lambda: events._subscriber is not None)
        await events.aclose()
        assert await reading is None
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert len(asyncio.all_tasks()) == 1
    node.close()


@on_loop
async def test_a_subscription_ends_with_its_client() -> None:
    node = FakeNode()
    node.bind()
    client = Client(node.address)
    async with client:
        events = client.subscribe(["load@fake"])
        await events.__aenter__()
        await until(ready(node.publisher, events._queue, "load"))
    events._queue.clear()
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    node.close()
