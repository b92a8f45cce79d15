"""A prefill node that says what cannot be, or nothing: refused with the reason, counted, and nobody else is slowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.bus.endpoint import Received
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Hello, PrefillDone, PrefillProgress, PrefillRequest, Refused, Welcome
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.layout import layout_of
from pdbus.nodes.circuits import FAILURES_MAX

from .conftest import Answered
from .faults import (
    GEOMETRY,
    OPTIONS,
    TCP,
    B,
    Site,
    Status,
    ask,
    prompt,
    scenario,
    site_of,
    until_clean,
    until_status,
)
from .hand_made import BLOCKS, WAIT_S, Owner, mostly_long, owner_for

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    with site_of(1, 1, options=OPTIONS, environment=TCP) as site:
        yield site


@pytest.fixture
def site(pair: Site) -> Iterator[Site]:
    """1P + 1D. The P is a good one, and used all along."""
    yield pair
    pair.mend()


_salts = iter(range(1, 1 << 20))


def row(status: Status, name: str) -> Status:
    return next((peer for peer in status["peers"] if peer["name"] == name), {})


def counted(status: Status, family: str, **labels: str) -> float:
    """One sample of the node's metrics; 0 while there is none."""
    samples = next(f[3] for f in status["measured"] if f[0] == f"pdbus_{family}")
    return sum(value for _, said, value in samples if labels.items() <= said.items())


async def served_by_the_good_one(d: Client) -> None:
    """Nothing goes to the bad one: every request is prefilled by the other, at the first attempt."""
    for _ in range(3):
        timeline = (await ask(d, prompt(40, next(_salts)), 2)).finished.timeline
        assert (timeline.prefill_node, timeline.attempts, timeline.remote) == ("prefill-1", 1, True)


# ---------------------------------------------------------------- what it says of its memory

LAYOUT = layout_of(GEOMETRY, BLOCKS)
GARBAGE = bytes(range(256)) * 2
BAD_AGENTS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks that overlap": ({"layout": replace(LAYOUT, block_stride=LAYOUT.block_stride - 4)}, "overlap"),
    "heads that overlap": ({"layout": replace(LAYOUT, head_stride=LAYOUT.head_stride // 2)}, "overlap"),
    "a negative stride": ({"layout": replace(LAYOUT, slot_stride=-LAYOUT.slot_stride)}, "negative"),
    "a layer outside": ({"layout": replace(LAYOUT, starts=(0, LAYOUT.region_bytes))}, "the last byte is number"),
    "another geometry than its hello": ({"layout": replace(LAYOUT, head_dim=4)}, "says head_dim 4, its hello 8"),
    "more blocks than memory": ({"blocks": BLOCKS + 1}, "but its region has"),
    "garbage for metadata": ({"metadata": GARBAGE, "metadata_digest": prompt_digest(GARBAGE)}, ""),
    "metadata that was damaged": ({"metadata": GARBAGE}, "does not match its digest"),
}


@pytest.mark.parametrize("bad", mostly_long(BAD_AGENTS, "blocks that overlap"))
@scenario
async def test_memory_that_cannot_be_read_is_refused_with_the_reason(site: Site, bad: str) -> None:
    changes, reason = BAD_AGENTS[bad]
    async with Client(site.d.address) as d, owner_for(site.d, f"bad-{next(_salts)}", **changes) as owner:
        before = counted(await d.status(), "agents_refused")
        (joined,) = await d.connect([owner.address])
        assert not joined.ok and reason in joined.detail
        status = await d.status()
        assert row(status, owner.name)["detail"] == joined.detail
        assert counted(status, "agents_refused") == before + 1
        await served_by_the_good_one(d)
        assert not any(isinstance(heard.message, PrefillRequest) for heard in owner.heard)
        await d.disconnect([owner.name])


@pytest.mark.long
@scenario
async def test_a_node_cannot_change_its_layout(site: Site) -> None:
    """Readers have planned by what it said first: only a restart may change it."""
    async with Client(site.d.address) as d, owner_for(site.d, f"bad-{next(_salts)}") as owner:
        (joined,) = await d.connect([owner.address])
        assert joined.ok, joined.detail
        before = counted(await d.status(), "nodes_refused")
        link = owner.endpoint.connect(site.d.address)
        other = replace(owner.hello, geometry=replace(GEOMETRY, layout="HND"))
        refused = (await owner.endpoint.ask(link, other, (Refused, Welcome), WAIT_S)).message
        assert isinstance(refused, Refused) and "its KV geometry is another" in refused.reason
        assert counted(await d.status(), "nodes_refused") == before + 1
        await d.disconnect([owner.name])


# ---------------------------------------------------------------- what it says of a prompt


def announcing(begin: int, blocks: int, **changes: Any) -> Callable[[Owner, Received], None]:
    """All is computed, in so many blocks from `begin` on, whatever was asked."""

    def answer(owner: Owner, asked: Received) -> None:
        message: Any = asked.message
        said: dict[str, Any] = {
            "try_": message.try_, "lease": owner.lease(), "ready": message.prompt_tokens,
            "blocks": pack_u32(range(begin, begin + blocks)),
        }  # fmt: skip
        owner.tell(asked, PrefillDone(**{**said, **changes}))

    return answer


def ids_that_are_none(owner: Owner, asked: Received) -> None:
    """Half a block id."""
    message: Any = asked.message
    owner.tell(asked, PrefillProgress(try_=message.try_, lease=owner.lease(), ready=B, blocks=b"\x01\x02"))


WORDS: dict[str, tuple[Callable[[Owner, Received], None], str]] = {
    "block ids past the end": (announcing(BLOCKS - 1, 3), "read failed"),
    "the largest block ids": (announcing((1 << 32) - 3, 3), "read failed"),
    "too few blocks for the prompt": (announcing(0, 2), "protocol"),
    "too many blocks for the prompt": (announcing(0, 4), "protocol"),
    "no blocks": (announcing(0, 0), "protocol"),
    "half a block id": (ids_that_are_none, "protocol"),
    "more tokens than the prompt has": (announcing(0, 4, ready=4 * B), "protocol"),
    "fewer tokens than nothing": (announcing(0, 3, ready=-1), "protocol"),
    "done before the end": (announcing(0, 2, ready=2 * B), "protocol"),
}


@pytest.mark.parametrize("words", mostly_long(WORDS, "block ids past the end"))
@scenario
async def test_announcements_that_cannot_be_fail_the_attempt_alone(site: Site, words: str) -> None:
    say, cause = WORDS[words]
    async with Client(site.d.address) as d, owner_for(site.d, f"bad-{next(_salts)}") as owner:
        owner.answers[PrefillRequest] = lambda asked: say(owner, asked)
        before = await d.status()
        (joined,) = await d.connect([owner.address])
        assert joined.ok, joined.detail
        while not any(isinstance(heard.message, PrefillRequest) for heard in owner.heard):
            await ask(d, prompt(2 * B + 3, next(_salts)), 2)
        after = await d.status()
        assert counted(after, "attempts_failed", cause=cause) == counted(before, "attempts_failed", cause=cause) + 1
        await until_clean(d)
        await d.disconnect([owner.name])


# ---------------------------------------------------------------- and nothing


@scenario
async def test_a_node_that_answers_hello_and_never_again(site: Site) -> None:
    """Its requests go to the other one after two silences. Everybody else's are done while these wait; and since it
    failed three in a row it is not asked any more."""
    async with Client(site.d.address) as d, owner_for(site.d, f"mute-{next(_salts)}") as owner:
        (joined,) = await d.connect([owner.address])
        assert joined.ok, joined.detail
        owner.answers.clear()
        before = counted(await d.status(), "attempts_failed", cause="no answer")
        asking = [asyncio.create_task(ask(d, prompt(40, next(_salts)), 2)) for _ in range(2 * FAILURES_MAX)]
        done, waiting = set[asyncio.Task[Answered]](), set(asking)
        while len(done) < FAILURES_MAX:
            some, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= some
        assert {task.result().finished.timeline.attempts for task in done} == {1}
        assert len(waiting) == FAILURES_MAX
        answers = [await task for task in waiting]
        assert {(a.finished.timeline.attempts, a.finished.timeline.prefill_node) for a in answers} == {(2, "prefill-1")}
        status = await d.status()
        assert row(status, owner.name)["circuit"] == "open"
        assert counted(status, "circuits_opened", peer=owner.name) == 1
        assert counted(status, "peer_circuit", peer=owner.name) == 2
        assert counted(status, "attempts_failed", cause="no answer") == before + FAILURES_MAX
        await d.disconnect([owner.name])


@pytest.mark.long
@scenario
async def test_handshakes_that_hang_are_on_nobodys_path(site: Site) -> None:
    """Many addresses take the connection and answer no hello. Meanwhile another joins, and requests are served."""
    async with Client(site.d.address) as d, owner_for(site.d, f"late-{next(_salts)}") as owner:
        mutes = [Owner(f"mute-{next(_salts)}", owner.hello, None) for _ in range(4)]
        try:
            for mute in mutes:
                mute.answers.clear()
            calling = asyncio.create_task(d.connect([mute.address for mute in mutes]))
            for mute in mutes:
                await mute.first(Hello)
            async with Client(site.d.address) as other:
                (joined,) = await other.connect([owner.address])
                assert joined.ok, joined.detail
                await other.disconnect([owner.name])
                await served_by_the_good_one(other)
            assert not calling.done()
            assert [sum(isinstance(h.message, Hello) for h in mute.heard) for mute in mutes] == [1] * len(mutes)
            outcomes = await calling
            assert [outcome.ok for outcome in outcomes] == [False] * len(mutes)
        finally:
            await d.disconnect([mute.address for mute in mutes])
            for mute in mutes:
                mute.endpoint.close()
        await until_status(d, lambda s: all(p["state"] != "up" for p in s["peers"] if "mute" in p["name"]))
