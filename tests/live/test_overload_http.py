"""Ten times as many HTTP requests as a node can serve: who finds no place is told at once, and when to come back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from pdbus.bus.client import Client

from .faults import OPTIONS, Site, ask, prompt, read_all, scenario, site_of, until_clean, until_status

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(200)]

RUNNING, TOKENS, STEP_MS = 8, 40, 10  # some 20 requests a second
PER_SECOND, SECONDS = 200, 8
TICK_S = 0.1
ANSWER_S = 10.0  # a refusal that waits for its turn in the queue would take a minute
WAITING_MAX = 1024  # CoreConfig.waiting_max
FILLING = WAITING_MAX + 2 * RUNNING


@pytest.fixture
def site() -> Iterator[Site]:
    roles = {"decode": {"coded_step_ms": STEP_MS, "max_running": RUNNING}}
    with site_of(1, 1, options=OPTIONS, role_options=roles, bound_s=150) as site:
        yield site
        site.mend()


class Asked:
    """Requests over a connection each, and what was answered. Those that got a place are left waiting."""

    def __init__(self, http: str) -> None:
        self._host, _, port = http.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self.answers: Counter[int] = Counter()  # by status
        self.without_advice = 0  # refusals that do not say when to come back
        self.tasks: set[asyncio.Task[None]] = set()

    def ask(self, number: int) -> None:
        self.tasks.add(asyncio.create_task(self._ask(number)))

    async def answer(self, number: int) -> tuple[int, bytes, bytes]:
        """Status, head and body."""
        asked = {"prompt": prompt(20, number), "max_tokens": TOKENS, "stream": number % 2 == 1}
        body = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            got, _, rest = (await reader.read()).partition(b"\r\n\r\n")
            return int(got.split()[1]), got.lower(), rest
        finally:
            writer.close()

    async def _ask(self, number: int) -> None:
        status, head, _ = await self.answer(number)
        self.answers[status] += 1
        self.without_advice += status == 429 and b"\r\nretry-after: " not in head


@scenario
async def test_who_finds_no_place_gets_429_at_once_and_is_told_when_to_come_back(site: Site) -> None:
    asked = Asked(site.d.http)
    async with Client(site.d.address) as d:
        filling = [
            asyncio.create_task(read_all(d.generate(prompt(20, 1 << 20 | number), max_tokens=TOKENS)))
            for number in range(FILLING)
        ]
        await until_status(d, lambda s: s["metrics"]["requests_waiting"] >= WAITING_MAX - RUNNING)
        for number in range(PER_SECOND * SECONDS):
            asked.ask(number)
            if number % int(PER_SECOND * TICK_S) == 0:
                await asyncio.sleep(TICK_S)
        await asyncio.wait(asked.tasks, timeout=ANSWER_S)
        waiting = [task for task in asked.tasks if not task.done()]
        print(f"\n{dict(asked.answers)}, {len(waiting)} got a place in the queue")
        assert set(asked.answers) <= {200, 429} and asked.without_advice == 0
        assert asked.answers[429] > PER_SECOND * SECONDS // 2
        assert len(waiting) + asked.answers[200] < PER_SECOND * SECONDS // 4, "a refusal waits"
        for task in (*waiting, *filling):
            task.cancel()
        await asyncio.gather(*asked.tasks, *filling, return_exceptions=True)
    async with Client(site.d.address) as d:
        await until_clean(d)
        assert (await asked.answer(0))[0] == 200
        await ask(d, prompt(20, 2), 4)
