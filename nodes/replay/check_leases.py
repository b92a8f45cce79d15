"""Invariants 3 and 4 and the rules R1 to R5 and R10 on a prefill node.

Every lease ends in exactly one release, for a cause that is true; it is answered for only while it is held; nothing but
its own renewals keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdbus.bus.messages import (
    Goodbye,
    Hello,
    LeaseId,
    LeaseReleased,
    LeaseRenewed,
    PrefillAccepted,
    PrefillCancel,
    PrefillDone,
    PrefillProgress,
    PrefillRequest,
    TransferDone,
    TryId,
    Welcome,
)
from pdbus.connector.handoff import Cause, HandoffConfig
from pdbus.connector.timers import Timers
from pdbus.connector.vllm.events import RequestLeft

from .. import events as ev
from .checks import Check, Report
from .facts import Facts, Granted
from .turns import Began, Turn

MS = 1_000_000
ONE_RELEASE = "3: every lease ends in exactly one release"
ONE_LEASE = "R3: one try, one lease"
BY_CLAIM = "R1: valid only by claim"
RENEWAL = "R10: renewed are the tries that ask for it, and none revives"
IN_TIME = "6: every waiting state has a deadline"

Key = tuple[str, str, int]  # of a try: decode node, request in hex, attempt


@dataclass(slots=True)
class Held:
    lease: LeaseId
    began_ns: int
    deadline_ns: int
    expires_ns: int
    ready: bool = False


@dataclass(slots=True)
class Over:
    lease: LeaseId
    cause: str
    ended_ns: int


class LeaseCheck(Check):
    def __init__(self, report: Report, began: Began, facts: Facts, *, whole: bool = True) -> None:
        """`whole`: no lease is older than what is heard."""
        super().__init__(report)
        self.held: dict[Key, Held] = {}
        self.timers: Timers[Key] = Timers()  # the earlier of expiry and deadline
        self._config: HandoffConfig = began.core.handoff
        self._name, self._incarnation = facts.life
        self._facts = facts
        self._over: dict[Key, Over] = {}
        self._generation = 0
        self._since: int | None = 0 if whole else None  # the first generation that is known from its beginning
        self._epoch: int | None = 1 if whole else None
        self._advertised: int | None = 0 if whole else None
        self._awaiting: dict[Key, int] = {}  # tries that a vLLM server has not answered: how long they may take, in ms
        self.events = {
            ev.WorkerLost: self._epoch_ends, ev.MoverLost: self._mover_lost, ev.MessageCame: self._asked,
        }  # fmt: skip
        self.effects = {
            ev.Publish: self._published, ev.Send: self._sent, ev.AdvertiseLeases: self._advertise,
            ev.RestartMover: self._restarted,
        }  # fmt: skip
        self.after = {ev.WorkerLost: self._none_left, ev.MoverLost: self._none_left, ev.Tick: self._ticked}
        self._said: dict[type[Any], Callable[[Turn, Any], None]] = {
            PrefillAccepted: self._announced,
            PrefillProgress: self._announced,
            PrefillDone: self._announced,
            LeaseRenewed: self._renewed,
            LeaseReleased: self._released,
        }

    # ------------------------------------------------------------ beginning and end

    def _published(self, turn: Turn, effect: ev.Publish) -> None:
        if effect.topic != "lease":
            return
        data: dict[str, Any] = effect.data
        key = (data["decode_node"], data["request"], data["attempt"])
        if effect.event == "lease.began":
            self._begins(turn, key, self._lease(data))
        elif effect.event == "lease.ended":
            self._ends(turn, key, self._lease(data), data["cause"], data["held_ns"])

    def _asked(self, turn: Turn, event: ev.MessageCame[Any]) -> None:
        if isinstance(event.message, PrefillRequest):
            self._awaiting[key_of(event.message.try_)] = event.message.deadline_ms

    def _begins(self, turn: Turn, key: Key, lease: LeaseId) -> None:
        generation = lease.generation
        if before := self.held.get(key) or self._remembered(turn, key):
            was = before.lease.generation
            self.report(turn, ONE_LEASE, f"{_name(key)} is granted lease {generation} after lease {was}")
        if generation <= self._generation:
            self.report(turn, ONE_LEASE, f"lease {generation} of {_name(key)} comes after lease {self._generation}")
        if self._since is None:
            self._since = generation
        if self._epoch is None:
            self._epoch = lease.epoch
        if lease.epoch != self._epoch:
            self.report(turn, ONE_LEASE, f"lease {generation} is of epoch {lease.epoch} in epoch {self._epoch}")
        for other in self.held:
            if other[:2] == key[:2] and other[2] < key[2]:
                self.report(turn, "R4", f"{_name(other)} keeps its lease beside that of {_name(key)}")
        self._generation = max(self._generation, generation)
        expires = turn.now_ns + self._config.lease_ns
        asked_ms = self._awaiting.pop(key, None)
        deadline = turn.now_ns + asked_ms * MS if asked_ms is not None else expires
        self.held[key] = Held(lease, turn.now_ns, deadline, expires)
        self.timers.set(key, min(deadline, expires))
        self._facts.leases[generation] = Granted(key, "", turn.sequence)

    def _ends(self, turn: Turn, key: Key, lease: LeaseId, cause: str, held_ns: int) -> None:
        held, generation = self.held.get(key), lease.generation
        if self._is_older(lease):
            return
        if held is None or held.lease != lease:
            over = self._over.get(key)
            what = f"a second time, after {over.cause!r}" if over else "without having been granted"
            self.report(turn, ONE_RELEASE, f"lease {generation} of {_name(key)} ends as {cause!r} {what}")
            return
        if problem := self._untrue(turn, key, held, cause):
            self.report(turn, ONE_RELEASE, f"lease {generation} of {_name(key)} ends as {cause!r}, but {problem}")
        if held_ns != turn.now_ns - held.began_ns:
            was = turn.now_ns - held.began_ns
            self.report(turn, ONE_RELEASE, f"lease {generation} was held for {was} ns, not for {held_ns}")
        del self.held[key]
        self.timers.clear(key)
        self._over[key] = Over(lease, cause, turn.now_ns)
        self._facts.leases[generation] = Granted(key, cause, turn.sequence)

    def _untrue(self, turn: Turn, key: Key, held: Held, cause: str) -> str:
        """Why the cause is not what happened; '' when it is."""
        event: Any = turn.event
        message: Any = event.message if isinstance(event, ev.MessageCame) else None
        match cause:
            case Cause.DONE | Cause.PROTOCOL:
                meant = isinstance(message, TransferDone) and key_of(message.try_) == key
                if not meant or message.lease != held.lease:
                    return "it was not claimed"
                if held.ready is (cause == Cause.DONE):
                    return ""
                return f"its prompt is {'' if held.ready else 'not '}computed"
            case Cause.CANCELLED:
                meant = isinstance(message, PrefillCancel) and key_of(message.try_) == key
                return "" if meant and message.lease in (None, held.lease) else "nobody cancelled it"
            case Cause.EXPIRED:
                return "" if held.expires_ns <= turn.now_ns else "its time is not up"
            case Cause.DEADLINE:
                return "" if held.deadline_ns <= turn.now_ns else "the request's deadline has not passed"
            case Cause.SUPERSEDED:
                new = isinstance(message, PrefillRequest) and key_of(message.try_)
                return "" if new and new[:2] == key[:2] and new[2] > key[2] else "no higher attempt came"
            case Cause.READER_DEAD:
                known = isinstance(event, ev.MessageCame) and isinstance(message, Hello | Welcome | Goodbye)
                return "" if known and event.header.from_ == key[0] else f"nothing proves the end of {key[0]}"
            case Cause.WORKER_DEAD:
                return "" if isinstance(event, ev.WorkerLost | ev.MoverLost) else "no worker or mover was lost"
            case Cause.FAILED:
                return "" if isinstance(event, ev.StepEnded | RequestLeft) else "no step ended"
            case Cause.SHUTDOWN:
                return "" if isinstance(event, ev.LeaveAsked | ev.Tick) else "nobody asked the node to leave"
        return "that is no cause"

    # ------------------------------------------------------------ what is said of it

    def _sent(self, turn: Turn, effect: ev.Send[Any]) -> None:
        said = self._said.get(type(effect.message))
        if said is not None:
            said(turn, effect.message)

    def _announced(self, turn: Turn, message: PrefillAccepted | PrefillProgress | PrefillDone) -> None:
        held = self.held.get(key_of(message.try_))
        if self._is_older(message.lease):
            return
        if held is None or message.lease != held.lease:
            told = f"{message.KIND} announces lease {message.lease.generation}"
            self.report(turn, ONE_LEASE, f"{told} of {_name(key_of(message.try_))}, which is not held")
        elif isinstance(message, PrefillDone):
            held.ready = True

    def _renewed(self, turn: Turn, message: LeaseRenewed) -> None:
        for entry in message.entries:
            key = key_of(entry.try_)
            held = self.held.get(key)
            if not entry.held:
                if held is not None and entry.lease == held.lease:
                    self.report(
                        turn,
                        "R10",
                        f"lease {held.lease.generation} of {_name(key)} is held, but renewed as if it were not",
                    )
                continue
            if entry.lease is not None and self._is_older(entry.lease):
                continue
            if held is None or entry.lease != held.lease:
                self.report(turn, RENEWAL, f"{_name(key)} is renewed, but holds no such lease")
                continue
            if not self._asked_to_renew(turn, key):
                self.report(turn, RENEWAL, f"lease {held.lease.generation} of {_name(key)} is renewed unasked")
            held.expires_ns = turn.now_ns + self._config.lease_ns
            self.timers.set(key, min(held.deadline_ns, held.expires_ns))

    def _asked_to_renew(self, turn: Turn, key: Key) -> bool:
        entries = _message(turn, object, "entries", ())
        return any(key_of(entry.try_) == key for entry in entries)

    def _released(self, turn: Turn, message: LeaseReleased) -> None:
        key, generation = key_of(message.try_), message.lease.generation
        if self._is_older(message.lease):
            return
        over = self._over.get(key)
        done = over is not None and over.cause == Cause.DONE and message.lease == over.lease
        if message.valid and not done:
            ended = f"ended as {over.cause!r}" if over else "is not known"
            self.report(turn, BY_CLAIM, f"lease {generation} of {_name(key)} is called valid, but {ended}")
        if done and not message.valid and over and turn.now_ns - over.ended_ns < self._config.tombstone_ns:
            self.report(turn, BY_CLAIM, f"lease {generation} of {_name(key)} is called invalid, but ended as 'done'")

    # ------------------------------------------------------------ epochs and time

    def _advertise(self, turn: Turn, effect: ev.AdvertiseLeases) -> None:
        if self._advertised is not None:
            self._advertised = effect.leases

    def _mover_lost(self, turn: Turn, event: ev.MoverLost) -> None:
        if not event.asked:
            self._epoch_ends(turn, event)

    def _epoch_ends(self, turn: Turn, event: ev.NodeEvent) -> None:
        self._epoch = self._epoch + 1 if self._epoch else None

    def _restarted(self, turn: Turn, effect: ev.RestartMover) -> None:
        """A mover that is replaced for the sake of reads that do not end begins an epoch before it is lost."""
        if self._epoch is not None and effect.epoch > self._epoch:
            self._epoch = effect.epoch
            for key, held in self.held.items():
                problem = f"lease {held.lease.generation} of {_name(key)} survives the mover's replacement"
                self.report(turn, ONE_RELEASE, problem)

    def _none_left(self, turn: Turn) -> None:
        asked = isinstance(turn.event, ev.MoverLost) and turn.event.asked
        for key, held in () if asked else self.held.items():
            what = "worker" if isinstance(turn.event, ev.WorkerLost) else "mover"
            self.report(turn, ONE_RELEASE, f"lease {held.lease.generation} of {_name(key)} survives the {what}'s loss")

    def _ticked(self, turn: Turn) -> None:
        while (key := self.timers.pop_due(turn.now_ns)) is not None:
            held = self.held[key]
            time = "its expiry" if held.expires_ns <= turn.now_ns else "the request's deadline"
            self.report(turn, IN_TIME, f"lease {held.lease.generation} of {_name(key)} outlives {time}")

    def every_turn(self, turn: Turn) -> None:
        if self._advertised is not None and self._advertised != len(self.held):
            told = f"the mover is told of {self._advertised} leases, {len(self.held)} are held"
            self.report(turn, "R5: who may read is known", told)
            self._advertised = len(self.held)

    # ------------------------------------------------------------ words

    def _remembered(self, turn: Turn, key: Key) -> Over | None:
        """A lease that has ended, unless its node may have forgotten it."""
        over = self._over.get(key)
        return over if over and turn.now_ns - over.ended_ns < self._config.tombstone_ns else None

    def _is_older(self, lease: LeaseId) -> bool:
        """Than what is heard: nothing is known of it."""
        return self._since is None or lease.generation < self._since

    def _lease(self, data: dict[str, Any]) -> LeaseId:
        return LeaseId(
            node=self._name, incarnation=self._incarnation, epoch=data["epoch"], generation=data["generation"]
        )


def key_of(try_: TryId) -> Key:
    return try_.node, try_.request.hex(), try_.attempt


def _name(key: Key) -> str:
    return f"request {key[1]} attempt {key[2]} of {key[0]}"


def _message(turn: Turn, kind: type[Any], field: str, default: Any) -> Any:
    """A field of the message that the turn's input is; the default when it is another input."""
    message = turn.event.message if isinstance(turn.event, ev.MessageCame) else None
    return getattr(message, field, default) if isinstance(message, kind) else default
