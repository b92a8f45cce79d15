"""LeaseLedger: a lease ends exactly once, and only its own claim makes KV valid."""

from __future__ import annotations

import pytest

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import LeaseId, TryId
from pdbus.bus.wire import replace
from pdbus.connector.handoff import Cause, HandoffConfig
from pdbus.connector.ledger import LeaseLedger

S = 1_000_000_000
CONFIG = HandoffConfig()
TRY = TryId(node="d", incarnation=b"d1", request=b"r", attempt=1)
NEVER = 1_000 * S


def ledger_of(config: HandoffConfig = CONFIG) -> LeaseLedger:
    return LeaseLedger("p", b"p1", config)


def grant(ledger: LeaseLedger, attempt: int = 1, deadline_ns: int = NEVER, now_ns: int = 0) -> LeaseId:
    return ledger.grant(replace(TRY, attempt=attempt), (attempt,), 1, deadline_ns, now_ns)


def test_generations_count_up_and_are_never_reused() -> None:
    ledger = ledger_of()
    first = grant(ledger, 1)
    ledger.pop(first, Cause.CANCELLED, 0)
    assert (first.generation, grant(ledger, 2).generation) == (1, 2)


def test_a_try_gets_one_lease_at_most() -> None:
    ledger = ledger_of()
    ledger.pop(grant(ledger), Cause.CANCELLED, 0)
    with pytest.raises(LocalProtocolError):
        grant(ledger)


def test_a_lease_is_popped_once() -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    assert ledger.pop(lease, Cause.DONE, 0).blocks == (1,)
    with pytest.raises(LocalProtocolError, match="not held"):
        ledger.pop(lease, Cause.EXPIRED, 0)
    assert ledger.cause(lease) is Cause.DONE and len(ledger) == 0


@pytest.mark.parametrize("cause", list(Cause))
def test_a_claim_of_an_ended_lease_is_valid_only_if_it_was_done(cause: Cause) -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    ledger.pop(lease, cause, 0)
    assert ledger.claim(lease, TRY) is (cause is Cause.DONE)


def test_a_claim_of_an_unknown_lease_is_invalid() -> None:
    ledger = ledger_of()
    unknown = replace(grant(ledger), generation=9)
    assert not ledger.claim(unknown, TRY)


def test_a_claim_under_another_try_is_invalid() -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    ledger.pop(lease, Cause.DONE, 0)
    assert not ledger.claim(lease, replace(TRY, incarnation=b"d2"))


def test_renewal_moves_expiry_and_not_the_deadline() -> None:
    ledger = ledger_of()
    lease = grant(ledger, deadline_ns=50 * S)
    assert ledger.renew(lease, 29 * S)
    assert ledger.due(30 * S) is None
    assert ledger.renew(lease, 45 * S)
    assert ledger.due(50 * S) == (lease, Cause.DEADLINE)


def test_expiry_without_renewal() -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    assert ledger.next_deadline() == CONFIG.lease_ns
    assert ledger.due(CONFIG.lease_ns) == (lease, Cause.EXPIRED)


def test_renewal_never_revives() -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    ledger.pop(lease, Cause.EXPIRED, 0)
    assert not ledger.renew(lease, 0)
    assert len(ledger) == 0


def test_tombstones_are_forgotten_after_their_time() -> None:
    ledger = ledger_of()
    lease = grant(ledger)
    ledger.pop(lease, Cause.DONE, 0)
    assert ledger.due(CONFIG.tombstone_ns - 1) is None and ledger.claim(lease, TRY)
    assert ledger.due(CONFIG.tombstone_ns) is None and not ledger.claim(lease, TRY)
    assert ledger.of_try(TRY) is None and ledger.newest(TRY) is None
    assert ledger.next_deadline() is None


def test_of_too_many_tombstones_the_oldest_goes() -> None:
    ledger = ledger_of(HandoffConfig(tombstones_max=2))
    leases = [grant(ledger, n) for n in (1, 2, 3)]
    for lease in leases:
        ledger.pop(lease, Cause.CANCELLED, 0)
    assert [ledger.cause(lease) for lease in leases] == [None, Cause.CANCELLED, Cause.CANCELLED]
    assert ledger.tombstones() == 2


def test_the_newest_attempt_of_a_request_is_known() -> None:
    ledger = ledger_of()
    grant(ledger, 1)
    grant(ledger, 3)
    assert ledger.newest(replace(TRY, attempt=2)) == replace(TRY, attempt=3)
    assert ledger.newest(replace(TRY, request=b"other")) is None
