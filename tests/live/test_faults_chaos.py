"""Processes of two prefill and two decode nodes are killed and frozen at random while requests keep coming.

Every answer is right as far as it goes, only clients of a decode node that was killed or frozen itself may see an
error, and in the end all is whole and clean. A seed fixes what is done, not when the processes feel it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.nodes.node_process import NodeProcess

from .faults import (
    OPTIONS,
    TCP,
    Site,
    ask_remotely,
    child_of,
    expected,
    prompt,
    read_all,
    scenario,
    site_of,
)

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(300)]

STORM_S = 40.0
PAUSE_S = 1.2  # at most, between two faults
FROZEN_S = 3.0  # at most: longer than a lease
MODULES = {"worker": "nodes.worker", "mover": "connector.mover"}


@pytest.fixture(params=[TCP, {}], ids=["tcp", "default"], scope="module")
def four(request: pytest.FixtureRequest) -> Iterator[Site]:
    options = {**OPTIONS, "kv_blocks": 64, "lease": "2s"}
    roles = {"prefill": {"coded_token_us": 300}}
    with site_of(2, 2, options=options, role_options=roles, environment=request.param) as site:
        yield site


@pytest.fixture
def hurt(four: Site) -> Iterator[Site]:
    """2P + 2D, with few blocks, over TCP and over what UCX chooses."""
    yield four
    four.mend()


class Storm:
    """Requests at every decode node until told to end; what became of them, by a word."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.hurt: Counter[str] = Counter()  # by node: odd while its control is down or frozen, more with each time
        self.over = False
        self._salt = seed << 32

    async def ask_on(self, node: NodeProcess) -> None:
        while not self.over:
            with contextlib.suppress(PdError):
                async with Client(node.address) as client:
                    while not self.over:
                        await asyncio.gather(*(self._one(client, node) for _ in range(self.draw.randrange(1, 9))))
                        await client.node()
            await asyncio.sleep(0.1)

    async def _one(self, client: Client, node: NodeProcess) -> None:
        self._salt += 1
        asked, count = prompt(self.draw.randrange(1, 400), self._salt), self.draw.randrange(1, 80)
        hurt = self.hurt[node.name]
        generation = client.generate(asked, max_tokens=count, deadline_ms=60_000)
        try:
            if self.draw.random() < 0.2:
                await asyncio.sleep(self.draw.random() / 4)
                await generation.cancel()
                self.outcomes["cancelled"] += 1
            else:
                finished = (await read_all(generation)).finished
                self.outcomes["remote" if finished.timeline.remote else "local"] += 1
                assert len(generation.tokens) == count
        except PdError as e:
            if hurt == self.hurt[node.name] and not hurt % 2 and "lost 2 times" not in str(e):
                raise AssertionError(f"{node.name} was not hurt") from e
            self.outcomes["lost"] += 1
        assert generation.tokens == expected(asked, len(generation.tokens))


async def hurt_one(site: Site, storm: Storm) -> None:
    """Kill or freeze a process, see a killed control started again."""
    node, draw = storm.draw.choice(site.cluster.nodes), storm.draw
    what, kill = draw.choice(("control", "worker", "worker", "mover", "mover")), draw.random() < 0.5
    with contextlib.suppress(AssertionError, OSError):  # between two lives
        pid = node.pid if what == "control" else child_of(node, MODULES[what])
        storm.hurt[node.name] += what == "control"
        if kill:
            os.kill(pid, signal.SIGKILL)
        else:
            site.freeze(pid)
            await asyncio.sleep(draw.random() * FROZEN_S)
            site.thaw(pid)
    if what == "control" and kill:
        await node.wait()
        await site.cluster.restart(node)
    storm.hurt[node.name] += what == "control"


@pytest.mark.parametrize("seed", [1, 2])
@scenario
async def test_random_deaths_under_load(hurt: Site, seed: int) -> None:
    storm = Storm(seed)
    loop = asyncio.get_running_loop()
    asking = [asyncio.create_task(storm.ask_on(node)) for node in hurt.cluster.decode]
    until_s = loop.time() + STORM_S
    while loop.time() < until_s and not any(task.done() for task in asking):
        await asyncio.sleep(storm.draw.random() * PAUSE_S)
        await hurt_one(hurt, storm)
    storm.over = True
    await asyncio.gather(*asking)
    assert storm.outcomes["remote"] > storm.outcomes["lost"]
    for node in hurt.cluster.decode:
        async with Client(node.address) as d:
            await ask_remotely(d, seed)
