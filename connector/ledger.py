"""LeaseLedger: who may read which blocks until when, on the prefill node. Every lease ends in exactly one pop.

Theory of operation. One generation counter per incarnation names leases and is never reused, so that a lease names
one unbroken promise. An ended lease leaves a tombstone with its cause, which answers what comes late:

    absent -grant-> held        held -renew-> held          held -pop(any cause)-> ended(cause), once
    ended -claim-> valid only if the cause is done           absent -claim-> invalid
    ended, absent -renew-> not held                          ended -tombstone time, or too many-> absent

Expiry and the request's deadline are for liveness only: no rule reads a clock to decide that KV is valid.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.messages import LeaseId, TryId
from pdbus.bus.wire import Declared

from .handoff import Cause, HandoffConfig
from .timers import Timers

RequestKey = tuple[str, bytes, bytes]  # reader's node, incarnation, request id


class Grant(Declared):
    """A lease that is held."""

    lease: LeaseId
    try_: TryId
    blocks: tuple[int, ...]
    granted_ns: int


class Tombstone(Declared):
    try_: TryId
    cause: Cause


class Clock(StrEnum):
    """What a timer of the ledger is for."""

    EXPIRY = "expiry"
    DEADLINE = "deadline"
    TOMBSTONE = "tombstone"


ENDS: dict[Clock, Cause] = {Clock.EXPIRY: Cause.EXPIRED, Clock.DEADLINE: Cause.DEADLINE}


class LeaseLedger:
    """The leases of one incarnation of one prefill node. Holds no blocks itself; it says whose they are."""

    def __init__(self, node: str, incarnation: bytes, config: HandoffConfig) -> None:
        self.node = node
        self.incarnation = incarnation
        self._config = config
        self._generation = 0
        self._held: dict[LeaseId, Grant] = {}
        self._ended: OrderedDict[LeaseId, Tombstone] = OrderedDict()  # oldest first
        self._by_try: dict[TryId, LeaseId] = {}  # held or ended
        self._newest: dict[RequestKey, TryId] = {}  # the highest attempt granted and not forgotten
        self._timers: Timers[tuple[Clock, LeaseId]] = Timers()

    def __len__(self) -> int:
        """How many leases are held."""
        return len(self._held)

    # ------------------------------------------------------------ transitions

    def grant(self, try_: TryId, blocks: tuple[int, ...], epoch: int, deadline_ns: int, now_ns: int) -> LeaseId:
        """A new lease. Raises LocalProtocolError when the try has or had one: it gets one at most."""
        if try_ in self._by_try:
            raise LocalProtocolError(f"attempt {try_.attempt} of {try_.request.hex()} has had its lease")
        self._generation += 1
        lease = LeaseId(node=self.node, incarnation=self.incarnation, epoch=epoch, generation=self._generation)
        self._held[lease] = Grant(lease=lease, try_=try_, blocks=blocks, granted_ns=now_ns)
        self._by_try[try_] = lease
        self._newest[request_key(try_)] = try_
        self._timers.set((Clock.EXPIRY, lease), now_ns + self._config.lease_ns)
        self._timers.set((Clock.DEADLINE, lease), deadline_ns)
        return lease

    def renew(self, lease: LeaseId, now_ns: int) -> bool:
        """Extends a held lease. False: not held; nothing is created or revived."""
        if lease not in self._held:
            return False
        self._timers.set((Clock.EXPIRY, lease), now_ns + self._config.lease_ns)
        return True

    def keep(self, lease: LeaseId) -> None:
        """A held lease does not expire until it is renewed; it ends by its deadline at the latest."""
        self._timers.clear((Clock.EXPIRY, lease))

    def pop(self, lease: LeaseId, cause: Cause, now_ns: int) -> Grant:
        """The one end of a lease. Raises LocalProtocolError when it is not held."""
        if lease not in self._held:
            raise LocalProtocolError(f"lease {lease.generation} is not held: it cannot end as '{cause.value}'")
        grant = self._held.pop(lease)
        self._timers.clear((Clock.EXPIRY, lease))
        self._timers.clear((Clock.DEADLINE, lease))
        self._ended[lease] = Tombstone(try_=grant.try_, cause=cause)
        self._timers.set((Clock.TOMBSTONE, lease), now_ns + self._config.tombstone_ns)
        if len(self._ended) > self._config.tombstones_max:
            self._forget(next(iter(self._ended)))
        return grant

    def due(self, now_ns: int) -> tuple[LeaseId, Cause] | None:
        """The next held lease whose time is up, for the caller to end; forgets old tombstones on the way."""
        while (timer := self._timers.pop_due(now_ns)) is not None:
            clock, lease = timer
            if clock is not Clock.TOMBSTONE:
                return lease, ENDS[clock]
            self._forget(lease)
        return None

    # ------------------------------------------------------------ asking

    def grants(self) -> list[Grant]:
        """All held leases, oldest first."""
        return list(self._held.values())

    def oldest_ns(self) -> int | None:
        """Since when the oldest of them is held."""
        return next((grant.granted_ns for grant in self._held.values()), None)

    def held(self, lease: LeaseId) -> Grant | None:
        return self._held.get(lease)

    def claim(self, lease: LeaseId, try_: TryId) -> bool:
        """What a claim of a lease that is held no longer is worth: valid only if it ended by that try's own claim."""
        tombstone = self._ended.get(lease)
        return tombstone is not None and tombstone.cause is Cause.DONE and tombstone.try_ == try_

    def cause(self, lease: LeaseId) -> Cause | None:
        """Why it ended; None when it is held or unknown."""
        tombstone = self._ended.get(lease)
        return tombstone.cause if tombstone else None

    def of_try(self, try_: TryId) -> LeaseId | None:
        """The lease that a try has or had."""
        return self._by_try.get(try_)

    def newest(self, try_: TryId) -> TryId | None:
        """The highest attempt known of the same request."""
        return self._newest.get(request_key(try_))

    def tombstones(self) -> int:
        return len(self._ended)

    def next_deadline(self) -> int | None:
        return self._timers.next_deadline()

    def _forget(self, lease: LeaseId) -> None:
        try_ = self._ended.pop(lease).try_
        self._timers.clear((Clock.TOMBSTONE, lease))
        del self._by_try[try_]
        if self._newest.get(request_key(try_)) == try_:
            del self._newest[request_key(try_)]


def request_key(try_: TryId) -> RequestKey:
    """What all attempts of one request have in common."""
    return try_.node, try_.incarnation, try_.request
