"""Bugs that the exploration must find. Each breaks one rule of the protocol, as small as it could slip in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdbus.bus.wire import replace
from pdbus.connector.attempt import Clock, Fetch
from pdbus.connector.fetch import Fetches
from pdbus.connector.handoff import Cause, Fetched, FirstTokenKnown, Holder, ReadsFinished
from pdbus.connector.ledger import Grant, LeaseLedger
from pdbus.connector.offer import Offers
from pdbus.connector.pool import BlockPool
from pdbus.connector.transfer import Heard, Transfers

from tests.sim.network import Plan
from tests.sim.nodes import DecodeNode

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]

QUIET = Plan(prompt_blocks=1, faults_max=0)  # cancelled at any moment
SMALL = Plan(prompt_blocks=1, cancel=False)
TWO_FAULTS = Plan(prompt_blocks=1, cancel=False, faults_max=2)
TWO_TIMEOUTS = TWO_FAULTS._replace(only=("time out",))

BUGS: dict[str, tuple[Bug, Plan]] = {}


def found_in(plan: Plan) -> Callable[[Bug], Bug]:
    def register(bug: Bug) -> Bug:
        BUGS[bug.__name__] = bug, plan
        return bug

    return register


# ---------------------------------------------------------------- validity (R1, R2, R6)


@found_in(SMALL)
def decode_without_waiting_for_released(patch: Patch) -> None:
    right = Fetches._claim_if_complete

    def wrong(self: Fetches, fetch: Fetch, now_ns: int) -> list[Any]:
        effects = right(self, fetch, now_ns)
        if any(isinstance(effect, ReadsFinished) for effect in effects):
            effects.append(Fetched(request=fetch.try_.request, attempt=fetch.try_.attempt))
        return effects

    patch.setattr(Fetches, "_claim_if_complete", wrong)


@found_in(QUIET)
def claim_when_reads_are_posted(patch: Patch) -> None:
    right = Fetches._claim_if_complete

    def wrong(self: Fetches, fetch: Fetch, now_ns: int) -> list[Any]:
        reading, fetch.reading = fetch.reading, {}
        effects = right(self, fetch, now_ns)
        fetch.reading = reading
        return effects

    patch.setattr(Fetches, "_claim_if_complete", wrong)


@found_in(Plan(faults_max=0))
def claim_before_the_last_chunk(patch: Patch) -> None:
    right = Fetches._claim_if_complete

    def wrong(self: Fetches, fetch: Fetch, now_ns: int) -> list[Any]:
        finished, fetch.finished = fetch.finished, fetch.posted > fetch.asked.have
        effects = right(self, fetch, now_ns)
        fetch.finished = finished
        return effects

    patch.setattr(Fetches, "_claim_if_complete", wrong)


@found_in(SMALL)
def any_tombstone_answers_valid(patch: Patch) -> None:
    patch.setattr(LeaseLedger, "claim", lambda self, lease, try_: lease in self._ended)


@found_in(TWO_FAULTS)
def unknown_lease_answers_valid(patch: Patch) -> None:
    right = LeaseLedger.claim
    patch.setattr(LeaseLedger, "claim", lambda self, lease, try_: lease not in self._ended or right(self, lease, try_))


@found_in(TWO_TIMEOUTS)
def late_released_is_obeyed_by_the_next_attempt(patch: Patch) -> None:
    right = Fetches._released

    def wrong(self: Fetches, event: Any, released: Any, now_ns: int) -> list[Any]:
        fetch = self._fetches.get(released.try_.request)
        if fetch is not None and fetch.lease is not None and released.valid:
            released = replace(released, try_=fetch.try_, lease=fetch.lease)
            event = replace(event, node=fetch.asked.node, incarnation=fetch.asked.incarnation)
        return right(self, event, released, now_ns)

    patch.setattr(Fetches, "_released", wrong)


# ---------------------------------------------------------------- blocks (R5, R7)


@found_in(QUIET)
def destination_is_free_when_the_request_leaves(patch: Patch) -> None:
    right = Transfers.hear

    def wrong(self: Transfers, read: int, heard: Heard) -> Any:
        transfer = right(self, read, heard)
        if heard is Heard.LEFT and transfer is not None:
            self._owner.drop(transfer.target, Holder.IN_FLIGHT)
        return transfer

    patch.setattr(Transfers, "hear", wrong)


@found_in(SMALL)
def retry_reads_into_the_same_blocks(patch: Patch) -> None:
    def wrong(self: DecodeNode, failed: Any) -> Any:
        blocks = self.held
        asked = self._next_attempt()
        if asked is None:
            return None
        self.pool.drop(self.held, Holder.HELD)
        self.held, self.memory = blocks, dict.fromkeys(blocks)
        return replace(asked, blocks=blocks)

    patch.setattr(DecodeNode, "_failed", wrong)


@found_in(QUIET)
def blocks_are_free_while_a_step_writes_them(patch: Patch) -> None:
    right = BlockPool.hold

    def wrong(self: BlockPool, blocks: Any, holder: Holder) -> None:
        if holder is not Holder.IN_STEP:
            right(self, blocks, holder)

    patch.setattr(BlockPool, "hold", wrong)


# ---------------------------------------------------------------- leases (R3, R4, R5)


@found_in(SMALL)
def a_try_gets_a_second_lease(patch: Patch) -> None:
    right = LeaseLedger.of_try

    def wrong(self: LeaseLedger, try_: Any) -> Any:
        lease = right(self, try_)
        if lease is not None and lease in self._ended:
            self._forget(lease)
            return None
        return lease

    patch.setattr(LeaseLedger, "of_try", wrong)
    patch.setattr(Fetches, "_told_too_late", lambda self, event, told: [])  # which would cancel it


@found_in(QUIET)
def a_lease_is_released_twice(patch: Patch) -> None:
    right, move = LeaseLedger.pop, Offers._move

    def wrong(self: LeaseLedger, lease: Any, cause: Cause, now_ns: int) -> Grant:
        grant = self._held[lease]
        if lease not in self._ended:
            right(self, lease, cause, now_ns)
        self._held[lease] = grant
        return grant

    patch.setattr(LeaseLedger, "pop", wrong)
    patch.setattr(Offers, "_move", lambda self, offer, heard: None if heard == "popped" else move(self, offer, heard))


@found_in(Plan(prompt_blocks=1, faults_max=0, renew=True))
def renewal_revives_a_lease(patch: Patch) -> None:
    right = Offers._renewed

    def wrong(self: Offers, event: Any, entry: Any, now_ns: int) -> Any:
        lease = self._ledger.of_try(entry.try_)
        if lease is not None and lease in self._ledger._ended:
            self._ledger._forget(lease)
            self._ledger._held[lease] = Grant(lease=lease, try_=entry.try_, blocks=(), granted_ns=now_ns)
        return right(self, event, entry, now_ns)

    patch.setattr(Offers, "_renewed", wrong)


@found_in(SMALL)
def leases_survive_a_worker_restart(patch: Patch) -> None:
    def wrong(self: Offers, event: Any, now_ns: int) -> list[Any]:
        self.epoch = event.epoch
        return []

    patch.setattr(Offers, "_epoch_began", wrong)


@found_in(Plan(faults_max=0))
def a_claim_while_prefilling_is_valid(patch: Patch) -> None:
    """With a reader that claims too early, which P has to see through."""
    claim_before_the_last_chunk(patch)
    right = Offers._end

    def wrong(self: Offers, offer: Any, cause: Cause, now_ns: int, told: str = "") -> list[Any]:
        return right(self, offer, Cause.DONE if cause is Cause.PROTOCOL else cause, now_ns, told)

    patch.setattr(Offers, "_end", wrong)


# ---------------------------------------------------------------- first token and waiting (R8)


@found_in(SMALL)
def first_token_of_the_retry_is_sent_too(patch: Patch) -> None:
    right = Fetches._learn

    def wrong(self: Fetches, fetch: Fetch, told: Any) -> list[Any]:
        sent, fetch.first_token = fetch.first_token, None
        effects = right(self, fetch, told)
        fetch.first_token = fetch.first_token or sent
        if sent == fetch.first_token:
            effects = [effect for effect in effects if not isinstance(effect, FirstTokenKnown)]
        return effects

    patch.setattr(Fetches, "_learn", wrong)


@found_in(SMALL)
def nothing_bounds_the_wait_for_accepted(patch: Patch) -> None:
    right = Fetches._ask

    def wrong(self: Fetches, fetch: Fetch, now_ns: int) -> Any:
        ask = right(self, fetch, now_ns)
        self._clocks.clear((Clock.ANSWER, fetch.try_.request))
        return ask

    patch.setattr(Fetches, "_ask", wrong)


@found_in(SMALL)
def nothing_bounds_the_wait_for_released(patch: Patch) -> None:
    right = Fetches._claim

    def wrong(self: Fetches, fetch: Fetch, now_ns: int) -> Any:
        claim = right(self, fetch, now_ns)
        self._clocks.clear((Clock.CLAIM, fetch.try_.request))
        return claim

    patch.setattr(Fetches, "_claim", wrong)


@found_in(SMALL)
def leaving_never_gives_up(patch: Patch) -> None:
    """No judgement by renewals: a prefill node that lost everything is waited for until the deadline."""
    right = Fetches._asked

    def wrong(self: Fetches, event: Any, now_ns: int) -> list[Any]:
        effects = right(self, event, now_ns)
        self._clocks.clear((Clock.RENEWED, event.request))
        self._clocks.clear((Clock.DEADLINE, event.request))
        return effects

    patch.setattr(Fetches, "_asked", wrong)
    patch.setattr(Fetches, "_owner_epoch", lambda self, event, now_ns: [])
    patch.setattr(Fetches, "_refused", lambda self, event, failed, now_ns: [])
    patch.setattr(Fetches, "_renewed", lambda self, event, entry, now_ns: [])
