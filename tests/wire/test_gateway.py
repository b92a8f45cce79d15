"""The gateway over scripted nodes and real sockets: what clients see when nodes answer, fail, are full, come and go."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from pdbus.bus.endpoint import Received
from pdbus.bus.errors import Overloaded, RequestError
from pdbus.bus.messages import Cancel, Connect
from pdbus.bus.recording import read
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import unpack_foreign
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.findings import Kind
from pdbus.nodes.replay.show import belonging, find, load

from tests.fake_node import REQUEST, FakeNode, answer_words, silent
from tests.gateways import asked, decode_node, events, gate, knows, refuses
from tests.loop import on_loop, until
from tests.recordings import rewrite, with_payload

HELLO = answer_words(["hel", "lo"])
FULL = Overloaded("16 requests are waiting already", retry_after_ms=1500)


def leaves(node: FakeNode, received: Received) -> None:
    node.leave(received)


def leaves_after_a_token(node: FakeNode, received: Received) -> None:
    node.tokens(received, 0, ["lost"])
    node.leave(received)


# ---------------------------------------------------------------- answers


@on_loop
async def test_an_answer_passes_whole_and_as_a_stream() -> None:
    async with gate([decode_node("d1", HELLO)]) as gated:
        whole = (await gated.post()).json()
        assert (whole["choices"][0]["text"], whole["model"]) == ("hello", "tiny")
        streamed = events(await gated.post(stream=True))
        assert streamed[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == "hello"


@on_loop
async def test_equal_nodes_take_turns() -> None:
    async with gate([decode_node("d1", HELLO), decode_node("d2", HELLO)]) as gated:
        for _ in range(6):
            assert (await gated.post()).status_code == 200
        assert [asked(n) for n in gated.nodes] == [3, 3]


@on_loop
async def test_other_nodes_are_found_through_the_one_that_is_joined() -> None:
    """A prefill node will do to start from; it is never asked itself."""
    d1, d2 = decode_node("d1", HELLO), decode_node("d2", HELLO)
    p = decode_node("p1", HELLO, role="prefill", peers=knows(d1, d2))
    async with gate([p, d1, d2], join=[p.address], ready=2) as gated:
        for _ in range(4):
            await gated.post()
        assert [asked(n) for n in (p, d1, d2)] == [0, 2, 2]


@on_loop
async def test_a_node_found_under_two_addresses_is_one_node() -> None:
    d1 = decode_node("d1", HELLO)
    d1.status["peers"] = [{**knows(d1)[0], "address": d1.address.replace("127.0.0.1", "localhost")}]
    async with gate([d1]) as gated:
        await until(lambda: gated.gateway.fleet.aliases)
        assert [node.address for node in gated.gateway.fleet.ready()] == [d1.address]


@on_loop
async def test_a_node_of_another_model_is_not_used() -> None:
    async with gate([decode_node("d1", HELLO), decode_node("d2", HELLO, model="other")], ready=1) as gated:
        await until(lambda: all(node.status for node in gated.gateway.fleet.nodes.values()))
        nodes = (await gated.web.get("/health/ready")).json()
        assert nodes["status"] == "ready"
        (model,) = [node.status["model"] for node in gated.gateway.fleet.ready()]
        assert model == gated.gateway.fleet.model
        (why,) = [node.why for node in gated.gateway.fleet.nodes.values() if not node.ready]
        assert "the first it saw: start it again for another one" in why


@on_loop
async def test_a_node_that_says_odd_things_of_itself_ends_nobody_but_itself() -> None:
    odd = [
        {"metrics": {"requests": "many"}}, {"metrics": None}, {"metrics": {"requests_waiting": math.nan}},
        {"peers": [3]}, {"peers": [{"name": []}]}, {"peers": [{"state": "up", "prefill_tokens_per_s": "fast"}]},
        {"block_size": 0}, {"block_size": None}, {"max_model_len": "long"}, {"not_ready": 3, "ready": False},
    ]  # fmt: skip
    nodes = [decode_node("d0", HELLO), *(decode_node(f"odd{i}", HELLO, **says) for i, says in enumerate(odd))]
    async with gate(nodes, ready=1, policy="cost") as gated:
        fleet = gated.gateway.fleet
        await until(lambda: all("its status has" in node.why for node in fleet.nodes.values() if not node.ready))
        assert (await gated.post()).status_code == 200 and not fleet.failed.done()
        assert (await gated.web.get("/metrics")).status_code == 200
        why = sorted(node.why for node in fleet.nodes.values() if not node.ready)
        assert why[0] == "odd0: its status has metrics.requests in a form that is not known here"


# ---------------------------------------------------------------- failure before and after the first token


@on_loop
async def test_before_the_first_token_another_node_is_tried() -> None:
    nodes = [decode_node("d1", leaves), decode_node("d2", HELLO)]
    async with gate(nodes) as gated:
        for _ in range(2):
            answer = await gated.post(stream=True)
            assert events(answer)[-1] == "[DONE]"
        assert gated.gateway.counters["retries"] == asked(nodes[0]) == 1


@on_loop
async def test_after_the_first_token_a_stream_ends_with_an_error_and_without_done() -> None:
    async with gate([decode_node("d1", leaves_after_a_token), decode_node("d2", leaves_after_a_token)]) as gated:
        answer = await gated.post(stream=True)
        first, last = events(answer)
        assert answer.status_code == 200
        assert first["choices"][0]["text"] == "lost"
        assert last["error"]["code"] == "unavailable"
        assert "has left" in last["error"]["message"]


@on_loop
async def test_a_whole_answer_begins_again_elsewhere_since_nothing_has_gone_out() -> None:
    nodes = [decode_node("d1", leaves_after_a_token), decode_node("d2", HELLO)]
    async with gate(nodes) as gated:
        texts = [(await gated.post()).json()["choices"][0]["text"] for _ in range(2)]
        assert texts == ["hello", "hello"]
        assert asked(nodes[0]) == 1


@on_loop
async def test_when_all_nodes_fail_the_last_ones_problem_is_told() -> None:
    async with gate([decode_node("d1", leaves), decode_node("d2", leaves)]) as gated:
        answer = await gated.post()
        assert answer.status_code == 503
        assert "has left: shutdown" in answer.json()["error"]["message"]


@on_loop
async def test_a_request_that_breaks_nodes_breaks_three_at_most() -> None:
    nodes = [decode_node(f"d{i}", leaves) for i in range(5)]
    async with gate(nodes) as gated:
        assert (await gated.post()).status_code == 503
        assert sum(map(asked, nodes)) == 3


@on_loop
async def test_what_the_client_asked_wrongly_is_not_tried_elsewhere() -> None:
    wrong = refuses(RequestError("max_tokens: too many", param="max_tokens", code="context_length_exceeded"))
    nodes = [decode_node("d1", wrong), decode_node("d2", wrong)]
    async with gate(nodes) as gated:
        answer = await gated.post()
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        assert sum(map(asked, nodes)) == 1


TOO_LONG = RequestError("the prompt has 99 tokens", param="prompt", code="context_length_exceeded")


@on_loop
async def test_a_prompt_that_does_not_fit_is_asked_where_more_fits() -> None:
    """/v1/models tells the most that any node takes."""
    small = [decode_node(f"d{i}", refuses(TOO_LONG), max_model_len=64) for i in (1, 2)]
    large = decode_node("d3", HELLO)
    async with gate([*small, large]) as gated:
        assert [(await gated.post()).status_code for _ in range(3)] == [200, 200, 200]
        assert asked(large) == 3 and sum(map(asked, small)) == 2
        assert gated.gateway.counters["retries"] == 0


@on_loop
async def test_where_the_largest_has_gone_the_prompt_is_too_long() -> None:
    small, large = decode_node("d1", refuses(TOO_LONG), max_model_len=64), decode_node("d2", refuses(TOO_LONG))
    async with gate([small, large]) as gated:
        for _ in range(2):
            answer = await gated.post()
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@on_loop
async def test_a_deadline_ends_a_request_that_its_node_has_forgotten() -> None:
    async with gate([decode_node("d1", silent)]) as gated:
        assert (await gated.post(deadline_ms=1)).status_code == 504


# ---------------------------------------------------------------- full


@on_loop
async def test_a_full_node_is_passed_by() -> None:
    nodes = [decode_node("d1", refuses(FULL)), decode_node("d2", HELLO)]
    async with gate(nodes) as gated:
        assert [(await gated.post()).status_code for _ in range(4)] == [200] * 4
        assert asked(nodes[1]) == 4


@on_loop
async def test_when_all_are_full_a_request_waits_for_room() -> None:
    room = False

    def script(node: FakeNode, received: Received) -> None:
        (HELLO if room else refuses(FULL))(node, received)

    async with gate([decode_node("d1", script), decode_node("d2", script)]) as gated:
        answers = [asyncio.create_task(gated.post()) for _ in range(3)]
        await until(lambda: len(gated.gateway.waiting) == 3)
        room = True
        assert [(await answer).status_code for answer in answers] == [200] * 3
        assert len(gated.gateway.waiting) == 0


@on_loop
async def test_one_more_than_may_wait_is_told_when_to_come_back() -> None:
    async with gate([decode_node("d1", refuses(FULL))], queue=1) as gated:
        first = asyncio.create_task(gated.post(deadline_ms=1000))
        await until(lambda: len(gated.gateway.waiting) == 1)
        second = await gated.post()
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) >= 1
        assert (await first).status_code == 504


@on_loop
async def test_an_answer_that_begins_again_waits_like_a_new_one_where_all_are_full() -> None:
    """Nothing of it has gone out: that its first node had said something is no reason to refuse it."""
    full = True

    def script(node: FakeNode, received: Received) -> None:
        (refuses(FULL) if full else HELLO)(node, received)

    async with gate([decode_node("d1", leaves_after_a_token), decode_node("d2", script)]) as gated:
        answers = [asyncio.create_task(gated.post()) for _ in range(2)]  # one for each node
        await until(lambda: len(gated.gateway.waiting) == 2)
        full = False
        assert [(await answer).json()["choices"][0]["text"] for answer in answers] == ["hello", "hello"]


@on_loop
async def test_who_waits_for_room_is_told_when_no_node_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody made room any more: they waited until their deadlines, and so did all who came after them."""
    monkeypatch.setattr("pdbus.nodes.gateway.gateway.ALONE_S", 0.01)
    async with gate([decode_node("d1", refuses(FULL))]) as gated:
        answers = [asyncio.create_task(gated.post()) for _ in range(3)]
        await until(lambda: len(gated.gateway.waiting) == 3)
        gated.nodes[0].status = {**gated.nodes[0].status, "ready": False, "not_ready": ["draining"]}
        for answer in answers:
            refused = await answer
            assert refused.status_code == 503
            assert "d1: draining" in refused.json()["error"]["message"]


@on_loop
async def test_who_leaves_the_line_leaves_no_gap() -> None:
    async with gate([decode_node("d1", refuses(FULL))], queue=2) as gated:
        answer = asyncio.create_task(gated.post())
        await until(lambda: len(gated.gateway.waiting) == 1)
        answer.cancel()
        await until(lambda: len(gated.gateway.waiting) == 0)


# ---------------------------------------------------------------- coming and going


@on_loop
async def test_without_a_ready_node_the_answer_says_why() -> None:
    busy = decode_node("d1", ready=False, not_ready=["the worker is not up"])
    async with gate([busy], ready=0) as gated:
        await until(lambda: all(node.status for node in gated.gateway.fleet.nodes.values()))
        answer = await gated.post()
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert message == "no decode node is ready: d1: the worker is not up"
        assert (await gated.web.get("/health/ready")).status_code == 503
        models = await gated.web.get("/v1/models")
        assert (models.status_code, models.json()["error"]["message"]) == (503, message)


@on_loop
async def test_a_node_that_comes_back_under_its_address_is_used_again() -> None:
    old = decode_node("d1", HELLO)
    address = old.address
    async with gate([old]) as gated:
        assert (await gated.post()).status_code == 200
        old.close()
        await gated.ready(0)
        new = FakeNode(HELLO, "d1")
        new.status = old.status
        new.bind(address)
        gated.nodes.append(new)
        await gated.ready(1)
        assert (await gated.post()).status_code == 200


@on_loop
async def test_a_client_that_leaves_cancels_at_the_node() -> None:
    d1 = decode_node("d1", silent)
    async with gate([d1]) as gated:
        answer = asyncio.create_task(gated.post(stream=True))
        await until(lambda: asked(d1))
        answer.cancel()
        await until(lambda: d1.count(Cancel))
        await until(lambda: gated.gateway.fleet.ready()[0].view().running == 0)


@on_loop
async def test_prefill_endpoints_are_passed_on_to_every_decode_node() -> None:
    nodes = [decode_node("d1"), decode_node("d2")]
    async with gate(nodes) as gated:
        outcomes = await gated.gateway.connect(["tcp://127.0.0.1:7400"])
        assert [outcome.ok for outcome in outcomes] == [True]
        assert [n.count(Connect) for n in nodes] == [1, 1]


# ---------------------------------------------------------------- recorded


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def recorded(folder: Path) -> None:
    nodes = [decode_node("d1", leaves), decode_node("d2", HELLO)]
    async with gate(nodes, record=folder) as gated:
        for _ in range(2):
            await gated.post()


@on_loop
async def test_every_choice_is_recorded_and_verifies(tmp_path: Path) -> None:
    await recorded(tmp_path)
    cluster = ClusterRun([tmp_path])
    assert cluster.failures == []
    (run,) = cluster.runs
    assert (run.role, run.is_client, run.ended) == ("gateway", True, "closed")


@on_loop
async def test_a_choice_that_would_not_be_made_again_is_found(tmp_path: Path) -> None:
    await recorded(tmp_path)
    path = files(tmp_path)[0]

    def other(record: RawRecord) -> RawRecord:
        return with_payload(record, policy="least-loaded", choice={"node": "d9", "scores": [0.0, 0.0]})

    rewrite(path, lambda r: other(r) if r.kind == "Chose" else r)
    kinds = {finding.kind for finding in ClusterRun([tmp_path]).failures}
    assert kinds == {Kind.DIVERGENCE}


@on_loop
async def test_show_tells_the_choice_of_a_request(tmp_path: Path) -> None:
    await recorded(tmp_path)
    moments, _ = load([tmp_path])
    (request,) = find(moments, REQUEST.hex()[:6])
    kinds = [moment.record.kind for moment in belonging(moments, request)]
    assert "Chose" in kinds and "Sent generate" in kinds


@on_loop
async def test_cost_goes_by_measured_speeds_which_stand_with_the_choice(tmp_path: Path) -> None:
    fast, slow = [
        decode_node(name, HELLO, metrics={"prefill_tokens_per_s": rate, "kv_blocks_free": 64})
        for name, rate in (("fast", 4000), ("slow", 1000))
    ]
    async with gate([fast, slow], policy="cost", record=tmp_path) as gated:
        for _ in range(4):
            assert (await gated.post(prompt=list(range(100)))).status_code == 200
    assert (asked(fast), asked(slow)) == (4, 0)
    assert ClusterRun([tmp_path]).failures == []
    choice = next(record for record in read(files(tmp_path)[0]).raw() if record.kind == "Chose")
    views = unpack_foreign(bytes(choice.payload))["nodes"]
    assert {view["name"]: view["prefill_tokens_per_s"] for view in views} == {"fast": 4000, "slow": 1000}


def dies_after_a_token(node: FakeNode, received: Received) -> None:
    """Without a word, and nobody listens there any more."""
    node.tokens(received, 0, ["lost"])
    asyncio.get_running_loop().call_later(0.05, node.close)


@on_loop
async def test_a_stream_of_a_node_that_died_ends_long_before_it_counts_as_dead() -> None:
    async with gate([decode_node("d1", dies_after_a_token)]) as gated:
        answer = await gated.post(stream=True)
        assert "was cut" in events(answer)[-1]["error"]["message"]


@on_loop
async def test_each_failed_attempt_is_a_line_with_request_attempt_and_peer(caplog: pytest.LogCaptureFixture) -> None:
    async with gate([decode_node("d1", leaves), decode_node("d2", HELLO)]) as gated:
        for _ in range(2):
            assert (await gated.post()).status_code == 200
    (line,) = [record for record in caplog.records if record.getMessage().startswith("attempt failed: ")]
    assert vars(line)["peer"] == "d1" and vars(line)["attempt"] == 1 and vars(line)["request"] in (1, 2)
