"""The client SDK against a scripted node over real sockets: streams, ends, cancels, and nodes that go away."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import pdbus.bus.client as client_module
from pdbus.bus import (
    Broken,
    Client,
    Closed,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    RequestError,
    Sampling,
    SyncClient,
)
from pdbus.bus.endpoint import Received
from pdbus.bus.generation import Conversation
from pdbus.bus.messages import Cancel, Credit, Error, Finished, Generate, Heartbeat, Hello
from pdbus.bus.wire import pack_u32, unpack_u32

from tests.fake_node import FakeNode, answer_words, silent
from tests.loop import on_loop, until


@asynccontextmanager
async def talking(node: FakeNode, **options: Any) -> AsyncIterator[Client]:
    """A client of `node`; both are closed at the end."""
    try:
        node.bind()
        async with Client(node.address, **options) as client:
            yield client
    finally:
        node.close()


def asked(node: FakeNode) -> Generate:
    return next(m for m in node.heard if isinstance(m, Generate))


# ---------------------------------------------------------------- the stream


@on_loop
async def test_the_answer_is_streamed_and_its_end_is_told() -> None:
    async with talking(FakeNode(answer_words(["Hel", "lo"]))) as client:
        generation = client.generate("Hi", max_tokens=2)
        assert [token.text async for token in generation] == ["Hel", "lo"]
        assert (generation.text, generation.tokens) == ("Hello", [0, 1])
        assert generation.finished is not None
        assert generation.finished.reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("text", "text"), ([{"role": "user", "content": "hi"}], "messages"), ([1, 2, 3], "tokens"), ([], "tokens")],
)
@on_loop
async def test_a_prompt_is_text_messages_or_token_ids(prompt: Any, field: str) -> None:
    node = FakeNode()
    async with talking(node) as client:
        await client.generate(prompt, model="m", deadline_ms=5).whole()
        message = asked(node)
        given = {f: getattr(message, f) for f in ("text", "messages", "tokens") if getattr(message, f) is not None}
        assert list(given) == [field]
        value = list(unpack_u32(given["tokens"])) if field == "tokens" else given[field]
        assert value == (tuple(prompt) if field == "messages" else prompt)
        assert (message.model, message.deadline_ms) == ("m", 5)


@on_loop
async def test_sampling_is_given_whole_or_as_options() -> None:
    node = FakeNode()
    async with talking(node) as client:
        await client.generate("x", max_tokens=3, stop=("a", "b"), temperature=1).whole()
        assert asked(node).sampling == Sampling(max_tokens=3, stop=("a", "b"), temperature=1.0)
        with pytest.raises(RequestError, match="not both"):
            client.generate("x", sampling=Sampling(), max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        (None, {}, "prompt"),
        ([1, "two"], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**32], {}, "prompt"),
        ([{"role": "user"}, 3], {}, "prompt"),
        ("x", {"max_token": 3}, "max_token"),
        ("x", {"max_tokens": "three"}, "max_tokens"),
        ("x", {"stop": (1,)}, "stop[0]"),
        ("x", {"seed": object()}, "seed"),
        ("x", {"seed": 2**65}, "seed"),
        ("x", {"stop": ("\ud800",)}, "stop"),
        ("x", {"model": 5}, "model"),
        ("x", {"deadline_ms": 1.5}, "deadline_ms"),
        (5, {}, "prompt"),
        (b"abcd", {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ("x" * (17 << 20), {}, "prompt"),
        ([{"role": "user", "content": object()}], {}, "messages"),
        ([{1: "user"}], {}, "messages[0]"),
    ],
)
@on_loop
async def test_what_no_node_would_take_is_refused_here_naming_the_parameter(
    prompt: Any, options: dict[str, Any], param: str
) -> None:
    async with talking(FakeNode()) as client:
        with pytest.raises(RequestError) as error:
            client.generate(prompt, **options)
        assert error.value.param == param


@on_loop
async def test_many_generations_share_one_connection() -> None:
    node = FakeNode(lambda node, r: node.tokens(r, 0, [r.message.text or ""]) or node.finish(r))  # type: ignore[func-returns-value,union-attr]
    async with talking(node) as client:
        texts = await asyncio.gather(*(client.generate(f"prompt {i}").whole() for i in range(50)))
        assert texts == [f"prompt {i}" for i in range(50)]
        assert node.count(Hello) == 1


@on_loop
async def test_a_generation_starts_when_it_is_made_not_when_it_is_read() -> None:
    node = FakeNode()
    async with talking(node) as client:
        generation = client.generate("x")
        await until(lambda: node.count(Generate))
        await generation.whole()


@on_loop
async def test_credit_is_given_as_tokens_are_read_and_not_before() -> None:
    node = FakeNode(answer_words([f"{i}" for i in range(16)]))
    async with talking(node, credit=8) as client:
        generation = client.generate("x")
        await until(lambda: node.count(Generate))
        assert asked(node).credit == 8
        for _ in range(2):
            await anext(generation)
        # the end is here already, but a node that is still speaking would hear of it
    slow = FakeNode(lambda node, r: node.tokens(r, 0, list("abcdefgh")))
    async with talking(slow, credit=8) as client:
        generation = client.generate("x")
        for _ in range(4):
            await anext(generation)
        await client.status()
        assert [m.index for m in slow.heard if isinstance(m, Credit)] == [2, 4]


@on_loop
async def test_doubled_tokens_are_read_once_and_lost_ones_are_an_error() -> None:
    """A hole must never be handed out as an answer."""

    def stutter(node: FakeNode, received: Received) -> None:
        node.tokens(received, 0, ["a", "b"])
        node.tokens(received, 1, ["b"])
        node.tokens(received, 3, ["d"])

    async with talking(FakeNode(stutter)) as client:
        generation = client.generate("x")
        with pytest.raises(Broken, match="tokens 2 to 3 of the answer were lost"):
            await generation.whole()
        assert generation.text == "ab"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "kind"),
    [("context_length_exceeded", RequestError), ("overloaded", Overloaded), ("deadline", DeadlineExceeded)],
)
@on_loop
async def test_a_finish_with_an_error_raises_it_after_the_tokens(code: str, kind: type[Exception]) -> None:
    def fail(node: FakeNode, received: Received) -> None:
        node.tokens(received, 0, ["a"])
        node.finish(received, "error", error=Error(message="no", code=code, field="prompt", retry_after_ms=5))

    async with talking(FakeNode(fail)) as client:
        generation = client.generate("x")
        assert (await anext(generation)).text == "a"
        with pytest.raises(kind, match="no"):
            await anext(generation)


@pytest.mark.parametrize("named", [True, False])
@on_loop
async def test_an_error_answer_ends_the_generation_that_it_names_or_answers(named: bool) -> None:
    def refuse(node: FakeNode, received: Received) -> None:
        assert isinstance(received.message, Generate)
        client_id = received.message.client_id if named else ""
        node.tell(received, Error(message="bad", code="bad_code", field="sampling.top_p", client_id=client_id))

    async with talking(FakeNode(refuse)) as client:
        other = client.generate("x")
        with pytest.raises(RequestError) as error:
            await client.generate("y").whole()
        assert (error.value.code, error.value.param) == ("bad_code", "sampling.top_p")
        with pytest.raises(RequestError):
            await other.whole()


@on_loop
async def test_a_node_that_forbids_even_heartbeats_ends_what_runs_there() -> None:
    """Its key was revoked, and the word of it got lost: what is answered so is no sign of life."""

    def forbid(node: FakeNode, received: Received) -> None:
        node.tokens(received, 0, ["so"])
        error = Error(message="this key is not allowed here", code="forbidden", kind="heartbeat")
        node.endpoint.send(received.link, error, cause=received.header.seq + 1)

    async with talking(FakeNode(forbid)) as client:
        generation = client.generate("x", max_tokens=9)
        with pytest.raises(RequestError, match="this key is not allowed here") as raised:
            await generation.whole()
        assert raised.value.code == "forbidden"


@on_loop
async def test_nobody_at_the_address_is_a_deadline_that_names_it() -> None:
    with pytest.raises(DeadlineExceeded, match=r"no node answered at tcp://127\.0\.0\.1:1 within 0\.05 s"):
        async with Client("tcp://127.0.0.1:1", timeout_s=0.05):
            pass


@pytest.mark.parametrize("address", ["", "127.0.0.1:7400", "http://127.0.0.1:7400", "tcp://:1"])
def test_an_address_that_is_none_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address: must be like tcp://host:port"):
        Client(address)


@on_loop
async def test_a_client_that_is_not_open_says_so() -> None:
    client = Client("tcp://127.0.0.1:1")
    with pytest.raises(Closed, match="async with"):
        await client.status()
    with pytest.raises(Closed, match="async with"):
        await client.generate("x").whole()


# ---------------------------------------------------------------- cancelling


@on_loop
async def test_cancel_tells_the_node_and_how_it_ended() -> None:
    node = FakeNode(lambda node, r: node.tokens(r, 0, ["a", "b"]))
    async with talking(node) as client:
        generation = client.generate("x")
        await anext(generation)
        finished = await generation.cancel()
        assert finished.reason == "cancelled"
        assert [token async for token in generation] == []
        assert generation.finished == finished


@on_loop
async def test_cancelling_what_has_ended_changes_nothing() -> None:
    node = FakeNode()
    async with talking(node) as client:
        generation = client.generate("x")
        await generation.whole()
        assert (await generation.cancel()).reason == "stop"
        await client.status()
        assert node.count(Cancel) == 0


@on_loop
async def test_cancelling_the_task_that_waits_cancels_at_the_node() -> None:
    node = FakeNode(silent)
    async with talking(node) as client:
        task = asyncio.create_task(client.generate("x").whole())
        await until(lambda: node.count(Generate))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: node.count(Cancel) == 1)


@on_loop
async def test_leaving_an_async_with_early_cancels_at_the_node() -> None:
    node = FakeNode(lambda node, r: node.tokens(r, 0, ["a"]))
    async with talking(node) as client:
        async with client.generate("x") as generation:
            async for _ in generation:
                break
        await until(lambda: node.count(Cancel) == 1)


@on_loop
async def test_closing_the_client_cancels_what_runs() -> None:
    """A script that ends must not leave its node computing."""
    node = FakeNode(silent)
    node.bind()
    try:
        async with Client(node.address) as client:
            generation = client.generate("x")
            await until(lambda: node.count(Generate))
        await until(lambda: node.count(Cancel) == 1)
        with pytest.raises(Closed):
            await generation.whole()
    finally:
        node.close()


@on_loop
async def test_tokens_that_nobody_reads_any_more_are_answered_with_a_cancel() -> None:
    node = FakeNode(silent)
    async with talking(node) as client:
        first: list[Received] = []
        node._on_generate = lambda _, received: first.append(received)
        generation = client.generate("x")
        await until(lambda: first)
        await generation.cancel()
        cancels = node.count(Cancel)
        node.tokens(first[0], 0, ["late"])
        await until(lambda: node.count(Cancel) == cancels + 1)


# ---------------------------------------------------------------- nodes that go away


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon."""
    monkeypatch.setattr(client_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(client_module, "SILENCE_S", 0.3)


@pytest.mark.usefixtures("quick")
@on_loop
async def test_a_node_that_computes_for_long_but_answers_pings_is_waited_for() -> None:
    node = FakeNode(silent)
    async with talking(node) as client:
        generation = client.generate("x")
        await until(lambda: node.count(Heartbeat) >= 10)
        assert (await generation.cancel()).reason == "cancelled"


@pytest.mark.usefixtures("quick")
@on_loop
async def test_a_node_that_falls_silent_is_an_error_that_names_it() -> None:
    node = FakeNode(silent, name="d1")
    async with talking(node) as client:
        generation = client.generate("x")
        await until(lambda: node.count(Generate))
        node.deaf = True
        with pytest.raises(Broken, match=rf"d1 at {node.address} has been silent for"):
            await generation.whole()


@pytest.mark.usefixtures("quick")
@on_loop
async def test_a_pause_of_our_own_is_not_the_nodes_silence() -> None:
    """A script that computes between tokens without awaiting would lose its answer."""
    node = FakeNode(silent)
    async with talking(node) as client:
        generation = client.generate("x")
        await until(lambda: node.count(Generate))
        time.sleep(0.6)  # noqa: ASYNC251
        assert (await generation.cancel()).reason == "cancelled"


@on_loop
async def test_a_node_that_says_goodbye_ends_what_ran_there() -> None:
    node = FakeNode(FakeNode.leave)
    async with talking(node) as client:
        with pytest.raises(Broken, match="has left: shutdown"):
            await client.generate("x").whole()


@on_loop
async def test_a_node_restarted_in_mid_answer_is_an_error_and_serves_the_next_one() -> None:
    """Its successor knows nothing of the old requests: waiting for their tokens would never end."""
    first = FakeNode(silent)
    first.bind()
    async with Client(first.address) as client:
        generation = client.generate("x")
        await until(lambda: first.count(Generate))
        first.close()
        second = FakeNode()
        second.bind(first.address)
        with pytest.raises(Broken, match="was restarted"):
            await generation.whole()
        assert await client.generate("y").whole() == "hello world"
        second.close()


@on_loop
async def test_a_node_restarted_while_idle_serves_the_next_request() -> None:
    first = FakeNode(name="one")
    first.bind()
    async with Client(first.address) as client:
        assert (await client.status())["name"] == "one"
        first.close()
        await until(lambda: client._node is None)
        second = FakeNode(name="two")
        second.bind(first.address)
        assert await client.generate("y").whole() == "hello world"
        assert (await client.status())["name"] == "two"
        second.close()


@on_loop
async def test_a_silent_node_is_a_deadline_for_a_tool_too() -> None:
    node = FakeNode()
    async with talking(node, timeout_s=0.1) as client:
        node.deaf = True
        with pytest.raises(DeadlineExceeded, match=rf"{node.address}: no answer to status within 0\.1 s"):
            await client.status()


# ---------------------------------------------------------------- tools, plain code, leaks


@on_loop
async def test_connect_gives_one_outcome_for_each_address() -> None:
    async with talking(FakeNode()) as client:
        outcomes = await client.connect(["tcp://a:1", "tcp://b:1"])
        assert [(o.target, o.ok) for o in outcomes] == [("tcp://a:1", True), ("tcp://b:1", True)]


@on_loop
async def test_a_closed_client_leaves_no_descriptor_and_no_task() -> None:
    node = FakeNode()
    node.bind()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with Client(node.address) as client:
            await client.generate("x").whole()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
    assert len(asyncio.all_tasks()) == 1
    node.close()


@contextmanager
def node_in_thread(make: Any) -> Iterator[FakeNode]:
    """A FakeNode on a loop of its own, for code that has none."""
    ready, box = threading.Event(), {}

    async def live() -> None:
        node = box["node"] = make()
        node.bind()
        box["stop"], box["loop"] = asyncio.Event(), asyncio.get_running_loop()
        ready.set()
        await box["stop"].wait()
        node.close()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    ready.wait()
    try:
        yield box["node"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join()


def test_plain_code_can_do_the_same() -> None:
    with node_in_thread(FakeNode) as node, SyncClient(node.address) as client:
        generation = client.generate("Hi", max_tokens=2)
        assert [token.text for token in generation] == ["hello", " world"]
        assert generation.finished is not None
        assert isinstance(generation.finished, Finished)
        assert client.status() == {"name": "fake"}
        assert client.generate("x").whole() == "hello world"
        assert client.generate([1]).tokens == []


def test_plain_code_can_cancel_and_gets_errors_raised() -> None:
    with node_in_thread(lambda: FakeNode(silent)) as node, SyncClient(node.address) as client:
        assert client.generate("x").cancel().reason == "cancelled"
        with pytest.raises(RequestError):
            client.generate("x", nonsense=1)
        with client.generate("x"):
            pass
    with pytest.raises(Closed):
        client.status()
    with pytest.raises(DeadlineExceeded), SyncClient("tcp://127.0.0.1:1", timeout_s=0.05):
        pass
    assert not [t for t in threading.enumerate() if t.name == "pdbus-client"]


def test_token_ids_travel_as_u32() -> None:
    assert list(unpack_u32(pack_u32([0, 4294967295]))) == [0, 4294967295]


@pytest.mark.parametrize("client", [Client, SyncClient])
@pytest.mark.parametrize("address", [None, 7400, b"tcp://127.0.0.1:7400", "", "127.0.0.1:7400"], ids=str)
def test_what_is_no_address_is_said_so(client: Any, address: Any) -> None:
    with pytest.raises(ConfigError, match=r"address: must be .*like tcp://host:port"):
        client(address)


@pytest.mark.parametrize("timeout_s", [None, "5", 0, -1, True, float("nan"), float("inf")], ids=str)
def test_a_time_out_is_a_number_of_seconds(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s: must be a number of seconds above 0"):
        SyncClient("tcp://127.0.0.1:7400", timeout_s=timeout_s)


@pytest.mark.parametrize("call", [Client.connect, Client.disconnect])
@pytest.mark.parametrize("values", ["tcp://127.0.0.1:7400", None, [3]], ids=str)
def test_one_text_is_no_list_of_texts(call: Any, values: Any) -> None:
    @on_loop
    async def scene() -> None:
        with pytest.raises(RequestError, match=r"give a list of texts|3 is no text"):
            await call(Client("tcp://127.0.0.1:7400"), values)

    scene()


def test_true_is_no_token_id() -> None:
    with pytest.raises(RequestError, match="a list of token ids from 0 to 4294967295") as raised:
        Client("tcp://127.0.0.1:7400").generate([1, True])
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("conversation", "param"),
    [(Conversation("hi"), "messages"), (Conversation([{"role": "user"}], ["f"]), "tools")],  # type: ignore[arg-type,list-item]
)
def test_a_conversation_is_of_messages_and_tools(conversation: Conversation, param: str) -> None:
    with pytest.raises(RequestError, match="must be a list of maps") as raised:
        Client("tcp://127.0.0.1:7400").generate(conversation)
    assert raised.value.param == param


# ---------------------------------------------------------------- whether the node can be reached


@on_loop
async def test_what_was_said_before_a_cut_does_not_make_the_node_reachable_again() -> None:
    """It is still read after the cut; only an answer to what was asked since tells that somebody is there."""
    asked_for: list[Received] = []
    changes: list[bool] = []
    node = FakeNode(lambda _, received: asked_for.append(received))
    async with talking(node, on_change=lambda: changes.append(True)) as client:
        generation = client.generate("Hi", max_tokens=2)
        await until(lambda: asked_for)
        node.deaf = True
        client.link_lost()
        node.tokens(asked_for[0], 0, ["late"])
        assert (await anext(aiter(generation))).text == "late"
        assert not client.reachable
        node.deaf = False
        await client.status()
        assert client.reachable
        assert len(changes) == 3, "greeted, cut, heard again"
