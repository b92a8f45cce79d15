"""Published events over real sockets: filtered by topic, numbered, and whole again after a hole."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import zmq

from pdbus.bus import Client, DeadlineExceeded, RequestError, SyncClient
from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import EventsSnapshot, Published
from pdbus.bus.publisher import Publisher, Subscriber
from pdbus.bus.wire import Header, encode

from tests.fake_node import FakeNode
from tests.loop import on_loop, until
from tests.wire.first_frame import first_frame

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
    bad_body = first_frame(b"pd1.published", encode(Header(from_="n", from_inc=b"i")), b"\xc1")
    for frames in ([b"x"], [b"", b"", b"", b""], [b"t", bad_body], [b"t"] * 30):
        socket.send_multipart(frames)
    await until(lambda: subscriber.unreadable == 4)
    assert heard == []
    subscriber.close()
    context.destroy(linger=0)


@on_loop
@pytest.mark.parametrize(("count", "size"), [(400, 1000), (1, 5000)], ids=["many", "long"])
async def test_subscriptions_that_a_node_cannot_keep_cut_their_sender_off(count: int, size: int) -> None:
    """ZeroMQ keeps some 50 bytes for each byte of a topic. Others come back by themselves."""
    heard: list[Published] = []
    publisher = Publisher("n", os.urandom(16))
    address = publisher.bind(ANY_PORT)
    subscriber = Subscriber(address, ["ping"], lambda h, p: heard.append(p))
    await until(ready(publisher, heard))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hostile = context.socket(zmq.XSUB)
    cut = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    hostile.connect(address)
    for _ in range(count):
        hostile.send(b"\x01" + os.urandom(size))
    await until(lambda: cut.poll(0))
    hostile.disable_monitor()
    context.destroy(linger=0)
    heard.clear()
    await until(ready(publisher, heard))
    subscriber.close()
    publisher.close()


@on_loop
async def test_who_leaves_makes_room_for_others() -> None:
    publisher = Publisher("n", os.urandom(16))
    address = publisher.bind(ANY_PORT)
    for _ in range(5):
        subscriber = Subscriber(address, [os.urandom(1000).hex() for _ in range(50)], lambda h, p: None)
        await until(subscriber.in_force.is_set)
        subscriber.close()
        await until(lambda: publisher._subscribed_bytes == 0)
    publisher.close()


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
    node.publisher.provide("kv", lambda: dict(state))

    def put(value: int) -> None:
        state["v"] = value
        node.publisher.publish("kv", "put", {"v": value})

    put(1)
    async with Client(node.address) as client, client.subscribe(["kv@fake"]) as events:
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
    node.publisher.provide("kv", lambda: {"all": node.publisher._sequences.get("kv@fake", 0)})
    async with Client(node.address) as client, client.subscribe(["kv@fake"]) as events:
        assert (await anext(events)).event == "snapshot"
        await until(ready(node.publisher, events._queue, "kv"))
        await until(lambda: events._streams["kv@fake"].sequence == node.publisher._sequences["kv@fake"])
        while events._queue:
            await anext(events)
        node.publisher._sequences["kv@fake"] += 5  # as if five had been lost on the way
        node.publisher.publish("kv", "after", {})
        mended = await anext(events)
        assert mended.event == "snapshot"
        assert mended.data["all"] == node.publisher._sequences["kv@fake"]
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
        events = client.subscribe(["kv@fake"])
        await events.__aenter__()
        await until(ready(node.publisher, events._queue, "kv"))
    events._queue.clear()
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    node.close()


@on_loop
async def test_what_happens_after_entering_is_not_missed() -> None:
    """A SUB socket connects in the background: entering waits until the publisher knows the subscription."""
    node = FakeNode()
    node.bind()
    async with Client(node.address) as client:
        for i in range(20):
            async with client.subscribe(["request@fake"]) as events:
                node.publisher.publish("request", "arrived", {"i": i})
                assert (await anext(events)).data == {"i": i}
    node.close()


@on_loop
async def test_what_happens_after_subscribe_returned_is_not_missed_without_asyncio() -> None:
    node = FakeNode()
    node.bind()
    client = SyncClient(node.address)
    await asyncio.to_thread(client.__enter__)
    for topics in (["request@fake"], [""]):
        events = await asyncio.to_thread(client.subscribe, topics)
        node.publisher.publish("request", "arrived", {"topics": topics})
        assert (await asyncio.to_thread(next, events)).data == {"topics": topics}
        await asyncio.to_thread(events.close)
    await asyncio.to_thread(client.close)
    events.close()
    node.close()


@on_loop
async def test_the_marks_of_others_are_no_events() -> None:
    """Who follows all topics gets what the publisher answers to every other subscriber."""
    node = FakeNode()
    node.bind()
    async with Client(node.address) as client, client.subscribe() as everything:
        async with client.subscribe(["request"]):
            node.publisher.publish("request", "arrived")
            assert (await anext(everything)).event == "arrived"
        assert everything._subscriber is not None and everything._subscriber.unreadable == 0
    node.close()


@on_loop
async def test_a_publisher_that_does_not_answer_is_named() -> None:
    node = FakeNode()
    node.bind()
    node.events = "tcp://127.0.0.1:9"
    async with Client(node.address, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match=r"fake at tcp://127.0.0.1:9 did not answer a subscription"):
            await client.subscribe().__aenter__()
    node.close()


BAD_TOPICS: list[tuple[Any, str]] = [
    (["foo"], "fake publishes nothing on 'foo'; there are kv@fake, lease@fake, node@fake, request@fake"),
    (["request@other"], "fake publishes nothing on 'request@other'"),
    (["request@fake", "node.load"], "fake publishes nothing on 'node.load'"),
    ("request", "give a list of texts, got 'request'"),
    (None, "give a list of texts, got None"),
    ([3], "3 is no text"),
    ([], "give at least one"),
]


@pytest.mark.parametrize(("topics", "problem"), BAD_TOPICS, ids=str)
def test_a_topic_that_would_stay_silent_is_refused(topics: Any, problem: str) -> None:
    @on_loop
    async def scene() -> None:
        node = FakeNode()
        node.bind()
        async with Client(node.address) as client:
            with pytest.raises(RequestError) as raised:
                await client.subscribe(topics).__aenter__()
            assert raised.value.param == "topics"
            assert problem in str(raised.value)
        node.close()

    scene()
