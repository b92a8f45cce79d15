"""What the owner of a bearer key may ask for: one who asks too much waits, nobody else does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pdbus.nodes.http.app import create_app
from pdbus.nodes.http.keys import HttpKeys
from pdbus.nodes.http.quotas import Limits, Quota, RateLimited

from tests.fake_client import FakeClient

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
PROMPT = {"prompt": "hi"}


def refused_for_ms(quota: Quota, limits: Limits, now_s: float) -> int:
    with pytest.raises(RateLimited) as caught:
        quota.begin(limits, now_s)
    return caught.value.retry_after_ms


def test_as_many_as_allowed_are_under_way() -> None:
    quota, limits = Quota(), Limits(at_once=2)
    quota.begin(limits, 0)
    quota.begin(limits, 0)
    assert refused_for_ms(quota, limits, 0) == 1000
    quota.end()
    quota.begin(limits, 0)


def test_a_minutes_requests_come_back_evenly() -> None:
    quota, limits = Quota(), Limits(per_minute=6)
    for _ in range(6):
        quota.begin(limits, 100)
    assert refused_for_ms(quota, limits, 100) == 10_000
    assert refused_for_ms(quota, limits, 107) == 3000
    quota.begin(limits, 110)
    assert refused_for_ms(quota, limits, 110) == 10_000
    for _ in range(6):
        quota.begin(limits, 1000)


def test_one_that_is_refused_costs_nothing() -> None:
    """Else a client that retries at once would never be served again."""
    quota, limits = Quota(), Limits(per_minute=1)
    quota.begin(limits, 0)
    for second in range(1, 60):
        assert refused_for_ms(quota, limits, second) == pytest.approx((60 - second) * 1000, abs=1)
    quota.begin(limits, 60)


def test_without_limits_nothing_is_refused() -> None:
    quota = Quota()
    for _ in range(10_000):
        quota.begin(Limits(), 0)


def test_a_limit_that_is_lowered_holds_at_once() -> None:
    quota = Quota()
    for _ in range(4):
        quota.begin(Limits(at_once=4, per_minute=60), 0)
    assert refused_for_ms(quota, Limits(at_once=2), 0) == 1000


async def posted(web: httpx.AsyncClient, key: str) -> httpx.Response:
    return await web.post("/v1/completions", json=PROMPT, headers={"Authorization": f"Bearer {key}"})


def run(path: Path, lines: str, client: FakeClient, *keys: str) -> list[httpx.Response]:
    """One request after the other with these keys."""
    file = path / "http.keys"
    file.touch(0o600)
    file.write_text(lines)

    async def all_of_them() -> list[httpx.Response]:
        app = create_app(client, keys=HttpKeys(str(file)))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
            return [await posted(web, key) for key in keys]

    return asyncio.run(all_of_them())


def test_who_asks_too_much_gets_429_and_others_are_served(tmp_path: Path) -> None:
    lines = f"alice {ALICE} per-minute=1\nbob {BOB}\n"
    first, second, other = run(tmp_path, lines, FakeClient(), ALICE, ALICE, BOB)
    assert (first.status_code, second.status_code, other.status_code) == (200, 429, 200)
    assert 55 <= int(second.headers["retry-after"]) <= 60 and second.headers["connection"] == "close"
    assert second.json()["error"] == {
        "message": "this key may ask for 1 request a minute",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


def test_two_keys_of_one_name_share_its_limits(tmp_path: Path) -> None:
    lines = f"alice {ALICE} per-minute=1\nalice {BOB} per-minute=1\n"
    assert [r.status_code for r in run(tmp_path, lines, FakeClient(), ALICE, BOB)] == [200, 429]


def test_what_has_ended_is_not_under_way(tmp_path: Path) -> None:
    """Also what ended with an error."""
    lines = f"alice {ALICE} at-once=1\n"
    assert [r.status_code for r in run(tmp_path, lines, FakeClient(), ALICE, ALICE, ALICE)] == [200, 200, 200]


def test_while_one_is_under_way_the_next_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "http.keys"
    file.touch(0o600)
    file.write_text(f"alice {ALICE} at-once=1\n")

    async def scenario() -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        class Slow(FakeClient):
            async def status(self) -> dict[str, object]:
                began.set()
                await go_on.wait()
                return await super().status()

        app = create_app(Slow(), keys=HttpKeys(str(file)))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
            slow = asyncio.create_task(posted(web, ALICE))
            await began.wait()
            refused = await posted(web, ALICE)
            go_on.set()
            served = await slow
        assert (refused.status_code, served.status_code) == (429, 200)
        assert refused.json()["error"]["message"] == "this key may have 1 request under way"

    asyncio.run(scenario())
