"""Whatever comes in is told in one clear message that names what is at fault, and nothing else is disturbed."""

from __future__ import annotations

import contextlib
import http.server
import math
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq

from pdbus.bus import wire
from pdbus.bus.client import Client
from pdbus.bus.endpoint import Endpoint
from pdbus.bus.errors import RemoteProtocolError, RequestError
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Goodbye, PrefillAccepted, PrefillRequest, Sampling, TryId, Welcome
from pdbus.nodes.node_process import NodeProcess

from .conftest import answer
from .lone_nodes import Lone, free_ports, lone_nodes
from tests.wire.first_frame import first_frame, parts

pytestmark = pytest.mark.live

LIMIT = 2048  # tokens: 128 KV blocks of 16
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def lone() -> Iterator[Lone]:
    with lone_nodes() as lone:
        p = lone.start("prefill", "p")
        lone.ready(p, lone.start("decode", "d", join=p.address))
        lone.until_peer(lone.nodes[1], name="p", state="up", detail="")
        yield lone


@pytest.fixture
def p(lone: Lone) -> NodeProcess:
    return lone.nodes[0]


@pytest.fixture
def d(lone: Lone) -> NodeProcess:
    return lone.nodes[1]


_salts = iter(range(1, 1 << 20))


@pytest.fixture(autouse=True)
def _nothing_else_is_disturbed(lone: Lone, d: NodeProcess) -> Iterator[None]:
    yield
    prompt = random.Random(next(_salts)).choices(range(5, 256), k=40)
    finished = lone.answer(d, prompt, max_tokens=3).finished
    assert (finished.reason, finished.timeline.prefill_node) == ("length", "p")
    lone.check_clean()


# ---------------------------------------------------------------- HTTP


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def hi(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", **fields}


BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETION, {"prompt": ""}, "prompt", "must not be empty"),
    (COMPLETION, {"prompt": []}, "prompt", "must not be empty"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (
        COMPLETION,
        hi(max_tokens=LIMIT),
        "max_tokens",
        f"at most {LIMIT} fit (max_model_len): ask for at most {LIMIT - 2}",
    ),
    (COMPLETION, {"prompt": "x" * LIMIT}, "prompt", f"has {LIMIT} tokens; with one for the answer at most {LIMIT} fit"),
    (CHAT, user("x" * LIMIT), "messages", f"at most {LIMIT} fit"),
    (COMPLETION, hi(max_tokens=-1), "max_tokens", "must be between 1 and"),
    (COMPLETION, hi(stop_token_ids=[10**6]), "stop_token_ids[0]", "must be a token id from 0 to"),
    (COMPLETION, hi(temperature=-0.5), "temperature", "must be between 0 and 2"),
    (COMPLETION, hi(top_p=-1), "top_p", "must be between 0 and 1"),
    (COMPLETION, hi(top_k=-3), "top_k", "must be between 0 and"),
    (COMPLETION, hi(seed=2**70), "seed", "must be between 0 and"),
    (CHAT, {**user("hi"), "max_completion_tokens": 0}, "max_completion_tokens", "must be between 1 and"),
    (COMPLETION, hi(max_tokens="three"), "max_tokens", "expected an integer, got a string"),
    (COMPLETION, hi(stop=[1]), "stop[0]", "expected a string, got an integer"),
    (COMPLETION, {"prompt": {"text": "hi"}}, "prompt", "expected a string or a list, got an object"),
    (COMPLETION, {"prompt": [1, 256]}, "prompt", "token id 256 is outside the vocabulary of 256"),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": "hi"}]},
        "messages[0].role",
        "one of system, developer, user, assistant",
    ),
    (CHAT, user(5), "messages[0].content", "expected a string or a list, got an integer"),
    (COMPLETION, hi(beams=2), "beams", "unknown field"),
    (COMPLETION, {"max_tokens": 3}, "prompt", "required field is missing"),
]


@pytest.mark.parametrize(("path", "body", "param", "problem"), BAD_FIELDS)
def test_http_names_the_field(
    lone: Lone, d: NodeProcess, path: str, body: dict[str, Any], param: str, problem: str
) -> None:
    response = lone.web.post(d.http + path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert problem in error["message"]


BAD_BODIES: list[tuple[bytes, int, str, str | None]] = [
    (b'{"prompt": "hi", "temperature": NaN}', 400, "NaN and infinity are no JSON numbers", "temperature"),
    (b'{"prompt": "hi", "top_p": -Infinity}', 400, "NaN and infinity are no JSON numbers", "top_p"),
    (b'{"prompt": "hi", "temperature": 1e999}', 400, "temperature: number out of range", "temperature"),
    (b'{"prompt": "\xff\xfe"}', 400, "in UTF-8: Invalid UTF-8", None),
    (b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair", "prompt"),
    (b'{"prompt": "hi"', 400, "must be one JSON object", None),
    (b"", 400, "must be one JSON object", None),
    (b'["hi"]', 400, "expected an object, got a list", None),
    (b'{"prompt": ' + b"[" * 100_000, 400, "", None),
    (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, "larger than 8388608 bytes", None),
    (b'{"prompt": "' + b"x" * (7 << 20) + b'"}', 400, f"at most {LIMIT} fit", "prompt"),
]


@pytest.mark.parametrize(("body", "status", "problem", "param"), BAD_BODIES, ids=[body[:24] for body, *_ in BAD_BODIES])
def test_http_says_what_is_wrong_with_a_body(
    lone: Lone, d: NodeProcess, body: bytes, status: int, problem: str, param: str | None
) -> None:
    response = lone.web.post(d.http + COMPLETION, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert problem in error["message"] and error["param"] in (param, "prompt[0][0]")


def test_http_does_not_know_another_model(lone: Lone, d: NodeProcess) -> None:
    response = lone.web.post(d.http + COMPLETION, json=hi(model="gpt-4"))
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model" and "'coded' is" in response.json()["error"]["message"]


def test_http_of_a_prefill_node_sends_clients_to_a_decode_node(lone: Lone, p: NodeProcess) -> None:
    response = lone.web.post(p.http + COMPLETION, json=hi())
    assert response.status_code == 421
    assert "decode node" in response.json()["error"]["message"]


# ---------------------------------------------------------------- the SDK

NAN = math.nan
BAD_CALLS: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "prompt"),
    ([], {}, "prompt"),
    (None, {}, "prompt"),
    (5, {}, "prompt"),
    (b"hi", {}, "prompt"),
    ([1, 999], {}, "prompt"),
    ([-1], {}, "prompt"),
    ("\ud800", {}, "prompt"),
    ("x" * (17 << 20), {}, "prompt"),
    ("x" * LIMIT, {}, "prompt"),
    ([{"role": "user", "content": "x" * LIMIT}], {}, "messages"),
    ([{"role": "robot", "content": "hi"}], {}, "messages"),
    ([{"role": "user"}], {}, "messages"),
    ("hi", {"max_tokens": LIMIT}, "max_tokens"),
    ("hi", {"max_tokens": 0}, "max_tokens"),
    ("hi", {"max_tokens": 1.5}, "max_tokens"),
    ("hi", {"temperature": -1}, "temperature"),
    ("hi", {"temperature": NAN}, "temperature"),
    ("hi", {"temperature": math.inf}, "temperature"),
    ("hi", {"top_p": NAN}, "top_p"),
    ("hi", {"top_k": -1}, "top_k"),
    ("hi", {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("hi", {"logprobs": 21}, "logprobs"),
    ("hi", {"seed": 2**65}, "seed"),
    ("hi", {"stop": ("",)}, "stop"),
    ("hi", {"stop": ("x",) * 17}, "stop"),
    ("hi", {"stop_token_ids": (-1,)}, "stop_token_ids[0]"),
    ("hi", {"beams": 2}, "beams"),
    ("hi", {"deadline_ms": 0}, "deadline_ms"),
    ("hi", {"model": "gpt-4"}, "model"),
]


@pytest.mark.parametrize(("prompt", "options", "param"), BAD_CALLS)
def test_the_sdk_raises_a_request_error_that_names_the_field(
    lone: Lone, d: NodeProcess, prompt: Any, options: dict[str, Any], param: str
) -> None:
    async def ask(client: Client) -> None:
        with pytest.raises(RequestError) as raised:
            await answer(client, prompt, **options)
        assert raised.value.param == param
        assert str(raised.value)

    lone.ask(d, ask)


# ---------------------------------------------------------------- strangers on the bus

STRANGER = wire.Header(from_="stranger", from_inc=b"s" * 16, seq=7)
HELLO = {"role": "tool"}


def frames(kind: bytes, body: Any = None, *raw: bytes) -> list[bytes]:
    return [message(kind, wire.pack_foreign(body if body is not None else {})), *raw]


def message(kind: bytes, body: bytes) -> bytes:
    return first_frame(kind, wire.encode(STRANGER), body)


BAD_MESSAGES: list[tuple[list[bytes], str]] = [
    ([b""], "expected pd1.<kind> in the first frame"),
    ([b"GET / HTTP/1.1"], "expected pd1.<kind> in the first frame"),
    ([b"pd2.hello\0"], "major version 2 is not spoken here, only 1"),
    (frames(b"pd1.frobnicate"), "unknown kind 'frobnicate'"),
    ([b"pd1.status"], "header and body must follow the kind"),
    ([b"pd1.status", wire.encode(STRANGER), b"\x80"], "header and body must follow the kind"),
    ([first_frame(b"pd1.status", b"\xc1")], "not msgpack"),
    ([message(b"pd1.status", b"\xc1")], "not msgpack"),
    ([message(b"pd1.status", b"\x80\x80")], "not msgpack"),
    (frames(b"pd1.hello", {"role": 5}), "Expected `str`, got `int` - at `$.role`"),
    (frames(b"pd1.hello", {}), "missing required field `role`"),
    (frames(b"pd1.hello", HELLO, *[b"x"] * 16), "17 frames, at most 16"),
    (frames(b"pd1.hello", HELLO, *[b"x" * (3 << 20)] * 6), "more than 16777216 bytes in all frames together"),
    ([message(b"pd1.connect", b"\x81\xa9addresses" + b"\x91" * 100_000)], "Expected `str`, got `array`"),
    (frames(b"pd1.prefill.request", {}), "missing required field `try_`"),
]


@pytest.mark.parametrize("index", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(("sent", "problem"), BAD_MESSAGES, ids=[problem for _, problem in BAD_MESSAGES])
def test_a_message_that_is_none_is_answered_with_what_is_wrong(
    lone: Lone, index: int, sent: list[bytes], problem: str
) -> None:
    kind, _, body = parts(said_to(lone.nodes[index], sent))
    assert kind == b"pd1.error"
    assert problem in wire.unpack_foreign(body)["message"]


def said_to(node: NodeProcess, sent: list[bytes], timeout_ms: int = 10_000) -> bytes:
    """The answer to some frames."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(node.address)
        dealer.send_multipart(sent)
        assert dealer.poll(timeout_ms)
        return dealer.recv()


LONG_NAME = wire.Header(from_="n" * 257, from_inc=b"s" * 16)
LONG_LIFE = wire.Header(from_="n", from_inc=b"s" * 4000)
ESCAPED = "\0" * 5_000_000  # four times as long where it is quoted
ECHOES: list[tuple[list[bytes], str]] = [
    ([first_frame(b"pd1.status", wire.encode(LONG_NAME), wire.pack_foreign({}))], "header.from"),
    ([first_frame(b"pd1.status", wire.encode(LONG_LIFE), wire.pack_foreign({}))], "header.from_inc"),
    (frames(b"pd1.hello", {"role": ESCAPED, "geometry": {}}), "role"),
    (frames(b"pd1.hello", {"role": "decode", "geometry": {"layer_names": ["x"] * 1025}}), "geometry.layer_names"),
    (frames(b"pd1.goodbye", {"reason": ESCAPED}), "reason"),
    (frames(b"pd1.generate", {"client_id": "i" * 257, "text": "hi"}), "client_id"),
    (frames(b"pd1.cancel", {"client_id": "i" * (wire.FRAME_BYTES_MAX - 200)}), "client_id"),
    (frames(b"pd1.generate", {"client_id": "i", "text": "hi", "model": ESCAPED}), "model"),
    (frames(b"pd1.generate", {"client_id": "i", "messages": [{"role": ESCAPED, "content": "hi"}]}), "messages"),
    (frames(b"pd1.events.snapshot", {"topic": ESCAPED}), "topic"),
    (frames(b"pd1.connect", {"addresses": [ESCAPED]}), ""),
    (frames(b"pd1.connect", {"addresses": ["tcp://127.0.0.1:9"] * 1025}), "addresses"),
    (frames(b"pd1.disconnect", {"targets": ["p"] * 1_000_000}), "targets"),
]


@pytest.mark.parametrize(("sent", "field"), ECHOES, ids=[f"{i} {field}" for i, (_, field) in enumerate(ECHOES)])
def test_what_an_answer_would_echo_is_not_what_ends_a_node(d: NodeProcess, sent: list[bytes], field: str) -> None:
    """Its answer would be larger than the bus takes, which is no mistake of the node's own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(d.address)
        dealer.send_multipart(sent)
        assert dealer.poll(10_000)
        kind, _, body = parts(dealer.recv())
    assert kind == b"pd1.error" and len(body) < 10_000
    assert wire.unpack_foreign(body)["field"] == field


def test_a_message_over_the_limit_ends_its_connection(d: NodeProcess) -> None:
    """ZeroMQ cuts it before it is in memory: one stranger's frame could be all of it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        monitor = dealer.get_monitor_socket(zmq.Event.DISCONNECTED)
        dealer.connect(d.address)
        dealer.send_multipart(frames(b"pd1.hello", HELLO, b"x" * (wire.FRAME_BYTES_MAX + 1)))
        assert monitor.poll(10_000)
        dealer.disable_monitor()


NOISE = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03" + bytes(200)]
NOISE += [random.Random(size).randbytes(size) for size in (1, 10, 64, 1000, 100_000)]


@pytest.mark.parametrize("index", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("noise", NOISE, ids=[f"{noise[:8]!r}" for noise in NOISE])
def test_noise_on_the_bus_port_disturbs_nobody(lone: Lone, index: int, noise: bytes) -> None:
    host, port = lone.nodes[index].address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection, contextlib.suppress(OSError):
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def test_a_client_id_that_is_in_use_is_refused_and_the_request_of_that_id_goes_on(d: NodeProcess) -> None:
    generate = frames(b"pd1.generate", {"client_id": "same", "text": "hi", "sampling": {"max_tokens": 400}})
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(d.address)
        dealer.send_multipart(generate)
        dealer.send_multipart(generate)
        kinds: list[bytes] = []
        while b"pd1.finished" not in kinds:
            assert dealer.poll(10_000)
            kind, _, body = parts(dealer.recv())
            kinds.append(kind)
            if kind == b"pd1.error":
                assert wire.unpack_foreign(body)["field"] == "client_id"
    assert kinds.count(b"pd1.error") == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_tokens": 9}, "raw"),
        ({"prompt_digest": bytes(16)}, "prompt_digest"),
        ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature"),
        ({"sampling": Sampling(logprobs=10**9)}, "sampling.logprobs"),
        ({"sampling": Sampling(stop=("x",) * 99)}, "sampling.stop"),
    ],
)
def test_a_prefill_request_that_makes_no_sense_is_answered_with_its_field(
    lone: Lone, p: NodeProcess, d: NodeProcess, changes: dict[str, Any], field: str
) -> None:
    async def scene() -> None:
        async with reader_of(p, d) as (endpoint, link, try_):
            prompt = wire.pack_u32([7, 8, 9])
            request = PrefillRequest(
                try_=try_, sampling=Sampling(), have=0, deadline_ms=1000, prompt_tokens=3,
                prompt_digest=prompt_digest(prompt),
            )  # fmt: skip
            with pytest.raises(RemoteProtocolError) as raised:
                await endpoint.request(link, wire.replace(request, **changes), PrefillAccepted, 10, (prompt,))
            assert raised.value.field == field

    lone.run(scene())


@contextlib.asynccontextmanager
async def reader_of(p: NodeProcess, d: NodeProcess) -> AsyncIterator[tuple[Endpoint, str, TryId]]:
    """A decode node that p has welcomed: it says of itself what d says."""
    async with Client(d.address) as client:
        hello = (await client.node()).hello
    endpoint = Endpoint("odd", b"o" * 16, lambda _: None)
    link = endpoint.connect(p.address)
    try:
        await endpoint.request(link, wire.replace(hello, address="", http=""), Welcome, 10)
        yield endpoint, link, TryId(node="odd", incarnation=b"o" * 16, request=bytes(16), attempt=1)
        endpoint.send(link, Goodbye())
    finally:
        endpoint.close(linger_ms=1000)


# ---------------------------------------------------------------- who is no peer


def test_an_endpoint_that_is_no_node_of_ours_is_told_why(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    closed, bus = f"http://127.0.0.1:{free_ports(1)}", p.address.replace("tcp://", "http://")
    with stranger_http() as other:
        results = lone.add(d, closed, other, bus, p.address, d.http, "127.0.0.1:1")
    assert [result["ok"] for result in results] == [False] * 6
    said = [result["detail"] for result in results]
    assert said[0] == "cannot be reached: Connection refused"
    assert said[1] == "is no pdbus node: GET /pd/info answered 404 Not Found"
    assert said[2].endswith("give the node's HTTP address, or join it over the bus with pd connect")
    assert said[3].startswith("is a bus address; give the node's HTTP address")
    assert said[4] == "is no prefill node: decode"
    assert said[5] == "must be like http://host:port"
    assert [endpoint["name"] for endpoint in lone.listed(d)] == ["p"]


@contextlib.contextmanager
def stranger_http() -> Iterator[str]:
    """A web server that is something else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_no_bus_address_is_told_and_not_called(lone: Lone, d: NodeProcess) -> None:
    wrong = ["nowhere", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "", d.address]
    outcomes = lone.ask(d, lambda client: client.connect(wrong))
    assert not any(outcome.ok for outcome in outcomes)
    assert [outcome.detail.partition(",")[0].partition(" (")[0] for outcome in outcomes] == [
        "must be like tcp://host:port", "must be like tcp://host:port", "the port must be 1 to 65535",
        "must be like tcp://host:port", "this is the node itself",
    ]  # fmt: skip
    assert [peer["name"] for peer in lone.peers(d)] == ["p"]
    assert not any(outcome.ok for outcome in lone.ask(d, lambda client: client.disconnect(["nowhere", ""])))


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"coded_head_dim": 32}, "head_dim 32 against 16"),
    "dtype": ({"dtype": "float16"}, "dtype float16 against float32"),
    "weights": ({"model_id": "other"}, "the weights differ (fingerprint other against coded-256)"),
}


def test_a_pair_that_cannot_share_kv_is_refused_by_field_with_both_values(lone: Lone, d: NodeProcess) -> None:
    """At hello, on both sides, whoever called; other peers serve on."""
    odd = {name: lone.start("prefill", name, **settings) for name, (settings, _) in ODD.items()}
    lone.ready(*odd.values())
    results = {r["name"]: r for r in lone.add(d, *(node.http for node in odd.values()))}
    listed = {e["endpoint"]: e for e in lone.listed(d)}
    shown = run_pd("status", d.address).stdout
    for name, (_, reason) in ODD.items():
        told = reversed_pair(reason)
        assert not results[name]["ok"] and told in results[name]["detail"]
        assert listed[odd[name].http]["state"] == "refused" and told in listed[odd[name].http]["detail"]
        assert lone.until_peer(d, name=name, state="refused")["detail"].startswith("cannot share KV: ")
        assert told in shown
        assert reason.split()[0] in lone.until_peer(odd[name], name="d", state="refused")["detail"]
        assert lone.remove(d, odd[name].http)[0]["ok"]
    lone.stop(*odd.values())


def reversed_pair(reason: str) -> str:
    """The same difference as the other side says it: its own value last."""
    return re.sub(r"(\S+) against ([^)]+)", r"\2 against \1", reason)


def run_pd(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from pdbus.nodes.cli import main; main()"
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})


@pytest.mark.long
def test_a_node_that_reaches_nobody_says_so_once_and_joins_when_someone_is_there(lone: Lone, p: NodeProcess) -> None:
    """An HTTP port given as a bus address is nobody, too; it answers by hanging up, or not at all."""
    port, web = free_ports(3), p.http.replace("http", "tcp")
    eager = lone.start("decode", "eager", http=False, join=f"tcp://127.0.0.1:{port},{web}")
    lone.ready(eager)
    reason = "no answer within 5 s"
    assert lone.until_peer(eager, address=f"tcp://127.0.0.1:{port}", detail=reason)["state"] in ("waiting", "greeting")
    assert next(peer["detail"] for peer in lone.peers(eager) if peer["address"] == web)
    assert reason in run_pd("status", eager.address).stdout
    late = lone.start("prefill", "late", http=False, listen=f"tcp://127.0.0.1:{port}")
    lone.until_peer(eager, name="late", state="up", detail="")
    said = [line for line in eager.tail if f":{port} " in line]
    assert len(said) == 1 and said[0].endswith(f"tcp://127.0.0.1:{port} cannot be joined: {reason}")
    lone.stop(eager, late)
