"""The endpoint over real sockets: answers go back where they came from, and no bytes can hurt it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import (
    Broken,
    Closed,
    ConfigError,
    DeadlineExceeded,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    RequestError,
)
from pdbus.bus.frames import MESSAGE_BYTES_MAX
from pdbus.bus.messages import Cancel, Cancelled, Error, Generate, Heartbeat, Status, StatusReply
from pdbus.bus.wire import FRAMES_MAX, Header, decode, encode

from tests.loop import on_loop, until
from tests.wire.first_frame import first_frame, parts

ANY_PORT = "tcp://127.0.0.1:0"


class Recorder:
    """An endpoint that keeps what it hears and answers status."""

    def __init__(self, name: str = "node") -> None:
        self.heard: list[Received] = []
        self.lost: list[str] = []
        self.endpoint = Endpoint(name, os.urandom(16), self.hear, on_link_lost=self.lost.append)

    def hear(self, received: Received) -> None:
        self.heard.append(received)
        if isinstance(received.message, Status):
            reply = StatusReply(status={"to": received.header.from_})
            self.endpoint.send(received.link, reply, cause=received.header.seq)


@contextmanager
def recorders(*names: str) -> Iterator[list[Recorder]]:
    made = [Recorder(name) for name in names]
    try:
        yield made
    finally:
        for recorder in made:
            recorder.endpoint.close()


class Stranger:
    """A bare DEALER that sends whatever it likes."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    async def answer(self) -> tuple[Header, Error]:
        await until(lambda: self.socket.poll(0))
        kind, header, body = parts(self.socket.recv())
        assert kind == b"pd1.error"
        return decode(header, Header), decode(body, Error)

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def stranger(address: str) -> Iterator[Stranger]:
    made = Stranger(address)
    try:
        yield made
    finally:
        made.close()


HEADER = encode(Header(from_="x", from_inc=b"i", seq=7))


# ---------------------------------------------------------------- asking and answering


@on_loop
async def test_a_request_gets_the_answer_that_names_it_as_its_cause() -> None:
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        first, second = await asyncio.gather(
            tool.endpoint.request(link, Status(), StatusReply, 5), tool.endpoint.request(link, Status(), StatusReply, 5)
        )
        assert first.status == second.status == {"to": "tool"}
        assert tool.heard == []


@on_loop
async def test_an_answer_goes_back_on_the_connection_that_asked() -> None:
    """Two links between the same two endpoints: an answer on the other one would reach nobody who waits."""
    with recorders("node", "tool") as (node, tool):
        address = node.endpoint.bind(ANY_PORT)
        links = [tool.endpoint.connect(address) for _ in range(3)]
        for link in links:
            tool.endpoint.send(link, Heartbeat())
        await until(lambda: len(node.heard) == 3)
        for received in node.heard:
            node.endpoint.send(received.link, Cancelled(client_id=received.link))
        await until(lambda: len(tool.heard) == 3)
        assert sorted(r.link for r in tool.heard) == sorted(links)
        assert len({r.link for r in node.heard}) == 3


@on_loop
async def test_seq_counts_each_connection_from_one() -> None:
    with recorders("node", "tool") as (node, tool):
        address = node.endpoint.bind(ANY_PORT)
        one, two = tool.endpoint.connect(address), tool.endpoint.connect(address)
        seqs = [tool.endpoint.send(link, Heartbeat()) for link in (one, two, one)]
        await until(lambda: len(node.heard) == 3)
        assert seqs == [1, 1, 2]


@on_loop
async def test_raw_frames_travel_beside_the_body() -> None:
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        tool.endpoint.send(link, Cancel(client_id="c"), (b"", b"\x00\xff", bytes(1 << 20)))
        await until(lambda: node.heard)
        assert node.heard[0].raw == (b"", b"\x00\xff", bytes(1 << 20))


@on_loop
async def test_an_incarnation_may_begin_with_a_zero_byte() -> None:
    """ZeroMQ reserves identities that begin with one: every 256th node could not have opened a link."""
    with recorders("node") as (node,):
        heard: list[Received] = []
        endpoint = Endpoint("zero", bytes(16), heard.append)
        link = endpoint.connect(node.endpoint.bind(ANY_PORT))
        assert await endpoint.request(link, Status(), StatusReply, 5)
        endpoint.close()


@on_loop
async def test_messages_in_a_burst_all_arrive_in_order() -> None:
    """ZeroMQ's descriptor tells only of changes: a reader that does not drain loses the rest until the next one."""
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        for i in range(1000):
            assert tool.endpoint.send(link, Cancel(client_id=str(i)))
        await until(lambda: len(node.heard) == 1000)
        assert [r.header.seq for r in node.heard] == list(range(1, 1001))


@on_loop
async def test_both_ends_sending_at_once_lose_nothing() -> None:
    """Sending takes in what the descriptor told of; without a look after each send, messages would lie unseen."""
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        tool.endpoint.send(link, Heartbeat())
        await until(lambda: node.heard)
        back = node.heard[0].link
        for _ in range(300):
            tool.endpoint.send(link, Heartbeat())
            node.endpoint.send(back, Heartbeat())
            await asyncio.sleep(0)
        await until(lambda: len(node.heard) == 301 and len(tool.heard) == 300)


@on_loop
async def test_an_error_answer_raises_what_it_stands_for() -> None:
    with recorders("tool") as (tool,):
        problems = [
            RequestError("no such model", param="model", code="model_not_found"),
            Overloaded("full", retry_after_ms=250),
            RemoteProtocolError("odd", field="x"),
        ]

        def refuse(received: Received) -> None:
            raise problems[received.header.seq - 1]

        node = Endpoint("node", os.urandom(16), refuse)
        link = tool.endpoint.connect(node.bind(ANY_PORT))
        with pytest.raises(RequestError, match="no such model") as request_error:
            await tool.endpoint.request(link, Status(), StatusReply, 5)
        assert (request_error.value.param, request_error.value.code) == ("model", "model_not_found")
        with pytest.raises(Overloaded) as overloaded:
            await tool.endpoint.request(link, Status(), StatusReply, 5)
        assert overloaded.value.retry_after_ms == 250
        with pytest.raises(RemoteProtocolError) as remote:
            await tool.endpoint.request(link, Status(), StatusReply, 5)
        assert (remote.value.kind, remote.value.field) == ("status", "x")
        node.close()


@on_loop
async def test_silence_is_a_deadline_and_a_closed_link_says_so() -> None:
    with recorders("tool") as (tool,):
        link = tool.endpoint.connect("tcp://127.0.0.1:1")
        with pytest.raises(DeadlineExceeded, match=r"status within 0\.05 s"):
            await tool.endpoint.request(link, Status(), StatusReply, 0.05)
        waiting = asyncio.create_task(tool.endpoint.request(link, Status(), StatusReply, 5))
        await asyncio.sleep(0)
        tool.endpoint.close_link(link)
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Broken):
            await tool.endpoint.request(link, Status(), StatusReply, 5)


@on_loop
async def test_a_bug_in_a_handler_ends_serve_and_not_the_reading() -> None:
    def broken(received: Received) -> None:
        if isinstance(received.message, Heartbeat):
            raise ZeroDivisionError("a bug")
        seen.append(received)

    seen: list[Received] = []
    with recorders("tool") as (tool,):
        node = Endpoint("node", os.urandom(16), broken)
        link = tool.endpoint.connect(node.bind(ANY_PORT))
        tool.endpoint.send(link, Heartbeat())
        tool.endpoint.send(link, Status())
        with pytest.raises(ZeroDivisionError):
            await node.serve()
        await until(lambda: seen)
        node.close()


# ---------------------------------------------------------------- any bytes


@pytest.mark.parametrize(
    ("frames", "kind", "field", "counter", "seq"),
    [
        ([first_frame(b"pd1.nonsense", HEADER, b"\x80")], "nonsense", "", "unknown_kind", 0),
        ([b"garbage"], "garbage", "", "unknown_kind", 0),
        ([b""], "", "", "unknown_kind", 0),
        ([b"\0"], "", "", "unknown_kind", 0),
        ([first_frame(b"pd1.\xff\xfe", HEADER, b"\x80")], "\\xff\\xfe", "", "unknown_kind", 0),
        ([b"pd2.cancel\0whatever", b"else"], "cancel", "", "other_major", 0),
        ([b"pd2.cancel"], "cancel", "", "other_major", 0),
        ([b"pd1.cancelled_", HEADER, b"\x80"], "cancelled_", "", "unknown_kind", 0),
        ([b"pd1.cancel", HEADER, b"\x80"], "cancel", "header", "bad_header", 0),
        ([b"pd1.cancel\0\0"], "cancel", "header", "bad_header", 0),
        ([b"pd1.cancel\0\0\x09" + HEADER[:8]], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", b"", b"\x80")], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", HEADER)], "cancel", "body", "bad_body", 7),
        ([first_frame(b"pd1.cancel", b"\xc1", b"\x80")], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", HEADER[:-1], b"\x80")], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", HEADER + b"\x80", b"\x80")], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", b"\x91" * 4000, b"\x80")], "cancel", "header", "bad_header", 0),
        ([first_frame(b"pd1.cancel", msgpack.packb({"from": 3}), b"\x80")], "cancel", "header.from", "bad_header", 0),
        ([first_frame(b"pd1.cancel", HEADER, msgpack.packb({"client_id": 3}))], "cancel", "client_id", "bad_body", 7),
        ([first_frame(b"pd1.cancel", HEADER, b"\x93")], "cancel", "body", "bad_body", 7),
        ([first_frame(b"pd1.cancel", HEADER, b"\x91" * 100_000)], "cancel", "body", "bad_body", 7),
        ([first_frame(b"pd1.cancel", HEADER, msgpack.packb({"client_id": "c"}) + b"\x80")],
         "cancel", "body", "bad_body", 7),
        ([first_frame(b"pd1.cancel", HEADER, msgpack.packb({"client_id": b"\xff"}))],
         "cancel", "client_id", "bad_body", 7),
        ([first_frame(b"pd1.generate", HEADER, msgpack.packb({"client_id": "c", "sampling": {"max_tokens": "many"}}))],
         "generate", "sampling.max_tokens", "bad_body", 7),
        ([first_frame(b"pd1.cancel", b"h" * 5000, b"\x80")], "cancel", "header", "oversize", 0),
        ([first_frame(b"pd1.cancel", HEADER, b"\x80"), *[b""] * FRAMES_MAX], "cancel", "raw", "too_many_frames", 0),
        ([first_frame(b"pd1.cancel", HEADER, b"\x80"), *[bytes(MESSAGE_BYTES_MAX // 4)] * 5],
         "cancel", "raw", "oversize", 7),
    ],
)  # fmt: skip
@on_loop
async def test_what_cannot_be_read_is_counted_and_answered_with_what_was_wrong(
    frames: list[bytes], kind: str, field: str, counter: str, seq: int
) -> None:
    with recorders("node") as (node,), stranger(node.endpoint.bind(ANY_PORT)) as other:
        other.socket.send_multipart(frames)
        header, error = await other.answer()
        assert (error.kind, error.field, error.code) == (kind, field, "protocol")
        assert header.cause == seq
        assert error.message
        assert getattr(node.endpoint.counters, counter) == 1
        assert node.heard == []


@on_loop
async def test_an_error_is_never_answered_with_an_error() -> None:
    """Two endpoints that answer each other's errors would never stop."""
    with recorders("node") as (node,), stranger(node.endpoint.bind(ANY_PORT)) as other:
        for frames in (
            [first_frame(b"pd1.error", HEADER, b"\xc1")],
            [first_frame(b"pd1.error", b"\xc1")],
            [b"pd1.error"],
            [b"pd9.error\0"],
        ):
            other.socket.send_multipart(frames)
        other.socket.send(first_frame(b"pd1.cancel", HEADER, encode(Cancel(client_id="after"))))
        await until(lambda: node.heard)
        assert node.endpoint.counters.errors_answered == 0
        assert node.endpoint.counters.bad_body + node.endpoint.counters.other_major == 2
        assert node.endpoint.counters.bad_header == 2


@on_loop
async def test_unknown_keys_are_ignored_and_missing_ones_take_their_defaults() -> None:
    with recorders("node") as (node,), stranger(node.endpoint.bind(ANY_PORT)) as other:
        body = msgpack.packb({"client_id": "c", "text": "t", "from_the_future": [1, {"a": 2}]})
        header = msgpack.packb({"from": "x", "from_inc": b"i", "colour": "red"})
        other.socket.send(first_frame(b"pd1.generate", header, body))
        await until(lambda: node.heard)
        assert node.heard[0].message == Generate(client_id="c", text="t")


@on_loop
async def test_a_frame_over_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    with recorders("node", "tool") as (node, tool):
        address = node.endpoint.bind(ANY_PORT)
        link = tool.endpoint.connect(address)
        with stranger(address) as other:
            other.socket.send(first_frame(b"pd1.cancel", HEADER, bytes(MESSAGE_BYTES_MAX + 1)))
            assert await tool.endpoint.request(link, Status(), StatusReply, 10)
        assert [r.header.from_ for r in node.heard] == ["tool"]


@on_loop
async def test_we_do_not_send_what_no_peer_would_accept() -> None:
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        with pytest.raises(LocalProtocolError, match="cancel"):
            tool.endpoint.send(link, Cancel(client_id="x"), [b""] * FRAMES_MAX)
        with pytest.raises(LocalProtocolError, match=str(MESSAGE_BYTES_MAX)):
            tool.endpoint.send(link, Cancel(client_id="x"), [bytes(MESSAGE_BYTES_MAX)])


def test_any_frames_at_all_leave_the_endpoint_serving() -> None:
    """Random frames, many of them almost right, then a request that must still be answered."""

    async def hear(messages: list[list[bytes]]) -> None:
        with recorders("node", "tool") as (node, tool):
            address = node.endpoint.bind(ANY_PORT)
            link = tool.endpoint.connect(address)
            with stranger(address) as other:
                for frames in messages:
                    other.socket.send_multipart(frames)
                await until(lambda: node.endpoint.counters.received >= len(messages))
                assert await tool.endpoint.request(link, Status(), StatusReply, 10)

    packed = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=8,
    ).map(msgpack.packb)
    part = st.one_of(st.binary(max_size=40), st.sampled_from([HEADER, b"\x80"]), packed)
    start = st.sampled_from([b"pd1.cancel", b"pd1.generate", b"pd1.error", b"pd1.hello", b"pd7.x"])
    frame = st.one_of(part, start, st.builds(first_frame, start, part, part))

    @settings(max_examples=25)
    @given(st.lists(st.lists(frame, min_size=1, max_size=5), min_size=1, max_size=20))
    def check(messages: list[list[bytes]]) -> None:
        on_loop(hear)(messages)

    check()


# ---------------------------------------------------------------- connections come and go


@on_loop
async def test_sending_to_a_peer_that_has_gone_is_counted_and_raises_nothing() -> None:
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        tool.endpoint.send(link, Heartbeat())
        await until(lambda: node.heard)
        back = node.heard[0].link
        tool.endpoint.close()
        await until(lambda: not node.endpoint.send(back, Heartbeat()))
        assert node.endpoint.counters.unsent == 1
        assert node.endpoint.send("no such link", Heartbeat()) == 0


@on_loop
async def test_a_cut_connection_is_told_and_remade() -> None:
    """A peer that dies and comes back on its port is reached again on the same link, without our doing."""
    with recorders("first", "second", "tool") as (first, second, tool):
        address = first.endpoint.bind(ANY_PORT)
        link = tool.endpoint.connect(address)
        await tool.endpoint.request(link, Status(), StatusReply, 5)
        first.endpoint.close()
        await until(lambda: tool.lost == [link])
        second.endpoint.bind(address)
        tool.endpoint.send(link, Cancel(client_id="again"))
        await until(lambda: second.heard)
        assert second.heard[0].header.from_ == "tool"


@on_loop
async def test_a_connection_that_comes_back_under_its_identity_takes_over() -> None:
    """After a cut that only one end has seen, the old connection would keep the name, and answers go nowhere."""
    with recorders("node") as (node,):
        address = node.endpoint.bind(ANY_PORT)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(2)]
        for i, socket in enumerate(sockets, 1):
            socket.identity = b"the same"
            socket.connect(address)
            socket.send(first_frame(b"pd1.status", HEADER, encode(Status())))
            await until(lambda i=i: len(node.heard) == i)  # type: ignore[misc]
        await until(lambda: sockets[1].poll(0))
        assert node.heard[0].link == node.heard[1].link
        context.destroy(linger=0)


@on_loop
async def test_a_taken_address_is_a_config_error_that_names_the_setting() -> None:
    with recorders("one", "two") as (one, two):
        address = one.endpoint.bind(ANY_PORT)
        with pytest.raises(ConfigError, match=f"--listen: cannot listen on {address}: Address already in use"):
            two.endpoint.bind(address)
        assert two.endpoint.bind(ANY_PORT) != address


@on_loop
async def test_an_address_that_is_none_is_a_config_error() -> None:
    with recorders("tool") as (tool,):
        for bad in ("tcp://", "nonsense", "tcp://127.0.0.1:99999", "http://x:1"):
            with pytest.raises(ConfigError, match="--join"):
                tool.endpoint.connect(bad, setting="--join")


@pytest.mark.parametrize("address", ["tcp://[::1]:0", "tcp://localhost:0", "tcp://127.0.0.1:0", "tcp://*:0"])
@on_loop
async def test_both_internet_protocols_are_spoken(address: str) -> None:
    with recorders("node", "tool") as (node, tool):
        real = node.endpoint.bind(address)
        assert "::ffff:" not in real
        link = tool.endpoint.connect(real.replace("[::]", "localhost").replace("0.0.0.0", "localhost"))
        assert await tool.endpoint.request(link, Status(), StatusReply, 5)


@on_loop
async def test_an_answer_that_has_come_is_heard_though_the_link_is_closed_before_its_waiter_runs() -> None:
    """On a busy machine both happen in one turn of the loop; it raised InvalidStateError."""
    with recorders("p") as (p,):
        loop, problems = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _, context: problems.append(context))

        def close_at_once(link: str, header: Header, message: object) -> None:
            if isinstance(message, StatusReply):
                loop.call_soon(asking.close_link, link)

        asking = Endpoint("d", os.urandom(16), lambda received: None, tap=close_at_once)
        link = asking.connect(p.endpoint.bind(ANY_PORT))
        assert (await asking.request(link, Status(), StatusReply, 5)).status == {"to": "d"}
        asking.close()
        assert problems == []


@on_loop
async def test_closing_leaves_no_descriptor() -> None:
    await asyncio.sleep(0)
    before = sorted(os.listdir("/proc/self/fd"))
    with recorders("node", "tool") as (node, tool):
        address = node.endpoint.bind(ANY_PORT)
        for _ in range(5):
            link = tool.endpoint.connect(address)
            await tool.endpoint.request(link, Status(), StatusReply, 5)
            tool.endpoint.close_link(link)
        tool.endpoint.connect(address)
        tool.endpoint.connect("tcp://127.0.0.1:1")
    assert sorted(os.listdir("/proc/self/fd")) == before


@on_loop
async def test_closing_a_link_frees_its_descriptors_while_the_endpoint_lives() -> None:
    with recorders("node", "tool") as (node, tool):
        address = node.endpoint.bind(ANY_PORT)

        async def cycle() -> int:
            link = tool.endpoint.connect(address)
            await tool.endpoint.request(link, Status(), StatusReply, 5)
            tool.endpoint.close_link(link)
            return len(os.listdir("/proc/self/fd"))

        first = [await cycle() for _ in range(5)][-1]
        later = [await cycle() for _ in range(20)]
        await until(lambda: len(os.listdir("/proc/self/fd")) <= first)
        assert min(later) <= first + 4


@on_loop
async def test_a_goodbye_leaves_before_a_lingering_close() -> None:
    with recorders("node", "tool") as (node, tool):
        link = tool.endpoint.connect(node.endpoint.bind(ANY_PORT))
        tool.endpoint.send(link, Cancel(client_id="goodbye"))
        tool.endpoint.close(linger_ms=2000)
        await until(lambda: node.heard)
