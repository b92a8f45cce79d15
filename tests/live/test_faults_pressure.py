"""Too few blocks on either side, and many requests at once: all end right, or are refused with what would fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import RequestError

from .faults import (
    OPTIONS,
    SLOW_PREFILL,
    TCP,
    B,
    Site,
    ask,
    prompt,
    read_all,
    scenario,
    site_of,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

P_BLOCKS, D_BLOCKS = 10, 12


@pytest.fixture(scope="module")
def small() -> Iterator[Site]:
    roles = {"prefill": {"kv_blocks": P_BLOCKS, **SLOW_PREFILL}, "decode": {"kv_blocks": D_BLOCKS}}
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP) as site:
        yield site


@pytest.fixture
def tight(small: Site) -> Iterator[Site]:
    """1P with 10 blocks, 1D with 12."""
    yield small
    small.mend()


@scenario
async def test_many_answers_grow_in_few_blocks(tight: Site) -> None:
    """Each fits alone, not two: the youngest gives up its blocks and is computed again, until all have ended."""
    async with Client(tight.d.address) as d:
        await asyncio.gather(*(ask(d, prompt(10 + 7 * i, 1), 100) for i in range(12)))


@scenario
async def test_a_prefill_node_without_room_costs_a_local_prefill(tight: Site) -> None:
    """Prompts that take all of its blocks, at once: who is refused is computed by the decode node."""
    async with Client(tight.d.address) as d:
        big = asyncio.create_task(ask(d, prompt(P_BLOCKS * B, 2), 4))
        small = [asyncio.create_task(ask(d, prompt(B + i, 2), 4)) for i in range(4)]
        answers = await asyncio.gather(big, *small)
        assert answers[0].finished.timeline.remote
        bigger = await ask(d, prompt(P_BLOCKS * B + 1, 3), 4)
        assert not bigger.finished.timeline.remote


@scenario
async def test_a_request_that_can_never_fit_is_refused_at_once(tight: Site) -> None:
    async with Client(tight.d.address) as d:
        with pytest.raises(RequestError, match=f"at most {D_BLOCKS * B} fit"):
            await read_all(d.generate(prompt(100, 4), max_tokens=D_BLOCKS * B - 99))
        await ask(d, prompt(100, 4), D_BLOCKS * B - 100)


def with_few(blocks: int) -> Iterator[Site]:
    """1P with room, 1D with so many blocks."""
    roles = {"prefill": SLOW_PREFILL, "decode": {"kv_blocks": blocks}}
    with site_of(1, 1, options=OPTIONS, role_options=roles, environment=TCP) as site:
        yield site
        site.mend()


@pytest.fixture
def seven() -> Iterator[Site]:
    yield from with_few(7)


@pytest.fixture
def six() -> Iterator[Site]:
    yield from with_few(6)


@pytest.mark.long
@scenario
async def test_prompts_of_four_and_three_blocks_load_at_once_into_seven(seven: Site) -> None:
    """They take all there is, and each wants one more to go on: neither waits for the other for ever."""
    async with Client(seven.d.address) as d:
        await asyncio.gather(ask(d, prompt(4 * B, 7), 20), ask(d, prompt(3 * B, 8), 20))
        await asyncio.gather(ask(d, prompt(4 * B - 1, 5), 1 + B), ask(d, prompt(3 * B - 1, 6), 1))


@pytest.mark.long
@scenario
async def test_three_answers_of_sixty_tokens_grow_in_six_blocks(six: Site) -> None:
    """Their prompts alone take all blocks: who is preempted is computed again, without a second transfer."""
    async with Client(six.d.address) as d:
        answers = await asyncio.gather(*(ask(d, prompt(2 * B, 10 + i), 60) for i in range(3)))
    assert all(answer.finished.timeline.attempts <= 1 for answer in answers)
