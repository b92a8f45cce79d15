"""Bugs of a node, beside those of the hand-off alone (bugs.py), that a verified recording must give away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdbus.bus.wire import replace
from pdbus.connector.fetch import Fetches
from pdbus.connector.ledger import Clock, LeaseLedger
from pdbus.connector.offer import Offers
from pdbus.nodes.decode import Request, Requests, Source
from pdbus.nodes.scheduler import Scheduler, Sequence

from .bugs import BUGS
from .cluster_sim import Fault, Plan
from .cluster_world import S, Weather

Bug = Callable[[pytest.MonkeyPatch], None]

CALM = Plan(requests=6)
STORM = Plan(
    requests=10, prefill_blocks=60, decode_blocks=60, weather=Weather(0.25, 0.1, 0.3), slow_reads=0.2, failing_reads=0.3
)
DEATHS = Plan(
    requests=12,
    weather=Weather(0.1, 0.1, 0.4),
    faults=tuple(
        Fault(kind, node, at_ns=S + n * S // 4)
        for n, (kind, node) in enumerate((kind, node) for node in ("p1", "p2", "d1") for kind in ("worker", "mover"))
    ),
)
CROWD = Plan(requests=20, prefill_nodes=1, prefill_blocks=120, decode_blocks=120, horizon_ns=3 * S // 2)
LONG_STORM = STORM._replace(requests=12, horizon_ns=7 * S)
CANCELS = Plan(requests=12, rude=1.0, slow_reads=0.5)
LOST_CANCELS = Plan(requests=8, rude=1.0, weather=Weather(lost=0.6), slow_reads=0.5)

SEEDED: dict[str, tuple[Bug, Plan]] = {
    name: (BUGS[name][0], plan)
    for name, plan in {
        "decode_without_waiting_for_released": CALM,
        "claim_when_reads_are_posted": CALM,
        "claim_before_the_last_chunk": CALM,
        "a_claim_while_prefilling_is_valid": CALM,
        "any_tombstone_answers_valid": DEATHS,
        "destination_is_free_when_the_request_leaves": CANCELS,
        "blocks_are_free_while_a_step_writes_them": CALM,
        "a_try_gets_a_second_lease": STORM,
        "a_lease_is_released_twice": CALM,
        "renewal_revives_a_lease": LONG_STORM,
        "leases_survive_a_worker_restart": DEATHS,
    }.items()
}


def seeded(plan: Plan) -> Callable[[Bug], Bug]:
    def register(bug: Bug) -> Bug:
        SEEDED[bug.__name__] = bug, plan
        return bug

    return register


@seeded(CALM)
def a_wrong_generation_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """The decode node claims another lease, the prefill node does not look."""
    claim, claimed = Fetches._claim, Offers._claimed

    def other(self: Fetches, fetch: Any, now_ns: int) -> Any:
        lease = fetch.lease
        fetch.lease = replace(lease, generation=lease.generation + 1)
        return claim(self, fetch, now_ns)

    def whichever(self: Offers, event: Any, message: Any, now_ns: int) -> Any:
        held = self._ledger.of_try(message.try_)
        effects = claimed(self, event, replace(message, lease=held or message.lease), now_ns)
        answer = replace(effects[-1].message, lease=message.lease)  # type: ignore[union-attr]
        return [*effects[:-1], replace(effects[-1], message=answer)]

    patch.setattr(Fetches, "_claim", other)
    patch.setattr(Offers, "_claimed", whichever)


@seeded(STORM)
def a_retry_reads_into_the_same_blocks(patch: pytest.MonkeyPatch) -> None:
    fetch = Requests._fetch
    kept: dict[bytes, tuple[int, ...]] = {}

    def same(self: Requests, r: Request, source: Source, have: int) -> Any:
        first = kept.setdefault(r.request, r.blocks)
        asked = fetch(self, r, source, have)
        return replace(asked, blocks=first[: len(asked.blocks)])

    patch.setattr(Requests, "_fetch", same)


@seeded(STORM)
def the_first_token_of_a_retry_is_sent_too(patch: pytest.MonkeyPatch) -> None:
    right = Fetches._learn

    def wrong(self: Fetches, fetch: Any, told: Any) -> Any:
        if told.first_token is not None and fetch.try_.attempt > 1 and not fetch.finished:
            fetch.first_token = None
        return right(self, fetch, told)

    patch.setattr(Fetches, "_learn", wrong)


@seeded(LOST_CANCELS)
def a_lease_never_expires(patch: pytest.MonkeyPatch) -> None:
    right = LeaseLedger.grant

    def wrong(self: LeaseLedger, *arguments: Any) -> Any:
        lease = right(self, *arguments)
        self._timers.clear((Clock.EXPIRY, lease))
        return lease

    patch.setattr(LeaseLedger, "grant", wrong)


@seeded(CANCELS)
def a_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "next_deadline", lambda self: None)


@seeded(CALM)
def a_block_is_shared_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._advance

    def early(self: Scheduler, s: Sequence, row: Any, tokens: int) -> Any:
        for i, block_hash in enumerate(s.block_hashes[: len(s.blocks)]):
            self._pool.publish(s.blocks[i], block_hash)
        return right(self, s, row, tokens)

    patch.setattr(Scheduler, "_advance", early)


@seeded(CANCELS)
def a_cancelled_request_ends_twice(patch: pytest.MonkeyPatch) -> None:
    right = Requests.end

    def wrong(self: Requests, r: Request, reason: str, now: int, **words: Any) -> Any:
        effects = right(self, r, reason, now, **words)
        return effects * 2 if reason == "cancelled" else effects

    patch.setattr(Requests, "end", wrong)


@seeded(CROWD)
def the_mover_is_not_told_of_a_lease(patch: pytest.MonkeyPatch) -> None:
    """It would poll too seldom for a reader over TCP, and may die with it."""
    right = Offers.held
    patch.setattr(Offers, "held", lambda self: min(right(self), 1))
