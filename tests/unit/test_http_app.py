"""The HTTP app over a fake client: OpenAI's answers, errors as OpenAI's error object, cancels, health, peers."""

from __future__ import annotations

import asyncio
import gc
import http.server
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from pdbus.bus.errors import Broken, DeadlineExceeded, Overloaded, PdError, RequestError
from pdbus.bus.messages import Error, TokenLogprob
from pdbus.nodes.http.app import create_app
from pdbus.nodes.http.stream import BODY_BYTES_MAX

from tests.fake_client import REQUEST, STATUS, FakeClient, finished, token

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
SCORE = TokenLogprob(logprob=-0.5, top=((100, -0.5), (7, -2.0)))


@asynccontextmanager
async def serving(client: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(client, http="http://127.0.0.1:8080")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
        yield web


def call(client: FakeClient, method: str, path: str, **options: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        async with serving(client) as web:
            return await web.request(method, path, **options)

    return asyncio.run(once())


def post(client: FakeClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return call(client, "POST", path, json=body)


def events(response: httpx.Response) -> list[Any]:
    """The stream's events, [DONE] as that string."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return body["error"]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- whole answers


def test_completion_whole() -> None:
    response = post(FakeClient(), "/v1/completions", PROMPT)
    body = response.json()
    assert response.status_code == 200
    assert body["id"] == f"cmpl-{REQUEST.hex()}"
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["created"] > 1_600_000_000
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_chat_whole() -> None:
    body = post(FakeClient([token(0, "x"), finished("length")]), "/v1/chat/completions", CHAT).json()
    assert body["id"] == f"chatcmpl-{REQUEST.hex()}"
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "x", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_timeline_is_in_milliseconds_and_bytes() -> None:
    times = post(FakeClient(), "/v1/completions", PROMPT).json()["pd_timeline"]
    assert times["remote"] is True
    assert times["prefill_node"] == "p0"
    assert times["ttft_ms"] == 1.5
    assert times["read_bytes"] == 4096
    assert not [name for name in times if name.endswith("_ns")]


def test_token_ids_on_request() -> None:
    body = post(FakeClient(), "/v1/completions", {**PROMPT, "return_token_ids": True}).json()
    assert body["choices"][0]["token_ids"] == [100, 101]


def test_completion_logprobs() -> None:
    script = [
        token(0, "é", logprob=SCORE, pieces=("é".encode(), "é".encode(), b"e")),
        token(1, "bc", logprob=TokenLogprob(logprob=-1.0)),
        token(2, "d", logprob=TokenLogprob(logprob=-1.0)),
        finished(),
    ]
    body = post(FakeClient(script), "/v1/completions", {**PROMPT, "logprobs": 2}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["é", "token_id:101", "token_id:102"],
        "token_logprobs": [-0.5, -1.0, -1.0],
        "top_logprobs": [{"é": -0.5, "e": -2.0}, {}, {}],
        "text_offset": [0, 1, 3],
    }


def test_chat_logprobs() -> None:
    script = [token(0, "é", logprob=SCORE, pieces=("é".encode(), "é".encode(), b"e")), finished()]
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    body = post(FakeClient(script), "/v1/chat/completions", asked).json()
    chosen = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    other = {"token": "e", "logprob": -2.0, "bytes": [101]}
    assert body["choices"][0]["logprobs"]["content"] == [{**chosen, "top_logprobs": [chosen, other]}]


def test_impossible_tokens_have_a_finite_logprob() -> None:
    """JSON has no minus infinity: it would arrive as null, which no client takes for a number."""
    script = [token(0, "a", logprob=TokenLogprob(logprob=float("-inf"))), finished()]
    body = post(FakeClient(script), "/v1/completions", {**PROMPT, "logprobs": 0}).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_the_node_gets_what_was_asked() -> None:
    client = FakeClient()
    post(client, "/v1/completions", {"prompt": [1, 2], "max_tokens": 3, "model": "tiny"})
    [(prompt, sampling)] = client.asked
    assert prompt == [1, 2]
    assert sampling.max_tokens == 3


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
def test_a_request_may_ask_for_more_time_than_the_default(path: str, body: dict[str, Any]) -> None:
    client = FakeClient()
    post(client, path, body)
    post(client, path, {**body, "deadline_ms": 3_600_000})
    assert client.deadlines_ms == [300_000, 3_600_000]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
def test_requests_that_give_no_deadline_have_the_servers(path: str, body: dict[str, Any]) -> None:
    """OpenAI's clients cannot give one: what takes longer than five minutes would never be answered."""
    client = FakeClient()

    async def asked() -> None:
        transport = httpx.ASGITransport(create_app(client, deadline_ms=900_000))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
            await web.post(path, json=body)
            await web.post(path, json={**body, "deadline_ms": 50})

    asyncio.run(asked())
    assert client.deadlines_ms == [900_000, 50]


def test_a_long_prompt_is_not_sent_many_times_over() -> None:
    """8 MiB with n 128 was a GiB on its way to one node."""
    client = FakeClient()
    refused = post(client, "/v1/completions", {"prompt": "x" * (1 << 20), "n": 128})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "n")
    assert client.deadlines_ms == []


# ---------------------------------------------------------------- tokens


def test_text_and_conversations_become_tokens_and_tokens_text() -> None:
    client = FakeClient()
    said = post(client, "/tokenize", {"prompt": "hi"}).json()
    assert said == {"count": 2, "max_model_len": 128, "tokens": [104, 105]}
    chat = post(client, "/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False}).json()
    assert post(client, "/detokenize", {"tokens": chat["tokens"]}).json() == {"prompt": "user> hi\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": "a" * 200}, "prompt"),  # longer than the context
        ("/detokenize", {"tokens": [1, 256]}, "tokens[1]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(path: str, body: dict[str, Any], param: str) -> None:
    assert error(post(FakeClient(), path, body))["param"] == param


# ---------------------------------------------------------------- several choices


def test_several_answers_to_several_prompts() -> None:
    client = FakeClient()
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7}
    answer = post(client, "/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"Hello"}
    assert [(prompt, sampling.seed) for prompt, sampling in client.asked] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]
    assert answer["choices"][3]["pd_timeline"]["ttft_ms"] == 1.5


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    used = post(FakeClient(), "/v1/completions", {"prompt": ["a", "b"], "n": 3}).json()["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (10, 12, 22)
    assert used["prompt_tokens_details"] == {"cached_tokens": 8}


def test_without_a_seed_the_node_draws_one_for_each() -> None:
    client = FakeClient()
    post(client, "/v1/chat/completions", {**CHAT, "n": 3})
    assert [sampling.seed for _, sampling in client.asked] == [0, 0, 0]


def test_chunks_of_all_choices_share_one_stream_and_its_end() -> None:
    body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(post(FakeClient(), "/v1/chat/completions", body))
    assert done == "[DONE]" and len({chunk["id"] for chunk in [*chunks, last]}) == 1
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine][-1] == "stop"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


def test_one_choice_that_fails_ends_all() -> None:
    client = FakeClient((token(0, "Hel"), Broken("the node is gone")))
    answer = post(client, "/v1/chat/completions", {**CHAT, "n": 3})
    assert error(answer)["message"] == "the node is gone"
    assert len(client.generations) == 3


# ---------------------------------------------------------------- streams


def test_completion_stream() -> None:
    response = post(FakeClient(), "/v1/completions", {**PROMPT, "stream": True})
    first, second, last, done = events(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert first["id"] == last["id"] == f"cmpl-{REQUEST.hex()}"
    assert first["object"] == "text_completion"
    assert [chunk["choices"][0]["text"] for chunk in (first, second, last)] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, second, last)] == [None, None, "stop"]
    assert last["pd_timeline"]["ttft_ms"] == 1.5
    assert "usage" not in first
    assert done == "[DONE]"


def test_chat_stream_opens_with_the_role() -> None:
    role, first, second, last, done = events(post(FakeClient(), "/v1/chat/completions", {**CHAT, "stream": True}))
    assert role["object"] == "chat.completion.chunk"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in (first, second)] == [{"content": "Hel"}, {"content": "lo"}]
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert done == "[DONE]"


def test_stream_usage_is_a_chunk_of_its_own() -> None:
    asked = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(post(FakeClient(), "/v1/completions", asked))
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert done == "[DONE]"


def test_stream_without_any_token_still_ends_well() -> None:
    """A stop string at the very start leaves no text."""
    last, done = events(post(FakeClient([finished()]), "/v1/completions", {**PROMPT, "stream": True}))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_stream_that_breaks_ends_with_an_error_and_without_done() -> None:
    client = FakeClient([token(0, "a"), Broken("the worker died")])
    chunk, last = events(post(client, "/v1/completions", {**PROMPT, "stream": True}))
    assert chunk["choices"][0]["text"] == "a"
    assert last["error"]["message"] == "the worker died"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_stream_that_the_node_gives_up_is_no_good_end(reason: str) -> None:
    client = FakeClient([token(0, "a"), finished(reason)])
    _, last = events(post(client, "/v1/completions", {**PROMPT, "stream": True}))
    assert "before its answer was complete" in last["error"]["message"]


# ---------------------------------------------------------------- errors

NODE_ERRORS: list[tuple[PdError, int, str, str]] = [
    (RequestError("max_tokens: too many", param="max_tokens"), 400, "invalid_request_error", "invalid_request"),
    (RequestError("model: no", param="model", code="model_not_found"), 404, "invalid_request_error", "model_not_found"),
    (Overloaded("no room", retry_after_ms=1500), 429, "overloaded_error", "overloaded"),
    (DeadlineExceeded("too late"), 504, "timeout_error", "deadline_exceeded"),
    (Broken("the worker died"), 503, "unavailable_error", "unavailable"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("raised", "status", "kind", "code"), NODE_ERRORS)
def test_the_node_s_refusal_has_a_status(raised: PdError, status: int, kind: str, code: str, stream: bool) -> None:
    """A streamed request too: nothing is sent before the first token."""
    response = post(FakeClient([raised]), "/v1/completions", {**PROMPT, "stream": stream})
    assert response.status_code == status
    assert error(response) == {
        "message": str(raised),
        "type": kind,
        "param": getattr(raised, "param", None),
        "code": code,
    }


def test_overload_says_when_to_come_back() -> None:
    response = post(FakeClient([Overloaded("no room", retry_after_ms=1500)]), "/v1/completions", PROMPT)
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1500"


def test_an_end_with_an_error_has_that_error_s_status() -> None:
    end = finished("error", error=Error(message="no room", code="overloaded", retry_after_ms=10))
    response = post(FakeClient([end]), "/v1/completions", PROMPT)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


def test_unknown_model_is_404() -> None:
    client = FakeClient()
    response = post(client, "/v1/chat/completions", {**CHAT, "model": "gpt-9"})
    assert response.status_code == 404
    assert error(response)["param"] == "model"
    assert error(response)["code"] == "model_not_found"
    assert "'tiny'" in error(response)["message"]
    assert client.asked == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/add_remote_prefill_eps"])
@pytest.mark.parametrize("content", [b"{", b"", b'{"a":"\xff"}', b"[1]", b'{"no_such_field": 1}'])
def test_bad_bodies_are_400(path: str, content: bytes) -> None:
    client = FakeClient()
    response = call(client, "POST", path, content=content)
    assert response.status_code == 400
    assert error(response)["type"] == "invalid_request_error"
    assert client.asked == []


def test_what_a_client_sent_is_quoted_in_part_only() -> None:
    """An unknown field's name may be megabytes long."""
    response = post(FakeClient(), "/v1/completions", {"x" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.content) < 3000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_the_content_type_does_not_matter(kind: str) -> None:
    response = call(FakeClient(), "POST", "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
    assert response.status_code == 200


def test_a_huge_body_is_413() -> None:
    client = FakeClient()
    response = post(client, "/v1/completions", {"prompt": "x" * BODY_BYTES_MAX})
    assert response.status_code == 413
    assert error(response)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"
    assert client.asked == []


def test_a_body_just_under_the_limit_is_served() -> None:
    assert post(FakeClient(), "/v1/completions", {"prompt": "x" * (BODY_BYTES_MAX - 100)}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/remove_remote_prefill_eps"])
def test_get_where_post_is_meant_is_405(path: str) -> None:
    response = call(FakeClient(), "GET", path)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error(response)["message"] == f"{path} takes POST, not GET"


def test_unknown_path_is_404() -> None:
    response = call(FakeClient(), "GET", "/v2/completions")
    assert response.status_code == 404
    assert "/v2/completions" in error(response)["message"]


def test_a_bug_of_ours_is_500_without_a_traceback() -> None:
    response = post(FakeClient([ZeroDivisionError("secret")]), "/v1/completions", PROMPT)
    assert response.status_code == 500
    assert error(response)["type"] == "internal_error"
    assert "secret" not in response.text


# ---------------------------------------------------------------- clients that leave


class LeavingClient:
    """Speaks ASGI to the app, so that it can leave in the middle of an answer."""

    def __init__(self, client: FakeClient, body: dict[str, Any]) -> None:
        self._app = create_app(client)  # type: ignore[arg-type]
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[Any] = []

    def run(self) -> Coroutine[Any, Any, None]:
        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        return self._app(scope, self._inbox.get, send)

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (token(0, "a"),)], ids=["before the first token", "after it"])
def test_a_client_that_leaves_cancels_at_the_node(stream: bool, before: tuple[Any, ...]) -> None:
    async def scene() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        client = FakeClient([*before, asyncio.Event(), finished()])
        web = LeavingClient(client, {**PROMPT, "stream": stream})
        async with asyncio.TaskGroup() as group:
            group.create_task(web.run())
            await client.waiting.wait()
            web.leave()
        assert client.generations[0].cancelled.is_set()
        assert b"[DONE]" not in b"".join(message.get("body", b"") for message in web.sent)
        gc.collect()
        assert complaints == [], "a client that leaves is nothing for the log"

    asyncio.run(scene())


def test_a_good_end_cancels_nothing() -> None:
    client = FakeClient()
    post(client, "/v1/completions", {**PROMPT, "stream": True})
    assert not client.generations[0].cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (token(0, "a"),)], ids=["before the first token", "after it"])
def test_a_server_that_ends_tells_client_and_node(stream: bool, before: tuple[Any, ...]) -> None:
    """uvicorn cancels the tasks that outlast its grace. A stream that has begun ends in an error event."""

    async def scene() -> None:
        client = FakeClient([*before, asyncio.Event(), finished()])
        web = LeavingClient(client, {**PROMPT, "stream": stream})
        task = asyncio.ensure_future(web.run())
        await client.waiting.wait()
        task.cancel()
        await task
        assert client.generations[0].cancelled.is_set()
        assert web.sent[0]["status"] == (200 if stream and before else 503)
        body = b"".join(message.get("body", b"") for message in web.sent)
        assert b"told to stop" in body and b"[DONE]" not in body

    asyncio.run(scene())


# ---------------------------------------------------------------- health, models, metrics, info


def test_live_does_not_ask_the_node() -> None:
    client = FakeClient()
    client.says = Broken("gone")
    assert call(client, "GET", "/health/live").status_code == 200


def test_ready() -> None:
    assert call(FakeClient(), "GET", "/health/ready").json() == {"status": "ready", "name": "decode-0"}


def test_not_ready_gives_the_reasons() -> None:
    client = FakeClient()
    client.says = {**STATUS, "ready": False, "not_ready": ["the worker is loading"]}
    response = call(client, "GET", "/health/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "not ready", "reasons": ["the worker is loading"]}


def test_a_node_that_does_not_answer_is_not_ready() -> None:
    client = FakeClient()
    client.says = Broken("no answer")
    response = call(client, "GET", "/health/ready")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["no answer"]


def test_models() -> None:
    body = call(FakeClient(), "GET", "/v1/models").json()
    assert body["object"] == "list"
    [model] = body["data"]
    assert model["id"] == "tiny" and model["object"] == "model" and model["max_model_len"] == 128


def test_a_model_by_its_id() -> None:
    """As OpenAI's own client asks for it; an id may have slashes in it."""
    client = FakeClient()
    client.says = {**STATUS, "model": "org/tiny"}
    [listed] = call(client, "GET", "/v1/models").json()["data"]
    assert call(client, "GET", "/v1/models/org/tiny").json() == listed
    assert call(client, "GET", "/v1/models/org%2Ftiny").json() == listed
    other = call(client, "GET", "/v1/models/gpt-9")
    assert other.status_code == 404
    assert error(other)["code"] == "model_not_found"


def test_metrics_count_requests_and_pass_the_node_s_numbers_on() -> None:
    async def scene() -> str:
        async with serving(FakeClient()) as web:
            await web.post("/v1/completions", json=PROMPT)
            await web.get("/no/such/path")
            return (await web.get("/metrics")).text

    lines = asyncio.run(scene()).splitlines()
    assert 'pdbus_http_requests_total{method="POST",path="/v1/completions",status="200"} 1.0' in lines
    assert 'pdbus_http_requests_total{method="GET",path="other",status="404"} 1.0' in lines
    assert "pdbus_http_first_token_seconds_count 1.0" in lines
    assert "pdbus_blocks_free 7.0" in lines
    assert "pdbus_requests_total 3.0" in lines
    assert "pdbus_node_up 1.0" in lines
    assert "pdbus_http_in_flight 1.0" in lines, "the scrape itself"


def test_metrics_without_the_node() -> None:
    client = FakeClient()
    client.says = Broken("gone")
    response = call(client, "GET", "/metrics")
    assert response.status_code == 200
    assert "pdbus_node_up 0.0" in response.text


def test_info() -> None:
    assert call(FakeClient(), "GET", "/pd/info").json() == {
        "name": "decode-0",
        "address": "tcp://127.0.0.1:7400",
        "incarnation": "ab" * 16,
        "role": "decode",
        "model": "tiny",
        "public_key": "",
        "http": "http://127.0.0.1:8080",
    }


# ---------------------------------------------------------------- prefill endpoints


@contextmanager
def endpoint(answer: bytes, status: int = 200) -> Iterator[str]:
    """An HTTP server that says `answer` to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


INFO = {"name": "p0", "address": "tcp://127.0.0.1:7500", "role": "prefill", "incarnation": "cd"}


def endpoint_of(**changes: Any) -> Any:
    return endpoint(json.dumps({**INFO, **changes}).encode())


def add(client: FakeClient, *endpoints: str) -> list[dict[str, Any]]:
    response = post(client, "/add_remote_prefill_eps", {"endpoints": list(endpoints)})
    assert response.status_code == 200
    return response.json()["results"]  # type: ignore[no-any-return]


def test_add_asks_the_endpoint_and_connects_to_its_bus_address() -> None:
    client = FakeClient()
    with endpoint_of() as url:
        assert add(client, url + "/") == [{"endpoint": url, "ok": True, "name": "p0", "detail": ""}]
    assert client.commands == [("connect", "tcp://127.0.0.1:7500")]


@pytest.mark.parametrize("path", ["/add_remote_prefill_eps", "/remove_remote_prefill_eps"])
def test_no_web_page_says_which_nodes_compute_prompts(path: str) -> None:
    """A browser sends what any page asks of 127.0.0.1, as text and without asking first; with it, whose page it is."""
    client, body = FakeClient(), b'{"endpoints": ["http://127.0.0.1:1"]}'
    headers = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}
    response = call(client, "POST", path, content=body, headers=headers)
    assert response.status_code == 403 and error(response)["code"] == "forbidden"


def test_list_and_remove_by_endpoint() -> None:
    """The endpoint need not answer any more to be removed."""
    client = FakeClient()

    async def scene() -> tuple[Any, Any, Any]:
        async with serving(client) as web:
            with endpoint_of() as url:
                await web.post("/add_remote_prefill_eps", json={"endpoints": [url]})
            listed = (await web.get("/remote_prefill_eps")).json()
            assert (await web.get("/add_remote_prefill_eps")).json() == listed
            removed = (await web.post("/remove_remote_prefill_eps", json={"endpoints": [url]})).json()
            return url, listed, removed

    url, listed, removed = asyncio.run(scene())
    assert listed == {"endpoints": [{"endpoint": url, **STATUS["peers"][0]}]}
    assert removed["results"] == [{"endpoint": url, "ok": True, "name": "p0", "detail": ""}]
    assert client.commands[-1] == ("disconnect", INFO["address"])


def test_remove_takes_a_name_too() -> None:
    client = FakeClient()
    post(client, "/remove_remote_prefill_eps", {"endpoints": ["p0"]})
    assert client.commands == [("disconnect", "p0")]


@pytest.mark.parametrize("state", ["removing", "removed", "up"])
def test_a_decode_node_that_was_removed_can_be_added_again(state: str) -> None:
    """It can be removed, by its name; nothing else about it is for this path."""
    client = FakeClient()
    client.says = {**STATUS, "peers": [{"name": "d1", "role": "decode", "state": state, "address": "tcp://d:1"}]}
    with endpoint_of(name="d1", role="decode") as url:
        (result,) = add(client, url)
    assert result["ok"] is (state != "up")
    assert client.commands == ([] if state == "up" else [("connect", INFO["address"])])


def test_what_is_asked_while_an_endpoint_is_looked_up_comes_after_it() -> None:
    """A removal that overtook the adding before it would end with the endpoint added."""
    client = FakeClient()

    async def scene() -> None:
        looked_up, answer = asyncio.Event(), asyncio.Event()

        async def info(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            looked_up.set()
            await answer.wait()
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(INFO).encode())
            writer.close()

        server = await asyncio.start_server(info, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, serving(client) as web, asyncio.TaskGroup() as group:
            group.create_task(web.post("/add_remote_prefill_eps", json={"endpoints": [url]}))
            await looked_up.wait()
            group.create_task(web.post("/remove_remote_prefill_eps", json={"endpoints": ["p0"]}))
            for _ in range(20):
                await asyncio.sleep(0)
            assert client.commands == []
            answer.set()

    asyncio.run(scene())
    assert client.commands == [("connect", INFO["address"]), ("disconnect", "p0")]


STRANGERS = [
    (b"<html>hi</html>", 200, "is no pdbus node"),
    (b'{"hello": 1}', 200, "is no pdbus node"),
    (b'{"name": "x", "address": 7}', 200, "is no pdbus node"),
    (b"", 404, "answered 404"),
    (json.dumps({**INFO, "role": "decode"}).encode(), 200, "is no prefill node"),
    (json.dumps({**INFO, "address": ""}).encode(), 200, "no bus address"),
]


@pytest.mark.parametrize(("answer", "status", "detail"), STRANGERS)
def test_an_endpoint_that_is_no_prefill_node_is_said_so(answer: bytes, status: int, detail: str) -> None:
    client = FakeClient()
    with endpoint(answer, status) as url:
        [result] = add(client, url)
    assert not result["ok"]
    assert detail in result["detail"]
    assert client.commands == []


NO_ADDRESS = [
    "127.0.0.1:8090", "ftp://x", "http://", "http://[::1", "http://127.0.0.1:99999", "http://a b", "", "http://a..b:1",
    f"http://{'x' * 64}:1",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_ADDRESS)
def test_what_is_no_address_is_said_so(url: str) -> None:
    [result] = add(FakeClient(), url)
    assert not result["ok"]
    assert result["endpoint"] == url
    assert result["detail"] == "must be like http://host:port"


def test_https_where_plain_http_is_spoken_is_said_so() -> None:
    with endpoint_of() as url:
        [result] = add(FakeClient(), url.replace("http:", "https:"))
    assert result["detail"] == "cannot be reached: it does not speak TLS there; give http:// if it speaks plain HTTP"


def test_a_port_that_speaks_something_else_is_said_so() -> None:
    """Giving the bus port instead of the HTTP port is the likeliest mistake; ZeroMQ greets with binary."""

    async def scene() -> Any:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff" + bytes(8) + b"\x7f")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, serving(FakeClient()) as web:
            return (await web.post("/add_remote_prefill_eps", json={"endpoints": [url]})).json()

    [result] = asyncio.run(scene())["results"]
    assert "give the node's HTTP address, or join it over the bus" in result["detail"]


def test_a_bus_address_is_no_endpoint() -> None:
    [result] = add(FakeClient(), "tcp://127.0.0.1:7400")
    assert result["detail"].startswith("is a bus address; give the node's HTTP address")


def test_the_list_shows_an_endpoint_that_refused_us() -> None:
    """It is called again by itself: whoever added it wants to see why it does not come."""
    refused = {
        "name": "",
        "role": "",
        "address": INFO["address"],
        "state": "refused",
        "detail": "block_size 16 against 32",
    }

    async def scene() -> Any:
        client = FakeClient()
        client.says = {**STATUS, "peers": [refused]}
        async with serving(client) as web:
            with endpoint_of() as url:
                await web.post("/add_remote_prefill_eps", json={"endpoints": [url]})
                return url, (await web.get("/remote_prefill_eps")).json()["endpoints"]

    url, listed = asyncio.run(scene())
    assert listed == [{"endpoint": url, **refused}]


@pytest.mark.parametrize("known", [True, False])
def test_an_endpoint_that_says_to_be_another_node_is_refused(known: bool) -> None:
    """Whether the node that is really there is a member already, or says hello when it is called."""

    async def scene() -> Any:
        client = FakeClient()
        there = STATUS["peers"][0] if known else {**STATUS["peers"][0], "address": "tcp://127.0.0.1:1"}
        client.says = {**STATUS, "peers": [there]}
        client.connected = "p0"
        async with serving(client) as web:
            with endpoint_of(name="zz") as url:
                [result] = (await web.post("/add_remote_prefill_eps", json={"endpoints": [url]})).json()["results"]
                return url, result, (await web.get("/remote_prefill_eps")).json()["endpoints"], client.commands

    url, result, (listed,), commands = asyncio.run(scene())
    assert result["detail"] == f"says that it is zz at {INFO['address']}, but that is p0" and not result["ok"]
    assert listed["endpoint"] != url
    assert commands == ([] if known else [("connect", INFO["address"])])


def test_a_silent_port_does_not_keep_the_others_from_joining() -> None:
    client = FakeClient()
    with endpoint_of() as url:
        dead, good = add(client, "http://127.0.0.1:9", url)
    assert (dead["ok"], dead["detail"]) == (False, "cannot be reached: Connection refused")
    assert good["ok"]


@pytest.mark.parametrize("endpoints", [[], ["http://x"] * 257, "http://x", [1]])
def test_a_bad_list_of_endpoints_is_400(endpoints: Any) -> None:
    response = post(FakeClient(), "/add_remote_prefill_eps", {"endpoints": endpoints})
    assert response.status_code == 400
    assert error(response)["param"].startswith("endpoints")


FIT = "this node's engine or tokenizer cannot follow a JSON schema"
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("param", "path", "body", "named"),
    [
        ("json_schema", "chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("json_schema", "chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("prompt_logprobs", "completions", {**PROMPT, "echo": True, "logprobs": 1}, "logprobs"),
        ("prompt_logprobs", "completions", {"prompt": [1, 2], "echo": True}, "echo"),
        ("max_tokens", "chat/completions", {**CHAT, "max_tokens": 5}, "max_tokens"),
        ("max_tokens", "chat/completions", {**CHAT, "max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_nodes_refusal_names_the_field_that_the_client_wrote(
    param: str, path: str, body: dict[str, Any], named: str, stream: bool
) -> None:
    refusal = RequestError(f"{param}: {FIT}", param=param)
    response = post(FakeClient([refusal]), f"/v1/{path}", {**body, "stream": stream})
    assert response.status_code == 400
    assert (error(response)["param"], error(response)["message"]) == (named, f"{named}: {FIT}")


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/v1/models/", "//evil.example/v1/completions/"])
def test_a_slash_too_many_is_another_path(path: str) -> None:
    """A redirect would lead where the caller's Host header says."""
    response = call(FakeClient(), "GET", f"http://node{path}", follow_redirects=False)
    assert response.status_code == 404
    assert error(response)["code"] == "not_found"
