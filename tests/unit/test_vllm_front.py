"""The gateway in front of vLLM servers, over real sockets; the servers are fakes (tests/fake_vllm.py)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from pdbus.bus.errors import ConfigError
from pdbus.connector.vllm.pair import pair_of
from pdbus.nodes.gateway.endpoints import Endpoint
from pdbus.nodes.gateway.vllm.front import Front, app_of
from pdbus.nodes.gateway.vllm.legs import alone, legs, new_pair
from pdbus.nodes.gateway.vllm.servers import DOWN_NS, Server, Turns, prefill_servers

from tests.fake_vllm import FakeVllm, broken_off, failing, streamed

ASKED = {"model": "m", "prompt": "The sea is", "max_tokens": 40}


def run(test: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with AsyncExitStack() as stack:
            await test(stack)

    asyncio.run(asyncio.wait_for(inside(), 30))


async def front(stack: AsyncExitStack, prefill: list[str], decode: list[str], **more: Any) -> httpx.AsyncClient:
    """Someone who asks the gateway."""
    http = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
    named = [Server(url, f"p{i}" if len(prefill) > 1 else "") for i, url in enumerate(prefill)]
    app = app_of(Front(http, Turns(named), Turns([Server(url) for url in decode]), **more))
    return await stack.enter_async_context(
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=20)
    )


def url(server: FakeVllm) -> str:
    return f"http://127.0.0.1:{server.port}"


def nobody() -> str:
    """Where nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


# ---------------------------------------------------------------- what each is asked


def test_both_are_asked_the_same_prompt_under_one_pair() -> None:
    both = legs(ASKED, new_pair("p1"))
    assert both.prefill["prompt"] == both.decode["prompt"] == ASKED["prompt"]
    pair = pair_of(both.decode["kv_transfer_params"])
    assert pair is not None and pair == pair_of(both.prefill["kv_transfer_params"]) and pair.node == "p1"


def test_a_pair_is_never_given_twice() -> None:
    assert len({new_pair() for _ in range(100)}) == 100


def test_the_prefill_server_runs_one_step_whatever_shapes_the_answer() -> None:
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, "n": 3, "stop": ["."], "min_tokens": 9}
    both = legs(asked, new_pair())
    assert both.prefill == {
        "model": "m", "prompt": "The sea is", "max_tokens": 1, "stream": False,
        "kv_transfer_params": both.decode["kv_transfer_params"],
    }  # fmt: skip
    assert {key: both.decode[key] for key in asked} == asked


def test_what_clients_say_of_the_hand_off_is_dropped() -> None:
    stolen = {**ASKED, "kv_transfer_params": {"pdbus_pair": "0" * 32, "remote_host": "elsewhere"}}
    assert legs(stolen, "1" * 32).decode["kv_transfer_params"] == {"pdbus_pair": "1" * 32}
    assert "kv_transfer_params" not in alone(stolen)


# ---------------------------------------------------------------- who is asked


def test_servers_take_turns_and_one_that_is_down_is_the_last_resort() -> None:
    a, b = Server("http://a"), Server("http://b")
    turns = Turns([a, b])
    assert [turns.next(0) for _ in range(4)] == [a, b, a, b]
    turns.down(a, 0)
    assert [turns.next(1) for _ in range(2)] == [b, b]
    assert turns.next(1, tried={b}) == a
    assert turns.next(1, tried={a, b}) is None
    assert {turns.next(DOWN_NS) for _ in range(2)} == {a, b}


def test_several_prefill_servers_need_their_names() -> None:
    endpoints = [Endpoint("h", 1), Endpoint("h", 2)]
    assert [s.name for s in prefill_servers(endpoints, ["p1", "p2"])] == ["p1", "p2"]
    with pytest.raises(ConfigError, match=r"--prefiller-name.*1 for 2 prefill servers"):
        prefill_servers(endpoints, ["p1"])
    with pytest.raises(ConfigError, match="--prefiller-name"):
        prefill_servers(endpoints)
    with pytest.raises(ConfigError, match="--prefiller-name"):
        prefill_servers(endpoints, ["p1", "no good"])


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_is_the_decode_servers(path: str) -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        client = await front(stack, [url(p)], [url(d)])
        answer = await client.post(path, json=ASKED, headers={"authorization": "Bearer mine"})
        assert answer.status_code == 200 and answer.json() == {"choices": [{"text": "sea"}]}
        assert (p.asked, d.asked) == tuple([leg] for leg in legs(ASKED, d.asked[0]["kv_transfer_params"]["pdbus_pair"]))
        assert d.headers[0]["authorization"] == "Bearer mine"

    run(test)


def test_a_stream_comes_as_it_is() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = await stack.enter_async_context(FakeVllm()), await stack.enter_async_context(FakeVllm(streamed))
        answer = await (await front(stack, [url(p)], [url(d)])).post("/v1/completions", json={**ASKED, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert re.findall(r'"text": "(\w+)"', answer.text) == ["the", "sea"] and answer.text.endswith("[DONE]\n\n")

    run(test)


def test_what_is_wrong_with_a_request_the_decode_server_says() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm(failing(400))) for _ in range(2)]
        answer = await (await front(stack, [url(p)], [url(d)])).post("/v1/completions", json=ASKED)
        assert answer.status_code == 400 and answer.json() == {"error": {"message": "no"}} and len(d.asked) == 1

    run(test)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "one JSON object"),
        (b"{", "one JSON object"),
        (b"[]", "expected an object"),
        (b'{"a": "\xff"}', "one JSON object"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"temperature": NaN}', "temperature: NaN and infinity are no JSON numbers"),
        (b'{"top_p": 1e999}', "out of range"),
        (b'{"prompt": "\\ud800"}', "prompt: half of a surrogate pair is no text"),
    ],
)
def test_what_is_no_json_object_goes_to_nobody(body: bytes, problem: str) -> None:
    """Nor what could not be written as JSON again."""

    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        answer = await (await front(stack, [url(p)], [url(d)])).post("/v1/completions", content=body)
        assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
        assert not p.asked and not d.asked

    run(test)


def test_keys_of_the_gateways_own_go_no_further() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        client = await front(stack, [url(p)], [url(d)], keyed=True)
        await client.post("/v1/completions", json=ASKED, headers={"authorization": "Bearer mine"})
        assert "authorization" not in d.headers[0]

    run(test)


# ---------------------------------------------------------------- when one fails


@pytest.mark.parametrize("answer", [failing(500), failing(429), None], ids=["error", "full", "away"])
def test_another_prefill_server_is_tried(answer: Any) -> None:
    """And the decode server is asked anew."""

    async def test(stack: AsyncExitStack) -> None:
        bad = url(await stack.enter_async_context(FakeVllm(answer))) if answer else nobody()
        good, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        d.hold = asyncio.Event()
        client = await front(stack, [bad, url(good)], [url(d)])
        asking = asyncio.ensure_future(client.post("/v1/completions", json=ASKED))
        while not (again := await d.came.get())["kv_transfer_params"]["pdbus_pair"].endswith("@p1"):
            await d.left.wait()  # the first time: nobody must wait for KV that will not come
        d.hold.set()
        assert (await asking).status_code == 200
        assert good.asked == [legs(ASKED, again["kv_transfer_params"]["pdbus_pair"]).prefill]

    run(test)


def test_without_a_prefill_server_the_decode_server_computes_the_prompt() -> None:
    async def test(stack: AsyncExitStack) -> None:
        d = await stack.enter_async_context(FakeVllm())
        d.hold = asyncio.Event()
        client = await front(stack, [nobody()], [url(d)])
        asking = asyncio.ensure_future(client.post("/v1/completions", json=ASKED))
        while await d.came.get() != ASKED:
            pass
        d.hold.set()
        assert (await asking).status_code == 200

    run(test)


def test_another_decode_server_is_tried() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        answer = await (await front(stack, [url(p)], [nobody(), url(d)])).post("/v1/completions", json=ASKED)
        assert answer.status_code == 200 and len(d.asked) == 1

    run(test)


def test_without_a_decode_server_it_says_so() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p = await stack.enter_async_context(FakeVllm())
        client = await front(stack, [url(p)], [nobody(), nobody()])
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no decode server can be reached"
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models")).status_code == 503

    run(test)


def test_a_stream_that_breaks_off_ends_with_an_error_and_is_never_done() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = await stack.enter_async_context(FakeVllm()), await stack.enter_async_context(FakeVllm(broken_off))
        answer = await (await front(stack, [url(p)], [url(d)])).post("/v1/completions", json={**ASKED, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert "the" in events[0] and "[DONE]" not in answer.text
        assert "broke off" in json.loads(events[-1])["error"]["message"]

    run(test)


def test_a_client_that_leaves_stops_both() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        p.hold = d.hold = asyncio.Event()
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        app = app_of(Front(http, Turns([Server(url(p))]), Turns([Server(url(d))])))
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said.put_nowait({"type": "http.request", "body": json.dumps(ASKED).encode()})

        async def send(_: Any) -> None: ...

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": [],
            "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http", "server": ("g", 1),
        }  # fmt: skip
        serving = asyncio.ensure_future(app(scope, said.get, send))
        await p.came.get()
        await d.came.get()
        said.put_nowait({"type": "http.disconnect"})
        await asyncio.gather(p.left.wait(), d.left.wait(), serving)

    run(test)


def test_what_needs_no_prefill_is_passed_on() -> None:
    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        client = await front(stack, [url(p)], [nobody(), url(d)])
        assert (await client.get("/v1/models")).json() == {"data": [{"id": "m"}]}
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        assert not p.asked

    run(test)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/completions")])
def test_the_host_header_leads_to_no_other_path(method: str, path: str) -> None:
    """A URL that is made of it would: these servers have paths that stop and change them."""

    async def test(stack: AsyncExitStack) -> None:
        p, d = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        client = await front(stack, [url(p)], [url(d)])
        answer = await client.request(method, path, json=ASKED, headers={"host": "x/sleep?"})
        assert answer.status_code == 200  # there is no /sleep

    run(test)


def test_a_header_of_any_bytes_is_passed_on() -> None:
    async def test(stack: AsyncExitStack) -> None:
        said = "caf\u00c3\u00a9 \u00e2\u0082\u00ac"  # UTF-8, as headers are read

        def answers(_: dict[str, Any]) -> Response:
            return Response("{}", headers={"x-request-id": said}, media_type="application/json")

        p, d = [await stack.enter_async_context(FakeVllm(answers)) for _ in range(2)]
        client = await front(stack, [url(p)], [url(d)])
        answer = await client.post("/v1/completions", json=ASKED, headers={b"x-request-id": said.encode("latin-1")})
        assert answer.status_code == 200 and d.headers[0]["x-request-id"] == said
        assert dict(answer.headers.raw)[b"x-request-id"] == said.encode("latin-1")

    run(test)
