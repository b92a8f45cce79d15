"""`--kv-digest on`: what a decode node has read is compared with what the prefill node computed, however it lies."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.connector.layout import layout_of, offset

from .conftest import slab_of
from .faults import (
    CHUNK,
    GEOMETRY,
    OPTIONS,
    TCP,
    Site,
    ask,
    ask_remotely,
    pids_of,
    prompt,
    scenario,
    site_of,
    until_fetch,
    until_status,
)
from .test_tensor_parallel import LENGTHS, Ranked, lone_nodes
from .test_tensor_parallel import prompt as prompt_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


def digested(status: dict[str, Any]) -> tuple[int, int]:
    metrics = status["metrics"]
    return metrics["kv_digests_right_total"], metrics["kv_digests_wrong_total"]


@pytest.mark.long
def test_ranks_and_layouts_of_all_kinds_agree() -> None:
    """The prefill node's blocks, order and ranks are others than the decode node's."""
    with lone_nodes(Ranked) as lone:
        lone.begin(
            {"p": {"block_size": 32, "kv_layout": "NHD"}},
            {"d": {"tp": 2, "kv_layout": "HND", "kv_digest": "on"}},
            kv_blocks=256, http=False,
        )  # fmt: skip
        for length in LENGTHS:
            whole = prompt_of(length, "digest")
            assert lone.same(lone.decode[0], whole) == "p"
            if length > 32:  # a prefix is here already, which ends within one of the prefill node's blocks
                assert lone.same(lone.decode[0], [*whole[:16], *prompt_of(length, "rest")]) == "p"
        right, wrong = digested(lone.ask(lone.decode[0], lambda client: client.status()))
        assert right >= len(LENGTHS) and wrong == 0
        lone.check_clean()


@pytest.fixture
def site() -> Iterator[Site]:
    options = {**OPTIONS, "kv_digest": "on"}
    with site_of(1, 1, options=options, environment=TCP) as site:
        yield site
        site.mend()


@scenario
async def test_one_flipped_bit_is_a_failed_read(site: Site) -> None:
    """In the prefill node's memory, between the chunk and the read. The prompt is computed again, and named is what was
    wrong."""
    async with Client(site.d.address) as d, Client(site.p.address) as p:
        await ask_remotely(d, 1)
        before = digested(await d.status())
        mover = (await pids_of(p))["mover"]
        site.freeze(mover)
        task = asyncio.create_task(ask(d, prompt(2 * CHUNK, 2)))
        await until_fetch(d, lambda f: f["first_token"])
        flip_everywhere(site.p.pid, layer=1)
        site.thaw(mover)
        answered = await task
        assert answered.finished.timeline.attempts == 1 and not answered.finished.timeline.remote
        status = await until_status(d, lambda s: digested(s)[1] == before[1] + 1)
        assert digested(status) == (before[0], before[1] + 1)
        (line,) = [line for line in site.d.tail if "KV read for request" in line]
        assert line.endswith("block 0 (tokens 0 to 15) layer 1 is not what prefill-1 computed")


def flip_everywhere(control: int, layer: int) -> None:
    """One bit of one layer in each block."""
    layout = layout_of(GEOMETRY, int(OPTIONS["kv_blocks"]))
    with open(slab_of(control), "r+b") as slab, mmap.mmap(slab.fileno(), 0) as memory:
        for block in range(layout.blocks):
            memory[offset(layout, block, layer)] ^= 1
