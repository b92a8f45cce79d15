"""A prefill node that freezes for good under reads: the decode node takes its blocks back by ending its own mover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import CHUNK, OPTIONS, TCP, B, Site, ask, ask_remotely, pids_of, prompt, scenario, site_of, until_status

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

BLOCKS = 128


@pytest.fixture
def hurt() -> Iterator[Site]:
    """1P + 1D over TCP, D with few blocks."""
    with site_of(1, 1, options={**OPTIONS, "kv_blocks": BLOCKS}, environment=TCP) as site:
        yield site


@scenario
async def test_blocks_behind_reads_that_never_end_come_back(hurt: Site) -> None:
    """Nothing but the mover's end proves that such a read writes no more, and a quarter of the pool is too much to
    wait for it. Worker, weights and requests stay."""
    async with Client(hurt.d.address) as d, Client(hurt.p.address) as p:
        await ask_remotely(d, 0)
        before, owner = await pids_of(d), (await pids_of(p))["mover"]
        hurt.freeze(owner)
        long = prompt(BLOCKS // 2 * B - CHUNK, 1)
        answered = await ask(d, long, 4)
        assert not answered.finished.timeline.remote
        await until_status(d, lambda s: s["ready"] and s["epoch"] == 2)
        assert (await d.ledger()).clean
        after = await pids_of(d)
        assert (after["control"], after["worker"]) == (before["control"], before["worker"])
        assert after["mover"] != before["mover"]
        hurt.thaw(owner)
        await ask_remotely(d, 2)
