"""What one node's recording says that another's can confirm or deny."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdbus.bus.messages import LeaseId, LeaseRenewed, PrefillAccepted, PrefillDone, PrefillProgress, RenewedEntry, TryId

Announcement = PrefillAccepted | PrefillProgress | PrefillDone | RenewedEntry

Life = tuple[str, bytes]  # a node's name and incarnation


def announcements(message: Any) -> Sequence[Announcement]:
    """What in a message names blocks that may be read under a held lease: itself, or some entries of it."""
    if isinstance(message, PrefillAccepted | PrefillProgress | PrefillDone):
        return (message,)
    if isinstance(message, LeaseRenewed):
        return [entry for entry in message.entries if entry.held]
    return ()


class Granted(NamedTuple):
    """A lease on its prefill node. `cause` is '' while it is held."""

    try_: tuple[str, str, int]
    cause: str
    sequence: int


class Confirmed(NamedTuple):
    """A decode node took KV as valid on this word."""

    lease: LeaseId
    try_: TryId
    sequence: int
    now_ns: int


class Ended(NamedTuple):
    """How a decode node ended a request."""

    reason: str
    tokens: int


class Answered(NamedTuple):
    """How a client was told that a request ended, by which node."""

    by: Life
    reason: str
    tokens: int
    sequence: int
    now_ns: int


@dataclass
class Facts:
    """One life of one node."""

    life: Life
    leases: dict[int, Granted] = field(default_factory=dict)  # by generation
    confirmed: list[Confirmed] = field(default_factory=list)
    sent: dict[bytes, None] = field(default_factory=dict)  # digests of messages, as others would hear them
    heard: dict[Life, dict[bytes, int]] = field(default_factory=dict)  # from whom: digest -> where first
    ended: dict[bytes, Ended] = field(default_factory=dict)  # by request
    answered: dict[bytes, Answered] = field(default_factory=dict)  # a client's, by request
    met: dict[Life, None] = field(default_factory=dict)  # the nodes that a client has spoken to
    clean: bool = False  # it ended in good order, and nothing of it is missing
