"""Every node of 2P + 2D is drained and started again behind a gateway under load: no request fails or is cut short."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.node_process import NodeProcess

from .faults import CHUNK, OPTIONS, Site, expected, prompt, site_of, until, until_clean
from .gateway_process import Gate, completion, events_of, gateway_of

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(240)]

CLIENTS = 8  # every second one streams
TOKENS = 24
MORE = 12  # answers after each restart, before the next: nobody leaves while another one still comes back


@pytest.fixture(scope="module")
def four() -> Iterator[Site]:
    roles = {"prefill": {"coded_token_us": 100}, "decode": {"coded_step_ms": 4}}
    with site_of(2, 2, options=OPTIONS, role_options=roles, bound_s=200) as site:
        yield site


class Load:
    """Clients that ask one request after the other, and what has become of these."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.answered: Counter[str] = Counter()  # by the prefill node, "" where there was none
        self.failed: list[str] = []
        self.over = asyncio.Event()
        self._numbers = itertools.count()

    async def client(self, streams: bool) -> None:
        while not self.over.is_set():
            number = next(self._numbers)
            asked = prompt(10 + number * 37 % (4 * CHUNK), number)
            try:
                self.answered[await (self.streamed(asked) if streams else self.whole(asked))] += 1
            except Exception as e:  # whatever it was, it is a failure
                self.failed.append(f"request {number}: {e!r}")

    async def whole(self, asked: list[int]) -> str:
        return str((await self.gate.right(asked, TOKENS))["pd_timeline"]["prefill_node"])

    async def streamed(self, asked: list[int]) -> str:
        """Right to the last token and its [DONE]."""
        body = completion(asked, TOKENS, stream=True)
        async with self.gate.web.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            events = [event async for event in events_of(answer)]
        assert events[-1] == "[DONE]", events[-1]
        tokens = [token for event in events[:-1] for token in event["choices"][0].get("token_ids", ())]
        assert tokens == expected(asked, TOKENS)
        return str(events[-2]["pd_timeline"]["prefill_node"])

    async def goes_on(self) -> None:
        enough = self.answered.total() + MORE

        async def so() -> bool:
            return self.answered.total() >= enough

        await until(so)


async def rolled(site: Site, node: NodeProcess, *, drained: bool) -> None:
    """As people deploy: told to leave, ended by itself, started on its ports, ready."""
    if drained:
        async with Client(node.address) as client:
            await client.drain()
    else:
        node.signal(signal.SIGTERM)
    assert await node.wait() == 0, list(node.tail)
    await site.cluster.restart(node)


@pytest.mark.parametrize("drained", [True, False], ids=["pd drain", "SIGTERM"])
def test_no_request_fails(four: Site, drained: bool) -> None:
    four.run(no_request_fails(four, drained))


async def no_request_fails(site: Site, drained: bool) -> None:
    async with gateway_of("--join", ",".join(node.address for node in site.cluster.nodes)) as gate:
        await gate.sees("decode-1", "decode-2")
        load = Load(gate)
        clients = [asyncio.create_task(load.client(i % 2 == 0)) for i in range(CLIENTS)]
        for node in site.cluster.nodes:
            await load.goes_on()
            await rolled(site, node, drained=drained)
            await gate.sees("decode-1", "decode-2")
        await load.goes_on()
        load.over.set()
        await asyncio.gather(*clients)
        assert load.failed == []
        assert {"prefill-1", "prefill-2"} <= set(load.answered), load.answered
        for node in site.cluster.nodes:
            async with Client(node.address) as client:
                await until_clean(client)
