"""References to KV made by hand and sent to real nodes: whatever is not held now is refused, with the cause.

A reference is what a decode node claims: a lease (node, incarnation, epoch, generation) and the try it was given to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.bus.endpoint import Received
from pdbus.bus.messages import (
    LeaseId,
    LeaseReleased,
    PrefillCancel,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    StalePeer,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import pack_u32, replace, unpack_u32

from .faults import OPTIONS, TCP, B, Site, ask, prompt, scenario, site_of, until_clean
from .hand_made import Owner, Reader, mostly_long, owner_for, reader_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

BLOCKS = 24  # on either node: a few prompts use all of them again


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    with site_of(1, 1, options={**OPTIONS, "kv_blocks": BLOCKS}, environment=TCP) as site:
        yield site


@pytest.fixture
def site(pair: Site) -> Iterator[Site]:
    """1P + 1D, with short leases and few blocks."""
    yield pair
    pair.mend()


_salts = iter(range(1, 1 << 20))
Reference = tuple[TryId, LeaseId]
Make = Callable[[Reader, PrefillDone], Awaitable[Reference]]


async def unknown(reader: Reader, done: PrefillDone) -> Reference:
    return done.try_, replace(done.lease, generation=1 << 40)


async def wrong_generation(reader: Reader, done: PrefillDone) -> Reference:
    """That of another prompt, which is held."""
    return done.try_, (await reader.asks(B, next(_salts))).lease


async def wrong_epoch(reader: Reader, done: PrefillDone) -> Reference:
    return done.try_, replace(done.lease, epoch=done.lease.epoch + 1)


async def of_another_life(reader: Reader, done: PrefillDone) -> Reference:
    return done.try_, replace(done.lease, incarnation=bytes(16))


async def of_another_node(reader: Reader, done: PrefillDone) -> Reference:
    return done.try_, replace(done.lease, node="elsewhere")


async def used_by_another_try(reader: Reader, done: PrefillDone) -> Reference:
    """What was confirmed to one is nothing to the next."""
    assert (await reader.claims(done.try_, done.lease)).valid
    return replace(done.try_, attempt=2), done.lease


async def used_by_another_request(reader: Reader, done: PrefillDone) -> Reference:
    assert (await reader.claims(done.try_, done.lease)).valid
    return replace(done.try_, request=bytes(16)), done.lease


async def expired(reader: Reader, done: PrefillDone) -> Reference:
    await reader.first(PrefillFailed, lambda failed: failed.lease == done.lease)
    return done.try_, done.lease


async def blocks_since_reused(reader: Reader, done: PrefillDone) -> Reference:
    """They hold another prompt's KV, under leases that are held."""
    await expired(reader, done)
    again = [await reader.asks(BLOCKS // 2 * B, next(_salts)) for _ in range(2)]
    assert set(unpack_u32(done.blocks)) <= {block for other in again for block in unpack_u32(other.blocks)}
    return done.try_, done.lease


async def cancelled(reader: Reader, done: PrefillDone) -> Reference:
    cancel = PrefillCancel(try_=done.try_, lease=done.lease)
    await reader.requests(cancel, PrefillCancelled)
    return done.try_, done.lease


async def superseded(reader: Reader, done: PrefillDone) -> Reference:
    """The request has been asked again, as its second attempt."""
    await reader.asks(2 * B, next(_salts), attempt=2, request=done.try_.request)
    return done.try_, done.lease


STALE: dict[Make, str] = {
    unknown: "unknown",
    wrong_generation: "unknown",
    wrong_epoch: "unknown",
    of_another_life: "unknown",
    of_another_node: "unknown",
    used_by_another_try: "done",
    used_by_another_request: "done",
    expired: "expired",
    blocks_since_reused: "expired",
    cancelled: "cancelled",
    superseded: "superseded",
}


LONG = (expired,)  # as are the blocks that were reused


@pytest.mark.parametrize(
    ("make", "cause"),
    [pytest.param(m, c, id=m.__name__, marks=[pytest.mark.long] if m in LONG else []) for m, c in STALE.items()],
)
@scenario
async def test_a_stale_reference_is_refused_with_its_cause(site: Site, make: Make, cause: str) -> None:
    """Again and again: a claim that was refused never becomes valid."""
    async with reader_of(site.p) as reader:
        done = await reader.asks(2 * B + 3, next(_salts))
        try_, lease = await make(reader, done)
        for _ in range(2):
            released = await reader.claims(try_, lease)
            assert (released.valid, released.cause, released.lease) == (False, cause, lease)


@scenario
async def test_a_reference_is_valid_as_often_as_its_own_try_asks(site: Site) -> None:
    """The answer may be lost, and is the same when it is asked for again; the blocks are released once."""
    async with reader_of(site.p) as reader, Client(site.p.address) as p:
        done = await reader.asks(2 * B + 3, next(_salts))
        assert [(await reader.claims(done.try_, done.lease)).valid for _ in range(3)] == [True] * 3
        await until_clean(p)


@scenario
async def test_a_reference_to_an_earlier_life_of_the_node_is_answered_with_the_present_one(site: Site) -> None:
    async with reader_of(site.p) as reader:
        done = await reader.asks(B, next(_salts))
        claim = TransferDone(try_=done.try_, lease=done.lease)
        reader.endpoint.send(reader.link, claim, to=reader.p, to_inc=bytes(16))
        stale = (await reader.first(StalePeer)).message
        assert isinstance(stale, StalePeer) and stale.current == reader.p_incarnation


# ---------------------------------------------------------------- what a decode node makes of them


def claim_refused(cause: str) -> Callable[[Owner, Received], None]:
    def answer(owner: Owner, claimed: Received) -> None:
        claim: Any = claimed.message
        owner.tell(claimed, LeaseReleased(try_=claim.try_, lease=claim.lease, valid=False, cause=cause))

    return answer


def valid_for_another_lease(owner: Owner, claimed: Received) -> None:
    """Which says nothing of the one that was claimed."""
    claim: Any = claimed.message
    owner.tell(claimed, LeaseReleased(try_=claim.try_, lease=owner.lease(99), valid=True, cause="done"))


def valid_for_another_try(owner: Owner, claimed: Received) -> None:
    claim: Any = claimed.message
    other = replace(claim.try_, attempt=claim.try_.attempt + 1)
    owner.tell(claimed, LeaseReleased(try_=other, lease=claim.lease, valid=True, cause="done"))


REFUSALS: dict[str, Callable[[Owner, Received], None]] = {
    **{cause: claim_refused(cause) for cause in ("unknown", "done", "expired", "superseded")},
    "valid, but another lease": valid_for_another_lease,
    "valid, but another try": valid_for_another_try,
}


@pytest.mark.parametrize("refusal", mostly_long(REFUSALS, "expired"))
@scenario
async def test_no_token_comes_of_kv_that_was_not_confirmed(site: Site, refusal: str) -> None:
    """It was read, every byte of it, and is nobody's: the prompt is computed here instead."""
    async with Client(site.d.address) as d, owner_for(site.d, f"owner-{next(_salts)}") as owner:
        owner.answers[PrefillRequest] = lambda asked: announce(owner, asked)
        owner.answers[TransferDone] = lambda claimed: REFUSALS[refusal](owner, claimed)
        (joined,) = await d.connect([owner.address])
        assert joined.ok, joined.detail
        asking = asyncio.create_task(until_asked(owner, d))
        await owner.first(TransferDone)
        await asking
        await d.disconnect([owner.name])


def announce(owner: Owner, asked: Received) -> None:
    """All is computed, in the first blocks."""
    message: Any = asked.message
    tokens = message.prompt_tokens
    first, end = message.have // B, -(-tokens // B)
    owner.tell(
        asked,
        PrefillDone(try_=message.try_, lease=owner.lease(), ready=tokens, blocks=pack_u32(range(first, end))),
    )


async def until_asked(owner: Owner, d: Client) -> None:
    """Ask, right answers all, until it was the hand-made node's turn and that answer is there."""
    while True:
        asked_before = any(isinstance(heard.message, PrefillRequest) for heard in owner.heard)
        await ask(d, prompt(2 * B + 3, next(_salts)), 4)
        if asked_before or any(isinstance(heard.message, TransferDone) for heard in owner.heard):
            return
