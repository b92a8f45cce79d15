"""The gateway's live page: what it is told, by whom, and that it can say nothing but text."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx

from pdbus.bus.errors import RequestError
from pdbus.bus.station import Station
from pdbus.nodes.gateway.command import app_of
from pdbus.nodes.gateway.gateway import Gateway
from pdbus.nodes.http.keys import HttpKeys

from tests.fake_node import answer_words
from tests.gateways import decode_node, gate, knows, refuses
from tests.key_folders import key_folder, keyring
from tests.loop import on_loop, until

KEY = "sk-0123456789abcdef"
METRICS = {"kv_blocks": 512, "kv_blocks_free": 400, "kv_blocks_cached": 100, "kv_blocks_in_use": 12, "requests": 3,
           "prefill_tokens_per_s": 900}  # fmt: skip
HOSTILE = "<img src=x onerror=alert(1)>"


async def get(gateway: Gateway, path: str, keys: HttpKeys | None = None, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(gateway, keys=keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://gate", headers=headers) as web:
        return await web.get(path)


async def data(gateway: Gateway) -> dict[str, Any]:
    said: dict[str, Any] = (await get(gateway, "/ui/data")).json()
    return said


@on_loop
async def test_nodes_are_told_with_state_and_kv_prefill_nodes_too() -> None:
    """Prefill nodes that only the decode nodes know are followed for it."""
    p = decode_node("p1", role="prefill", metrics={"kv_blocks": 64, "leases_held": 2})
    leaving = decode_node("d2", ready=False, not_ready=["the node is draining"])
    d = decode_node("d1", metrics=METRICS, peers=knows(p, leaving))
    async with gate([d, leaving, p], join=[d.address], ready=1) as gated:
        await until(lambda: sum(bool(node.name) for node in gated.gateway.fleet.nodes.values()) == 3)
        rows = (await data(gated.gateway))["nodes"]
        assert [(row["name"], row["role"], row["state"]) for row in rows] == [
            ("d1", "decode", "ready"), ("d2", "decode", "draining"), ("p1", "prefill", "ready"),
        ]  # fmt: skip
        assert rows[0]["kv"] == {"total": 512, "in_use": 12, "cached": 100, "free": 400, "quarantined": 0}
        assert (rows[0]["running"], rows[0]["prefill_tokens_per_s"], rows[2]["leases"]) == (3, 900, 2)


@on_loop
async def test_requests_are_told_while_they_run_and_after_they_have_failed() -> None:
    async with gate([decode_node("d1", lambda *_: None)]) as gated:
        posted = asyncio.ensure_future(gated.post(prompt="my secret"))
        await until(lambda: gated.gateway.flights.said(0)["in_flight"])
        said = await data(gated.gateway)
        assert [span["what"] for span in said["requests"][0]["spans"]][:1] == ["waiting"]
        posted.cancel()
        await until(lambda: not gated.gateway.flights.said(0)["in_flight"])
        said = await data(gated.gateway)
        assert said["requests"][0]["end"] == "cancelled" and not said["errors"]
        assert "my secret" not in str(said)


@on_loop
async def test_an_answer_ends_in_the_list_and_an_error_among_the_errors() -> None:
    wrong = refuses(RequestError(f"prompt: {HOSTILE}", param="prompt"))
    async with gate([decode_node("d1", answer_words(["hel", "lo"]))]) as gated:
        assert (await gated.post()).status_code == 200
        (request,) = (await data(gated.gateway))["requests"]
        assert (request["end"], request["tokens"]) == ("stop", 2)
        assert [span["what"] for span in request["spans"]] == ["waiting", "prefill", "decode"]
    async with gate([decode_node("d1", wrong)]) as gated:
        assert (await gated.post()).status_code == 400
        said = await data(gated.gateway)
        assert said["requests"][0]["end"] == "error"
        assert [error["text"] for error in said["errors"]] == ["refused: invalid_request, prompt"]


@on_loop
async def test_a_node_that_failed_is_named_although_another_one_answered() -> None:
    async with gate([decode_node("d1", lambda n, r: n.leave(r)), decode_node("d2", answer_words(["hi"]))]) as gated:
        for _ in range(2):
            assert (await gated.post()).status_code == 200
        said = await data(gated.gateway)
        assert {request["end"] for request in said["requests"]} == {"stop"}
        assert "d1" in {error["node"] for error in said["errors"] if error["request"]}


@on_loop
async def test_with_keys_the_data_needs_one_and_the_page_tells_nothing(tmp_path: Path) -> None:
    file = tmp_path / "http.keys"
    file.touch(0o600)
    file.write_text(f"alice {KEY}\n")
    keys = HttpKeys(str(file))
    async with gate([decode_node("d1")]) as gated:
        assert (await get(gated.gateway, "/ui/data", keys)).status_code == 401
        assert (await get(gated.gateway, "/ui/data", keys, authorization=f"Bearer {KEY}")).status_code == 200
        page = await get(gated.gateway, "/ui", keys)
        assert page.status_code == 200 and "d1" not in page.text and KEY not in page.text


@on_loop
async def test_the_page_fetches_nothing_from_elsewhere_and_builds_no_html_from_data() -> None:
    async with gate([decode_node("d1")]) as gated:
        page = await get(gated.gateway, "/ui")
    assert not re.findall(r"\b(?:src|href)=|https?:|@import|url\(", page.text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page.text)
    allowed = page.headers["content-security-policy"]
    assert "default-src 'none'" in allowed and "connect-src 'self'" in allowed and "unsafe" not in allowed
    assert len(re.findall(r"'sha256-[^']+'", allowed)) == 2


@on_loop
async def test_what_nodes_say_passes_as_json_and_nothing_sniffs_it() -> None:
    node = decode_node("d1", ready=False, not_ready=[HOSTILE])
    async with gate([node], ready=0) as gated:
        await until(lambda: any(n.name for n in gated.gateway.fleet.nodes.values()))
        answer = await get(gated.gateway, "/ui/data")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert HOSTILE in answer.json()["nodes"][0]["detail"]


@on_loop
async def test_prefill_nodes_are_only_looked_at_where_the_keys_know_them(tmp_path: Path) -> None:
    """Elsewhere each look would be a refused stranger in that node's log."""
    known, unknown, decode = (f"tcp://127.0.0.1:{port}" for port in (7001, 7011, 7021))
    folder = key_folder(tmp_path / "keys", {"gate": "client", "p1": "prefill"}, {"p1": known})
    peers = [{"address": known, "role": "prefill"}, {"address": unknown, "role": "prefill"}]
    peers = [{**peer, "state": "up"} for peer in (*peers, {"address": decode, "role": "decode"})]
    for ring, followed in ((keyring(folder, "gate"), {known, decode}), (None, {known, unknown, decode})):
        station = Station(role="gateway", name="gate", keyring=ring)
        async with Gateway(station, [], policy="round-robin") as gateway:
            gateway.fleet._discover(peers)
            assert set(gateway.fleet.nodes) == followed
        station.close()
