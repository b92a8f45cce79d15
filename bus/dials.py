"""The addresses that a node calls by itself: when to try, how long to wait for an answer, when to try again.

A dial is one address. It waits until it is due, opens a link, says hello there and waits for the answer; then it
stays open until the peer is lost, and starts over. Failures back off from 50 ms to 2 s, doubling, each wait
between half and all of that (so that a cluster that lost a node does not call it in step). A refusal is retried
too, slowly. An address that was removed before anyone there became a peer is not called until it is asked for again.
At most 16 dials are on their way at once, and each address has at most one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum

from .members import MembershipConfig


class DialState(StrEnum):
    WAITING = "waiting"
    OPENING = "opening"
    GREETING = "greeting"
    OPEN = "open"
    REFUSED = "refused"
    REMOVED = "removed"


W, O, G, UP, R, X = DialState  # noqa: E741

DIALS: dict[tuple[DialState, str], DialState] = {
    (W, "due"): O,
    (R, "due"): O,
    (O, "opened"): G,
    (O, "failed"): W,
    (G, "failed"): W,
    (UP, "failed"): W,
    (G, "refused"): R,
    (G, "welcome"): UP,
    (W, "asked"): W,
    (R, "asked"): W,
    (X, "asked"): W,
    (W, "removed"): X,
    (O, "removed"): X,
    (G, "removed"): X,
    (R, "removed"): X,
}

TOLD_MAX = 8  # there are about as many reasons
UNDERWAY = (DialState.OPENING, DialState.GREETING)
TIMED = (DialState.WAITING, DialState.REFUSED)


@dataclass(slots=True)
class Dial:
    address: str
    name: str = ""  # of the peer there, once known
    state: DialState = DialState.WAITING
    link: str = ""
    attempts: int = 0  # failed ones since it was last open for a while
    due_ns: int = 0  # next try, or end of the wait for an answer
    open_ns: int = 0
    command: int = 0  # which of the operator's was the last to ask for it, or to remove it
    reason: str = ""
    told: tuple[str, ...] = ()  # reasons that are no news any more, since it was asked for or open


class Dials:
    """The table of dials. Only Membership calls it."""

    def __init__(self, config: MembershipConfig) -> None:
        self._config = config
        self._dials: dict[str, Dial] = {}

    def all(self) -> list[Dial]:
        return list(self._dials.values())

    def at(self, address: str) -> Dial | None:
        return self._dials.get(address)

    def on(self, link: str) -> Dial | None:
        return next((d for d in self._dials.values() if d.link == link), None) if link else None

    def named(self, name: str) -> Dial | None:
        return next((d for d in self._dials.values() if d.name == name), None) if name else None

    def names(self) -> dict[str, None]:
        """Of all peers that are called."""
        return dict.fromkeys(d.name for d in self._dials.values())

    def of(self, name: str, *addresses: str) -> list[Dial]:
        """All that are known to lead to a peer."""
        return [d for d in self._dials.values() if (name and d.name == name) or d.address in addresses]

    def removed(self, name: str, address: str) -> list[Dial]:
        """Those that keep out the peer that says it has this name and address."""
        removed = (d for d in self._dials.values() if d.state is DialState.REMOVED)
        return [d for d in removed if (d.name == name if d.name else d.address == address)]

    def full(self) -> bool:
        return len(self._dials) >= self._config.addresses_max

    def add(self, address: str, name: str, now_ns: int) -> Dial:
        dial = self._dials[address] = Dial(address, name=name, due_ns=now_ns)
        return dial

    def drop(self, dial: Dial) -> None:
        self._dials.pop(dial.address, None)

    def ask(self, dial: Dial, now_ns: int) -> bool:
        """Try at once, whatever happened before. False when it is on its way or open."""
        if not self._move(dial, "asked"):
            return False
        dial.attempts, dial.due_ns, dial.reason, dial.told = 0, now_ns, "", ()
        return True

    def start_due(self, now_ns: int) -> list[str]:
        """The addresses to open now, longest due first, within the number of handshakes allowed."""
        due = [d for d in self._dials.values() if d.due_ns <= now_ns and d.state in TIMED]
        if not due:
            return []
        started = sorted(due, key=_due)[: max(0, self._room())]
        for dial in started:
            self._move(dial, "due")
            dial.due_ns = now_ns + self._config.handshake_ns
        return [d.address for d in started]

    def overdue(self, now_ns: int) -> list[Dial]:
        """Those whose handshake has not been answered in time."""
        return [d for d in self._dials.values() if d.state in UNDERWAY and d.due_ns <= now_ns]

    def opened(self, address: str, link: str, now_ns: int) -> bool:
        dial = self._dials.get(address)
        if dial is None or not self._move(dial, "opened"):
            return False
        dial.link, dial.due_ns = link, now_ns + self._config.handshake_ns
        return True

    def welcome(self, dial: Dial, name: str, now_ns: int) -> None:
        self._move(dial, "welcome")
        dial.name, dial.open_ns, dial.reason, dial.told = name, now_ns, "", ()

    def refuse(self, dial: Dial, reason: str, now_ns: int) -> None:
        self._move(dial, "refused")
        dial.link, dial.reason, dial.due_ns = "", reason, now_ns + self._config.refused_retry_ns

    def fail(self, dial: Dial, reason: str, now_ns: int) -> None:
        """The handshake failed or the open link was lost: wait, longer each time unless it was open for long."""
        if dial.state is DialState.OPEN and now_ns - dial.open_ns > self._config.backoff_max_ns:
            dial.attempts = 0
        if self._move(dial, "failed"):
            dial.link, dial.reason = "", reason
            dial.due_ns = now_ns + self._backoff_ns(dial)
            dial.attempts += 1

    def is_news(self, dial: Dial) -> bool:
        """Whether why it failed has not been told yet. From now on it has."""
        if not dial.reason or dial.reason in dial.told:
            return False
        dial.told = (*dial.told, dial.reason)[-TOLD_MAX:]
        return True

    def remove(self, dial: Dial) -> bool:
        """False when it was removed already."""
        if not self._move(dial, "removed"):
            return False
        dial.link, dial.reason = "", "removed"
        return True

    def next_due_ns(self) -> int | None:
        room = self._room() > 0
        return min(
            (d.due_ns for d in self._dials.values() if d.state in UNDERWAY or (room and d.state in TIMED)),
            default=None,
        )

    def _move(self, dial: Dial, verb: str) -> bool:
        after = DIALS.get((dial.state, verb))
        if after is None:
            return False
        dial.state = after
        return True

    def _room(self) -> int:
        return self._config.handshakes_max - sum(d.state in UNDERWAY for d in self._dials.values())

    def _backoff_ns(self, dial: Dial) -> int:
        longest = min(self._config.backoff_ns << min(dial.attempts, 30), self._config.backoff_max_ns)
        seed = f"{self._config.name} {dial.address} {dial.attempts}".encode()
        return longest // 2 + (longest // 2) * (zlib.crc32(seed) & 0xFFFF) // 0xFFFF


def _due(dial: Dial) -> int:
    return dial.due_ns
