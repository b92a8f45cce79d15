"""How nodes find each other: the HTTP way of adding and removing prefill endpoints, and `--join` of any member."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.node_process import NodeProcess

from .conftest import answer
from .lone_nodes import Lone, is_clean, lone_nodes, matching, until

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def lone() -> Iterator[Lone]:
    """p, slow enough that a prompt is seen on its way, and d, which was told of nobody."""
    with lone_nodes() as lone:
        lone.ready(lone.start("prefill", "p", coded_token_us=1000), lone.start("decode", "d"))
        yield lone


@pytest.fixture
def p(lone: Lone) -> NodeProcess:
    return lone.nodes[0]


@pytest.fixture
def d(lone: Lone) -> NodeProcess:
    return lone.nodes[1]


@pytest.fixture(autouse=True)
def _clean(lone: Lone) -> Iterator[None]:
    yield
    lone.check_clean()


_salts = iter(range(1, 1 << 20))


def prompt(tokens: int = 40) -> list[int]:
    """Never the same twice: nothing of it is cached anywhere."""
    return random.Random(next(_salts)).choices(range(5, 256), k=tokens)


def prefilled_by(lone: Lone, d: NodeProcess) -> str:
    """Who prefills a new prompt, as HTTP tells it; '' for the decode node itself."""
    timeline = lone.post(d, "/v1/completions", {"prompt": prompt(), "max_tokens": 2})["pd_timeline"]
    assert timeline["remote"] is bool(timeline["prefill_node"])
    return str(timeline["prefill_node"])


def only(found: list[dict[str, Any]], *keys: str) -> tuple[Any, ...]:
    [one] = found
    return tuple(one[key] for key in keys)


def test_prefill_endpoints_are_added_used_removed_and_added_again(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    assert lone.listed(d) == []
    assert prefilled_by(lone, d) == ""

    assert only(lone.add(d, p.http), "endpoint", "ok", "name", "detail") == (p.http, True, "p", "")
    assert only(lone.listed(d), "endpoint", "name", "role", "state", "detail") == (p.http, "p", "prefill", "up", "")
    assert prefilled_by(lone, d) == "p"

    assert only(lone.remove(d, p.http), "endpoint", "ok", "name") == (p.http, True, "p")
    assert only(lone.listed(d), "endpoint", "state") == (p.http, "removed")
    assert prefilled_by(lone, d) == ""

    assert only(lone.add(d, p.http), "ok") == (True,)
    assert only(lone.listed(d), "endpoint", "state") == (p.http, "up")
    assert prefilled_by(lone, d) == "p"


def test_a_removed_endpoint_serves_its_last_lease_and_stays_removed(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    lone.add(d, p.http)

    async def scene() -> None:
        async with Client(d.address) as client:
            asked = asyncio.create_task(answer(client, prompt(200), max_tokens=3))
            await until(lambda: matching(client, {"name": "p", "fetches": 1}))
            removal = asyncio.to_thread(lone.remove, d, p.http)
            assert only(await removal, "ok", "name") == (True, "p")
            assert await matching(client, {"name": "p", "state": "removing"})
            assert (await asked).finished.timeline.prefill_node == "p"
            await until(lambda: matching(client, {"name": "p", "state": "removed"}))

    lone.run(scene())
    assert prefilled_by(lone, d) == ""
    assert lone.ask(p, lambda client: client.connect([d.address]))[0].detail.startswith("removed here by an operator")
    assert only(lone.listed(d), "state") == ("removed",)


@pytest.mark.parametrize("last", ["connect", "disconnect"])
def test_the_last_command_holds_though_both_are_heard_at_once(
    lone: Lone, p: NodeProcess, d: NodeProcess, last: str
) -> None:
    """As by a node that goes on after a pause. Joining takes longer than removing, and must not end after it."""
    lone.add(d, p.http)
    commands = ["disconnect", "connect"] if last == "connect" else ["connect", "disconnect"]

    async def scene() -> None:
        async with Client(d.address) as client:
            d.signal(signal.SIGSTOP)
            try:
                asked = [asyncio.ensure_future(getattr(client, command)([p.address])) for command in commands]
                await asyncio.wait(asked, timeout=0)
            finally:
                d.signal(signal.SIGCONT)
            await asyncio.gather(*asked)
            state = {"connect": "up", "disconnect": "removed"}[last]
            await until(lambda: matching(client, {"name": "p", "state": state}))

    lone.run(scene())
    assert only(lone.listed(d), "state") == ({"connect": "up", "disconnect": "removed"}[last],)


def test_an_endpoint_may_be_removed_by_name_or_bus_address_too(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    for target in ("p", p.address):
        lone.add(d, p.http)
        assert only(lone.remove(d, target), "ok") == (True,)
        assert only(lone.listed(d), "state") == ("removed",)
    assert only(lone.remove(d, "nobody"), "ok", "detail") == (False, "no member of that name or address")


def test_a_member_is_found_under_another_address_of_its_machine(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    port = p.address.rpartition(":")[2]
    lone.add(d, p.http)
    for address in (f"tcp://localhost:{port}", p.address, f"tcp://localhost:{port}"):
        [outcome] = lone.ask(d, lambda client, address=address: client.connect([address]))  # type: ignore[misc]
        assert (outcome.ok, outcome.detail) == (True, "p")
    assert only([peer for peer in lone.peers(d) if peer["role"] != "decode"], "name", "state") == ("p", "up")


def test_joining_any_member_brings_in_all(lone: Lone, p: NodeProcess, d: NodeProcess) -> None:
    """Also the other way round: a prefill node that joins another prefill node is found by the decode nodes there."""
    lone.add(d, p.http)
    p2 = lone.start("prefill", "p2", http=False, join=p.address)
    lone.until_peer(d, name="p2", state="up", detail="")
    d2 = lone.start("decode", "d2", http=False, join=d.address)
    lone.ready(p2, d2)
    for name in ("p", "p2"):
        lone.until_peer(d2, name=name, state="up", detail="")
    names = {lone.answer(d2, prompt(), max_tokens=2).finished.timeline.prefill_node for _ in range(4)}
    assert names == {"p", "p2"}
    assert lone.run(clean(d2)) and lone.run(clean(p2))
    lone.stop(p2, d2)


async def clean(node: NodeProcess) -> bool:
    async with Client(node.address) as client:
        return await until(lambda: is_clean(client))
