"""Many small hand-offs: memory, descriptors and blocks of all processes stay as they are.

How that is judged. Blocks: both ledgers are clean at the end. Descriptors: as many as after the warm-up, in every
process. Memory: what a process has at the end of each tenth, without `REMEMBERED_KIB` for each ended lease that it
remembers (these go after 60 s, at most 65,536 are kept); the median of the last three tenths is not more than
`GROWTH_MAX_KIB` above that of the three in the middle, so that what fills once does not count, and what grows with
every hand-off does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from pdbus.bus.client import Client

from .conftest import answer
from .faults import OPTIONS, Site, pids_of, prompt, scenario, site_of, until_clean, until_status

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

SHORT, ALL = 500, 20_000
AT_ONCE = 16
REMEMBERED_KIB = 1.25
GROWTH_MAX_KIB = 4096  # a leak of 1 KiB for each hand-off would be 8 MiB over the tenths compared


@pytest.fixture
def site() -> Iterator[Site]:
    with site_of(1, 1, options={**OPTIONS, "kv_blocks": 256}, bound_s=500) as site:
        yield site
        site.mend()


@pytest.mark.parametrize("handoffs", [SHORT, ALL])
@scenario
async def test_many_small_hand_offs_leave_nothing(site: Site, handoffs: int) -> None:
    async with Client(site.d.address) as d, Client(site.p.address) as p:
        pids = {
            f"{node.name} {what}": pid
            for node, client in ((site.p, p), (site.d, d))
            for what, pid in (await pids_of(client)).items()
        }
        await hand_off(d, 0, 10 * AT_ONCE)
        descriptors = {name: descriptors_of(pid) for name, pid in pids.items()}
        rss_kib: dict[str, list[int]] = {name: [] for name in pids}
        for tenth in range(10):
            await hand_off(d, 1 + tenth, handoffs // 10)
            remembered = (await p.status())["metrics"]["tombstones"]
            for name, pid in pids.items():
                kept_kib = int(remembered * REMEMBERED_KIB) if name == f"{site.p.name} control" else 0
                rss_kib[name].append(rss_kib_of(pid) - kept_kib)
        await until_clean(d)
        await until_clean(p)
        status = await until_status(d, lambda s: s["ready"])
        assert status["metrics"]["leases_held"] == 0
        assert {name: descriptors_of(pid) for name, pid in pids.items()} == descriptors
        growth = {name: int(median(all_[-3:]) - median(all_[3:6])) for name, all_ in rss_kib.items()}
        print(f"\n{handoffs} hand-offs; KiB in each tenth: {rss_kib}; growth of the last tenths: {growth}")
        if handoffs == ALL:
            assert {name: kib for name, kib in growth.items() if kib > GROWTH_MAX_KIB} == {}


async def hand_off(d: Client, salt: int, count: int) -> None:
    """So many prompts of two blocks, each prefilled elsewhere and read."""
    numbers = iter(range(count))

    async def one_after_the_other() -> None:
        for number in numbers:
            answered = await answer(d, prompt(20, (salt << 24) + number), max_tokens=2)
            assert answered.finished.timeline.remote

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


def rss_kib_of(pid: int) -> int:
    """Without shared memory: the KV fills once."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0])


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
