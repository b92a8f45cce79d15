"""How long a mover may sleep before it must poll again. Pure: told the time, never asks.

NIXL progresses only when polled. Too slow costs throughput, and over TCP may cost the owner its life when a reader
dies (seldom at 1 ms, often at 50 ms); too fast costs a core.
"""

from __future__ import annotations

MS = 1_000_000
S = 1_000 * MS

IDLE_NS = 50 * MS  # peers, but nothing to do: well under 1 % of a core
ALERT_NS = 1 * MS  # someone may be reading from us
COURTSHIP_NS = 2 * S  # after a peer was added: connecting takes several rounds
READ_MIN_NS = 20_000
READ_MAX_NS = 200_000
STALLED_AFTER_NS = 1 * S  # no read of ours has moved for so long: its owner is frozen or gone
BUSY_PUMP_NS = 50_000  # an idle pump takes 2 to 7 us; one that took this long has moved bytes and has more


class Pace:
    def __init__(self) -> None:
        self._progress_ns = 0
        self._courted_ns = -COURTSHIP_NS

    def progressed(self, now_ns: int) -> None:
        """One of our reads was posted or has ended."""
        self._progress_ns = now_ns

    def courted(self, now_ns: int) -> None:
        """A peer was added."""
        self._courted_ns = now_ns

    def wait_ns(self, now_ns: int, *, reads: bool, peers: bool, leases: bool, pump_ns: int) -> int | None:
        """Until when to sleep, in ns from now; None: until a message comes. `pump_ns`: what the last pump took."""
        if pump_ns > BUSY_PUMP_NS:
            return 0
        if reads and (quiet := now_ns - self._progress_ns) < STALLED_AFTER_NS:
            return min(max(quiet // 8, READ_MIN_NS), READ_MAX_NS)
        if leases or reads or now_ns - self._courted_ns < COURTSHIP_NS:
            return ALERT_NS
        return IDLE_NS if peers else None
