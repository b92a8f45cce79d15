"""What the operator has asked for: whom to join, whom to remove. The last command about a peer holds.

A peer has a name and any number of addresses: the one it tells, and all at which it was found. A command may name any
of them, and may come before anyone knows to whom an address leads. So commands are numbered: an address remembers the
last one that asked for it, a removed peer the one that removed it, and when the two turn out to be one, the later
number decides. Only Membership calls this.
"""

from __future__ import annotations

from . import members as ms
from .dials import Dial, Dials, DialState
from .known import REMOVED, REMOVING, USABLE, Known
from .messages import Goodbye
from .roster import Roster


class Commands:
    def __init__(self, config: ms.MembershipConfig, roster: Roster, dials: Dials) -> None:
        self._config = config
        self._roster = roster
        self._dials = dials
        self._given = 0

    def _next(self) -> int:
        self._given += 1
        return self._given

    def join(self, event: ms.JoinAsked, now_ns: int) -> list[ms.MembershipEffect]:
        """Call this address, and take back the removal of whoever is known to be there."""
        if event.address == self._config.hello.address:
            return [ms.rejected(event, "this is the node itself")]
        dial = self._dials.at(event.address)
        if dial is None and self._dials.full():
            return [ms.rejected(event, f"{self._config.addresses_max} addresses are being called already")]
        known = self._meant(event.address)
        if known is not None:
            known.move("asked")
            if dial is None and known.out and known.state in USABLE:
                return []
        dial = dial or self._dials.add(event.address, "", now_ns)
        dial.command = self._next()
        self._dials.ask(dial, now_ns)
        return []

    def remove(self, event: ms.RemoveAsked, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._meant(event.target)
        if known is None:
            return self._remove_stranger(event, now_ns)
        known.removal = self._next()
        effects = known.unwatch()
        if not known.move("remove", "removed"):
            return effects  # it is, or is about to be
        known.remove_ns = now_ns + self._config.removal_ns
        return effects + (self.removed(known) if known.state is REMOVED or not known.busy else [])

    def removed(self, known: Known) -> list[ms.MembershipEffect]:
        """Its last lease has ended, or was waited for long enough."""
        effects: list[ms.MembershipEffect] = []
        if known.move("idle", "removed"):
            effects = [known.say(known.link, Goodbye(reason="removed")), *ms.closing(known.out, flush=True)]
            effects.append(ms.PeerDown(peer=known.record(), reason="removed", proven=False))
        for dial in self._dials.of(known.name, known.hello.address, *known.aliases):
            effects += [] if dial.link == known.out else ms.closing(dial.link)
            self._dials.drop(dial)
            known.also_at(dial.address)
        known.out = known.inn = ""
        return [*effects, ms.PeerRemoved(name=known.name, address=known.hello.address)]

    def keep_out(self, name: str, address: str, dial: Dial) -> bool:
        """Whether the peer that answers there is removed. If the dial was asked for since, it is so no more."""
        known, removed = self._roster.get(name), self._dials.removed(name, address)
        since = known.removal if known is not None and known.state in (REMOVING, REMOVED) else 0
        if max(since, *(d.command for d in removed), 0) > dial.command:
            self._dials.drop(dial)
            if known is not None:
                known.also_at(dial.address)
            return True
        if known is not None:
            known.move("asked")
        for other in removed:
            self._dials.drop(other)
        return False

    def _meant(self, target: str) -> Known | None:
        """Whom a name or an address stands for."""
        dial = self._dials.at(target) or self._dials.named(target)
        return self._roster.get(dial.name if dial else target) or self._roster.at(target)

    def _remove_stranger(self, event: ms.RemoveAsked, now_ns: int) -> list[ms.MembershipEffect]:
        """An address where nobody has become a peer yet, or a caller that was refused: one dial keeps them out."""
        dial = self._dials.at(event.target) or self._dials.named(event.target)
        caller = self._roster.turned_away(event.target)
        if dial is None and caller is not None and caller.address and not self._dials.full():
            dial = self._dials.at(caller.address) or self._dials.add(caller.address, caller.name, now_ns)
        if dial is None or dial.state is DialState.OPEN:
            return [ms.rejected(event, f"no member {event.target}")]
        dial.command = self._next()
        effects = ms.closing(dial.link)
        for other in self._dials.of(dial.name):
            if other is not dial:
                effects += ms.closing(other.link)
                self._dials.drop(other)
        if self._dials.remove(dial):
            effects.append(ms.PeerRemoved(name=dial.name, address=dial.address))
        return effects
