"""A prefill and a decode node die and come back on their ports, again and again, under load: the others never notice.

Their control and worker stay; their descriptors and memory do not grow with each life that they have seen; after every
return prompts are handed over with each of them again. Answers are checked token by token all along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.nodes.node_process import NodeProcess

from .faults import OPTIONS, TCP, Site, ask, pids_of, prompt, scenario, site_of, until_clean
from .test_soak import descriptors_of, rss_kib_of

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

CYCLES, WARM = 50, 10
AT_ONCE = 3  # requests under way all the time
DESCRIPTORS_MAX = 12  # more than after the first cycles: links that are just being made
GROWTH_MAX_KIB = 8192  # of a process over the cycles after the first ones: 200 KiB a life
HEALED_S = 30.0


@pytest.fixture
def site() -> Iterator[Site]:
    """2P + 2D over TCP; the first of each dies."""
    options = {**OPTIONS, "kv_blocks": 256}
    roles = {"prefill": {"coded_token_us": 100}, "decode": {"coded_step_ms": 1}}
    with site_of(2, 2, options=options, role_options=roles, environment=TCP, bound_s=500) as site:
        yield site


@scenario
async def test_fifty_lives_of_a_prefill_and_a_decode_node(site: Site) -> None:
    (p1, p2), (d1, d2) = site.cluster.prefill, site.cluster.decode
    async with Client(p2.address) as p, Client(d2.address) as d:
        before = {p2.name: await pids_of(p), d2.name: await pids_of(d)}
        stop = asyncio.Event()
        load = [asyncio.create_task(keep_asking(d, number, stop)) for number in range(AT_ONCE)]
        for cycle in range(CYCLES):
            await asyncio.gather(one_life(site, p1), one_life(site, d1))
            await handed_over(d, p1, cycle)
            async with Client(d1.address) as reborn:
                await handed_over(reborn, p1, CYCLES + cycle)
            if cycle == WARM:
                first = {name: sizes(pids) for name, pids in before.items()}
            assert not any(task.done() for task in load), load
        last = {name: sizes(pids) for name, pids in before.items()}
        stop.set()
        asked = sum(await asyncio.gather(*load))
        after = {p2.name: await pids_of(p), d2.name: await pids_of(d)}
        await until_clean(p)
        await until_clean(d)
    for name in before:
        assert [after[name][what] for what in KEPT] == [before[name][what] for what in KEPT]
        for what in KEPT:
            (files, kib), (files_now, kib_now) = first[name][what], last[name][what]
            print(f"{name} {what}: {files} -> {files_now} descriptors, {kib} -> {kib_now} KiB")
            assert files_now <= files + DESCRIPTORS_MAX
            assert kib_now <= kib + GROWTH_MAX_KIB
    print(f"{CYCLES} lives of each, {asked} requests right meanwhile")


KEPT = ("control", "worker")  # a mover may end with the one that it sends to


def sizes(pids: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {what: (descriptors_of(pids[what]), rss_kib_of(pids[what])) for what in KEPT}


async def one_life(site: Site, node: NodeProcess) -> None:
    await site.cluster.kill(node)
    await site.cluster.restart(node)


async def handed_over(d: Client, owner: NodeProcess, salt: int) -> None:
    """A prompt has been prefilled there."""
    async with asyncio.timeout(HEALED_S):
        for number in range(10_000):
            timeline = (await ask(d, prompt(40, (salt + 1) << 20 | number), 2)).finished.timeline
            if timeline.remote and timeline.prefill_node == owner.name:
                return
            await asyncio.sleep(0.02)


async def keep_asking(d: Client, number: int, stop: asyncio.Event) -> int:
    asked = 0
    while not stop.is_set():
        asked += 1
        await ask(d, prompt(20 + asked * 37 % 200, (number + 1) << 40 | asked), 20)
    return asked
