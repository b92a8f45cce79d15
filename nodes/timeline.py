"""Where a request's time went, marked on the decode node's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from pdbus.bus.messages import Timeline

GAPS_MAX = 4096  # inter-token gaps kept for the median; a longer answer reports that of its first ones


@dataclass(slots=True)
class Marks:
    """Clock readings in ns; 0 until it happens. A mark is set once, but for those of a failed attempt."""

    arrived: int
    admitted: int = 0
    first_token: int = 0
    last_token: int = 0
    prefill_done: int = 0
    first_read: int = 0
    last_read: int = 0
    claimed: int = 0
    confirmed: int = 0
    own_token: int = 0  # the decode node's first own one
    read_bytes: int = 0
    mover_ns: int = 0
    gaps: list[int] = field(default_factory=list)

    def token(self, now: int, *, own: bool, tokens: int = 1) -> None:
        """So many tokens of one step; what came together counts as evenly spaced."""
        if self.first_token == 0:
            self.first_token = now
        elif len(self.gaps) < GAPS_MAX:
            gap = now - self.last_token
            self.gaps += (gap,) if tokens == 1 else [gap // tokens] * tokens
        if own and self.own_token == 0:
            self.own_token = now
        self.last_token = now

    def read(self, now: int, size: int, transfer_ns: int) -> None:
        self.last_read = now
        self.read_bytes += size
        self.mover_ns += transfer_ns

    def attempt_failed(self) -> None:
        """What an abandoned attempt marked says nothing of the next."""
        self.prefill_done = self.first_read = self.last_read = self.claimed = self.confirmed = 0
        self.read_bytes = self.mover_ns = 0

    def timeline(self, now: int, *, node: str, attempts: int) -> Timeline:
        return Timeline(
            remote=self.confirmed > 0,
            prefill_node=node,
            attempts=attempts,
            queue_ns=_between(self.arrived, self.admitted),
            prefill_ns=_between(self.admitted, self.first_token),
            read_ns=_between(self.first_read, self.last_read),
            confirm_ns=_between(self.claimed, self.confirmed),
            handover_ns=_between(self.prefill_done, self.own_token),
            ttft_ns=_between(self.arrived, self.first_token),
            itl_ns=int(median(self.gaps)) if self.gaps else 0,
            total_ns=now - self.arrived,
            read_bytes=self.read_bytes,
            mover_ns=self.mover_ns,
            first_step_ns=_between(self.confirmed, self.own_token),
        )


def _between(start: int, end: int) -> int:
    return end - start if start and end else 0
