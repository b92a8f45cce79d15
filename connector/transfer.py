"""Transfers: every read that may still write into this node's blocks, and which of them are late.

Theory of operation. A read holds its target blocks IN_FLIGHT from its post to its terminal status, and nothing else
ends that hold: not a deadline, not the request leaving, not the peer's death. A deadline ends only the request's wait.

    | state       | hears         | becomes     | and                                            |
    |-------------|---------------|-------------|------------------------------------------------|
    | posted      | done          | done        | drop                                           |
    | posted      | failed        | failed      | drop; what is there is garbage                 |
    | posted      | overdue       | overdue     | the peer gets no new reads (R9)                |
    | posted      | left          | quarantined |                                                |
    | overdue     | left          | quarantined |                                                |
    | quarantined | overdue       | quarantined | the peer gets no new reads                     |
    | overdue,    | done, failed  | done,       | drop; the block is free, the peer too after    |
    | quarantined |               | failed      | its last late read                             |
    | any         | mover reaped  | gone        | drop                                           |

Done, failed and gone are not kept: a read that is not here is terminal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .handoff import BlockOwner, HandoffConfig, Holder
from .timers import Timers

Peer = tuple[str, bytes]  # node, incarnation
NS_PER_S = 1_000_000_000
READ_BYTES_PER_S_LEAST = 32 << 20  # a quarter of gigabit Ethernet: over less it is sooner computed
LATE_SHARE_MAX = 4  # a quarter of a pool may lie behind reads that do not end


class ReadState(StrEnum):
    POSTED = "posted"
    OVERDUE = "overdue"
    QUARANTINED = "quarantined"
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"


class Heard(StrEnum):
    """What moves a read."""

    DONE = "done"
    FAILED = "failed"
    OVERDUE = "overdue"
    LEFT = "left"
    REAPED = "mover reaped"


TRANSITIONS: dict[tuple[ReadState, Heard], ReadState] = {
    (ReadState.POSTED, Heard.DONE): ReadState.DONE,
    (ReadState.POSTED, Heard.FAILED): ReadState.FAILED,
    (ReadState.POSTED, Heard.OVERDUE): ReadState.OVERDUE,
    (ReadState.POSTED, Heard.LEFT): ReadState.QUARANTINED,
    (ReadState.POSTED, Heard.REAPED): ReadState.GONE,
    (ReadState.OVERDUE, Heard.DONE): ReadState.DONE,
    (ReadState.OVERDUE, Heard.FAILED): ReadState.FAILED,
    (ReadState.OVERDUE, Heard.LEFT): ReadState.QUARANTINED,
    (ReadState.OVERDUE, Heard.REAPED): ReadState.GONE,
    (ReadState.QUARANTINED, Heard.DONE): ReadState.DONE,
    (ReadState.QUARANTINED, Heard.FAILED): ReadState.FAILED,
    (ReadState.QUARANTINED, Heard.OVERDUE): ReadState.QUARANTINED,
    (ReadState.QUARANTINED, Heard.REAPED): ReadState.GONE,
}

TERMINAL = (ReadState.DONE, ReadState.FAILED, ReadState.GONE)


@dataclass(slots=True)
class Transfer:
    """One read of whole blocks."""

    read: int
    request: bytes
    attempt: int
    peer: Peer
    target: tuple[int, ...]
    state: ReadState = ReadState.POSTED


class Transfers:
    """The table of open reads. Read ids count up from 1 and are never reused."""

    def __init__(self, owner: BlockOwner, config: HandoffConfig) -> None:
        self.counters: Counter[str] = Counter()
        self._owner = owner
        self._config = config
        self._last = 0
        self._open: dict[int, Transfer] = {}
        self._late: dict[Peer, dict[int, None]] = {}  # open reads whose deadline has passed, by peer
        self._deadlines: Timers[int] = Timers()

    def __len__(self) -> int:
        """How many reads may still write."""
        return len(self._open)

    def get(self, read: int) -> Transfer | None:
        """None: it is terminal, or was never posted."""
        return self._open.get(read)

    def post(self, request: bytes, attempt: int, peer: Peer, target: tuple[int, ...], now_ns: int) -> int:
        """A new read's id; its target blocks are held IN_FLIGHT from now on."""
        self._owner.hold(target, Holder.IN_FLIGHT)
        self._last += 1
        self._open[self._last] = Transfer(self._last, request, attempt, peer, target)
        self._deadlines.set(self._last, now_ns + self._patience_ns(len(target)))
        return self._last

    def hear(self, read: int, heard: Heard) -> Transfer | None:
        """Moves one read, and returns it in its new state; None when it is unknown or this changes nothing."""
        transfer = self._open.get(read)
        after = TRANSITIONS.get((transfer.state, heard)) if transfer else None
        if transfer is None or after is None:
            self.counters[f"read.{heard}.late"] += 1
            return None
        transfer.state = after
        self.counters[f"read.{heard}"] += 1
        if heard is Heard.OVERDUE:
            self._late.setdefault(transfer.peer, {})[read] = None
            self._deadlines.clear(read)
        if after in TERMINAL:
            self._close(transfer)
        return transfer

    def reap(self) -> list[Transfer]:
        """Our own mover's process is gone: no read of it writes any more."""
        return [t for read in list(self._open) if (t := self.hear(read, Heard.REAPED)) is not None]

    def due(self, now_ns: int) -> int | None:
        """The next read whose deadline has passed, for the caller to call overdue."""
        return self._deadlines.pop_due(now_ns)

    def next_deadline(self) -> int | None:
        return self._deadlines.next_deadline()

    def peer_blocked(self, node: str, incarnation: bytes) -> bool:
        """R9: no new reads from a peer while one of its reads is late."""
        return (node, incarnation) in self._late

    def late_blocks(self) -> int:
        """How many blocks wait for reads whose deadline has passed, and which may never end."""
        if not self._late:
            return 0
        return sum(len(self._open[read].target) for reads in self._late.values() for read in reads)

    def hold_too_much(self, blocks: int) -> bool:
        """Of a pool of so many. Reads in time give theirs back by themselves, however many were given up at once; of
        late ones only the end of our own mover proves that they write no more (R7)."""
        return self.late_blocks() * LATE_SHARE_MAX > blocks

    def rows(self) -> list[dict[str, Any]]:
        """Every read that may still write, for status and ledger."""
        return [
            {
                "read": t.read,
                "request": t.request.hex(),
                "node": t.peer[0],
                "state": t.state.value,
                "blocks": len(t.target),
                "late": t.read in self._late.get(t.peer, {}),
            }
            for t in self._open.values()
        ]

    def _close(self, transfer: Transfer) -> None:
        del self._open[transfer.read]
        self._deadlines.clear(transfer.read)
        self._owner.drop(transfer.target, Holder.IN_FLIGHT)
        late = self._late.get(transfer.peer)
        if late is not None:
            late.pop(transfer.read, None)
            if not late:
                del self._late[transfer.peer]

    def _patience_ns(self, blocks: int) -> int:
        """How long the request waits: long enough for a busy peer, short enough to try another one."""
        return self._config.read_floor_ns + blocks * self._config.block_bytes * NS_PER_S // READ_BYTES_PER_S_LEAST
