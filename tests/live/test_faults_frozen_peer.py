"""A prefill node is stopped during reads and goes on much later: what it sends then lands where nobody is.

Nothing but the read's own end proves that it writes no more, so its blocks are in quarantine, however long it takes.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import DeadlineExceeded
from pdbus.connector.layout import layout_of
from pdbus.nodes.node_process import NodeProcess, descendants

from .conftest import POISON, poison, slab_of
from .faults import (
    GEOMETRY,
    OPTIONS,
    TCP,
    WAIT_S,
    B,
    Site,
    Status,
    ask,
    ask_remotely,
    pids_of,
    prompt,
    read_all,
    scenario,
    site_of,
    until_clean,
    until_status,
)

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

BLOCKS = 96  # on the decode node: few enough to be used up, enough for what is in quarantine to be under a quarter
LONG, SHORT = 4 * B + 5, 3 * B + 5
LAYOUT = layout_of(GEOMETRY, BLOCKS)
BLOCK_BYTES = LAYOUT.region_bytes // BLOCKS  # native: a block is one run
FROZEN_S = 30.0
IN_TIME_MS = 5_000  # two attempts of a node that does not answer, and a third elsewhere
LATE = -(-LONG // B) + -(-SHORT // B)  # blocks of the two requests whose reads do not end


@pytest.fixture
def hurt() -> Iterator[Site]:
    """2P + 1D over TCP, D with few blocks."""
    with site_of(2, 1, options=OPTIONS, role_options={"decode": {"kv_blocks": BLOCKS}}, environment=TCP) as site:
        yield site
        site.mend()


@scenario
async def test_a_frozen_peer_writes_into_no_block_that_was_reused(hurt: Site) -> None:
    frozen, other = hurt.cluster.prefill
    async with Client(hurt.d.address) as d, Client(frozen.address) as p:
        await ask_remotely(d, 0)
        poison(hurt.d.pid)
        hurt.freeze((await pids_of(p))["mover"])
        hasty = [d.generate(prompt(SHORT, i), max_tokens=4, deadline_ms=1700) for i in range(2)]
        reading = [asyncio.create_task(read_all(generation)) for generation in hasty]
        patient = [asyncio.create_task(ask(d, prompt(LONG, i))) for i in range(2)]
        await until_status(d, lambda s: len([f for f in s["reads"] if under_way(f, frozen)]) == 2)
        for pid in (frozen.pid, *descendants(frozen.pid)):
            hurt.freeze(pid)

        ended = await asyncio.gather(*reading, return_exceptions=True)
        assert sum(isinstance(answer, DeadlineExceeded) for answer in ended) == 1
        timelines = [(await answer).finished.timeline for answer in patient]
        assert sorted(t.attempts for t in timelines) == [1, 2]
        assert {(t.remote, t.prefill_node) for t in timelines} == {(True, other.name)}
        assert (await d.ledger()).ledger["blocks"]["quarantined"] == LATE

        reused = await reuse_all_others(hurt, d)
        before = blocks_of(hurt)
        hurt.thaw_all()
        await until_clean(d)
        after = blocks_of(hurt)
        untouched = {block for block in range(BLOCKS) if before[block] == POISON * BLOCK_BYTES}
        assert len(untouched) == LATE
        changed = {block for block in range(BLOCKS) if before[block] != after[block]}
        assert changed, "nothing came late: the test shows nothing"
        assert changed <= untouched

        for asked in reused[-3:]:
            answered = await ask(d, asked)
            assert answered.finished.cached_tokens > 0
        await ask_remotely(d, 1)


@scenario
async def test_others_are_served_through_half_a_minute_of_it(hurt: Site) -> None:
    """Each of them by its deadline, and the frozen one is asked again once it goes on."""
    frozen, other = hurt.cluster.prefill
    async with Client(hurt.d.address) as d:
        await from_node(d, frozen, 5_000)
        for pid in (frozen.pid, *descendants(frozen.pid)):
            hurt.freeze(pid)
        thaw_at, asked = asyncio.get_running_loop().time() + FROZEN_S, 0
        served: set[str] = set()
        while asyncio.get_running_loop().time() < thaw_at:
            asked += 1
            answered = await ask(d, prompt(SHORT, asked), deadline_ms=IN_TIME_MS)
            served.add(answered.finished.timeline.prefill_node)
        assert other.name in served and frozen.name not in served
        hurt.thaw_all()
        await from_node(d, frozen, 9_000)
        await until_clean(d)


async def from_node(d: Client, node: NodeProcess, salt: int) -> None:
    """Ask until that node has prefilled one."""
    async with asyncio.timeout(WAIT_S):
        while (await ask(d, prompt(SHORT, salt := salt + 1))).finished.timeline.prefill_node != node.name:
            pass


def under_way(fetch: Status, node: NodeProcess) -> bool:
    return bool(fetch["node"] == node.name and fetch["reads"] and fetch["first_token"])


async def reuse_all_others(site: Site, d: Client) -> list[list[int]]:
    """Prompts that fill every block but those in quarantine."""
    asked: list[list[int]] = []
    while sum(block == POISON * BLOCK_BYTES for block in blocks_of(site)) > LATE:
        asked.append(prompt(LONG, 100 + len(asked)))
        assert (await ask(d, asked[-1])).finished.cached_tokens == 0
        assert len(asked) < BLOCKS
    return asked


def blocks_of(site: Site) -> list[bytes]:
    """The decode node's KV, block for block."""
    with open(slab_of(site.d.pid), "rb") as slab, mmap.mmap(slab.fileno(), 0, prot=mmap.PROT_READ) as memory:
        return [memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in range(BLOCKS)]
