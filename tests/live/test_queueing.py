"""Short leases, and a decode node that takes one request at a time: whoever waits long still gets a right answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import OPTIONS, B, Site, ask, prompt, scenario, site_of, until_clean

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

REQUESTS, TOKENS = 20, 200
LEASE = {"lease": "2s", "renew": "400ms", "claim": "200ms"}
ONE_AT_A_TIME = {
    "in its steps": {"max_running": 1},
    "in its blocks": {"kv_blocks": -(-(3 * B + TOKENS) // B) + 1},
}


@pytest.fixture(params=ONE_AT_A_TIME)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """1P + 1D; a request takes D 0.4 s, all of them four times a lease."""
    roles = {"decode": {"coded_step_ms": 2, **ONE_AT_A_TIME[request.param]}}
    with site_of(1, 1, options={**OPTIONS, **LEASE}, role_options=roles) as site:
        yield site
        site.mend()


@scenario
async def test_twenty_requests_at_once_get_twenty_right_answers(site: Site) -> None:
    async with Client(site.d.address) as d, Client(site.p.address) as p:
        asks = (ask(d, prompt(2 * B + i, 1), TOKENS) for i in range(REQUESTS))
        answers = await asyncio.gather(*asks)
        assert [answer.finished.timeline.remote for answer in answers] == [True] * REQUESTS
        assert {answer.finished.timeline.attempts for answer in answers} == {1}
        await until_clean(p)
