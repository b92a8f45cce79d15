"""The gateway's live page in a real browser: it draws what there is, and whatever nodes say is text."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from pathlib import Path

import pytest

from .faults import until
from .gateway_process import Gate, gateway_of
from .test_load_browser import OPTIONS, browser
from tests.fake_node import FakeNode
from tests.gateways import decode_node, knows
from tests.loop import on_loop

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(100)]

KEY = "sk-0123456789abcdef"
METRICS = {"kv_blocks": 512, "kv_blocks_free": 256, "kv_blocks_cached": 128, "kv_blocks_in_use": 128, "requests": 2}
EVIL = "<img src=x onerror=\"document.body.dataset.evil='yes'\"><script>document.body.dataset.evil='yes'</script>"


async def seen(url: str, folder: Path, *, shot: Path | None = None) -> str:
    """The page's DOM once it has drawn what it was told, or its picture."""
    what = [f"--screenshot={shot}"] if shot else ["--dump-dom"]
    process = await asyncio.create_subprocess_exec(
        browser(), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--window-size=1300,700", *what, url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    dom, _ = await process.communicate()
    return dom.decode()


def one_token(node: FakeNode, received: object) -> None:
    """And then it thinks: the request stays in flight."""
    node.tokens(received, 0, ["well"])  # type: ignore[arg-type]


def cluster() -> list[FakeNode]:
    odd = decode_node("d2", ready=False, not_ready=[EVIL], metrics=METRICS)
    p = decode_node("p1", role="prefill", metrics=METRICS)
    return [decode_node("d1", one_token, metrics=METRICS, peers=knows(odd, p)), odd, p]


@on_loop
async def test_nodes_requests_and_errors_are_drawn_as_text(tmp_path: Path) -> None:
    nodes = cluster()
    async with gateway_of("--join", ",".join(node.address for node in nodes)) as gate:
        await gate.sees("d1")
        asking = [asyncio.create_task(gate.complete([1, 2], 8, stream=True)) for _ in range(3)]
        await flying(gate, 3)
        dom = await seen(f"{gate.process.http}/ui", tmp_path)
        picture = tmp_path / "ui.png"
        await seen(f"{gate.process.http}/ui", tmp_path, shot=picture)
        for task in asking:
            task.cancel()
    for node in nodes:
        node.close()
    facts = dict(re.findall(r'data-(\w+)="([^"]*)"', dom))
    assert (facts.get("nodes"), facts.get("ready"), facts.get("requests")) == ("3", "2", "3"), dom[-3000:]
    assert "evil" not in facts and int(facts["errors"]) >= 1
    body = dom.partition("<main>")[2]
    assert EVIL[:28] in unescape(body) and "<img" not in body
    assert re.search(r'<i class="decode"[^>]*style="left: [\d.]+%; width: [\d.]+%', body)
    assert picture.stat().st_size > 10_000


@on_loop
async def test_with_keys_it_asks_for_one(tmp_path: Path) -> None:
    keys = tmp_path / "http.keys"
    keys.touch(0o600)
    keys.write_text(f"alice {KEY}\n")
    node = decode_node("d1")
    async with gateway_of("--join", node.address, "--http-keys", str(keys)) as gate:
        dom = await seen(f"{gate.process.http}/ui", tmp_path)
    node.close()
    assert re.search(r'<form id="ask" style="display: block;"', dom)
    assert "d1" not in dom.partition("<main>")[2].partition("<script>")[0]


async def flying(gate: Gate, count: int) -> None:
    async def so() -> bool:
        return bool((await gate.web.get("/ui/data")).json()["in_flight"] >= count)

    await until(so)
