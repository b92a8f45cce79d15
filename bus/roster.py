"""Who is known, who is retired, who was turned away. Only Membership touches it."""

from __future__ import annotations

import re

from .compatibility import Unreadable, describe, differences
from .dials import UNDERWAY, Dial, Dials, DialState
from .known import CURRENT, DEAD, GREETING, LEFT, LIVE, REMOVED, REMOVING, UP, USABLE, Known
from .members import HelloReceived, MembershipConfig, Peer, PeerState
from .messages import Hello, Member, Refused
from .wire import Header, replace

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as --name: it stands in logs, metrics and file names
HANDOFF_KINDS = ("prefill.", "transfer.", "lease.")  # nothing of these before a hello


class Roster:
    """Peers by name, exactly one incarnation each; incarnations that are over for good."""

    def __init__(self, config: MembershipConfig, unreadable: Unreadable) -> None:
        self._config = config
        self._unreadable = unreadable
        self._peers: dict[str, Known] = {}
        self._retired: dict[bytes, int] = {}  # incarnation -> when, oldest first
        self._turned_away: dict[str, Peer] = {}  # by name: who called and was refused

    # ------------------------------------------------------------ peers

    def all(self) -> list[Known]:
        return list(self._peers.values())

    def usable(self) -> list[Known]:
        return [p for p in self._peers.values() if p.state in USABLE]

    def get(self, name: str) -> Known | None:
        return self._peers.get(name)

    def at(self, address: str) -> Known | None:
        """Who is there; of those who were there one after the other the one that still is."""
        found = [p for p in self._peers.values() if address in (p.hello.address, *p.aliases)]
        return min(found, key=lambda p: p.state not in USABLE, default=None)

    def live_on(self, link: str) -> Known | None:
        return next((p for p in self._peers.values() if link in (p.out, p.inn) and p.state in LIVE), None)

    def enter(self, header: Header, hello: Hello) -> Known:
        """A new incarnation takes the name."""
        self._retired.pop(header.from_inc, None)
        before = self._peers.get(header.from_)
        known = self._peers[header.from_] = Known(header.from_, header.from_inc, hello)
        if before is not None and before.hello.address == hello.address:
            known.aliases = before.aliases
        return known

    def has_room(self, dials: Dials) -> bool:
        """Whether one more can be known, forgetting one that is gone and not called if need be."""
        return len(self._peers) < self._config.peers_max or self._forgettable(dials) is not None

    def make_room(self, dials: Dials) -> None:
        if len(self._peers) >= self._config.peers_max and (known := self._forgettable(dials)):
            self.retire(known.incarnation, known.last_heard_ns)
            del self._peers[known.name]

    def _forgettable(self, dials: Dials) -> Known | None:
        gone = (p for p in self._peers.values() if p.state in (DEAD, LEFT) and dials.named(p.name) is None)
        return next(gone, None)

    def introduce(self, to: str) -> tuple[Member, ...]:
        """Whom we know, for a welcome."""
        return tuple(
            Member(name=p.name, address=p.hello.address, role=p.hello.role)
            for p in self.usable()
            if p.name != to and p.hello.address
        )

    # ------------------------------------------------------------ incarnations

    def retire(self, incarnation: bytes, now_ns: int) -> None:
        while len(self._retired) >= self._config.retired_max:
            del self._retired[next(iter(self._retired))]
        self._retired[incarnation] = now_ns

    def is_retired(self, incarnation: bytes, now_ns: int) -> bool:
        at = self._retired.get(incarnation)
        return at is not None and now_ns - at < self._config.retired_ns

    def stale(self, header: Header, kind: str) -> str:
        """Why this message is from, or for, another life; '' when it may be acted on."""
        if header.to_inc and header.to_inc != self._config.incarnation:
            return "meant for another incarnation of this node"
        known = self._peers.get(header.from_)
        if known is not None:
            current = header.from_inc == known.incarnation and known.state in CURRENT
            return "" if current else f"not from the current incarnation of {header.from_}"
        if header.from_inc in self._retired:
            return "from a retired incarnation"
        return "no hello came before it" if kind.startswith(HANDOFF_KINDS) else ""

    def impossible(self, header: Header, now_ns: int, *, answers: bool = False) -> str:
        """Why this sender can be no peer of ours at all; '' when it can. A life that came to be retired, and that
        `answers` us now, has outlived the one that came after it, should that one be gone."""
        if header.from_inc == self._config.incarnation:
            return "this is the node itself"
        if header.from_ == self._config.name:
            return f"the name {header.from_} is taken by this node"
        if not header.from_inc or not NAME.fullmatch(header.from_):
            return "the header needs an incarnation, and a name of up to 64 letters, digits, . _ -"
        known = self._peers.get(header.from_)
        outlived = answers and (known is None or known.state not in LIVE)
        if self.is_retired(header.from_inc, now_ns) and not outlived:
            return f"this incarnation is retired: another node named {header.from_} came after it"
        return ""

    def taken(self, header: Header, hello: Hello) -> str:
        """Why this life cannot have its name: another one that is up, and elsewhere, has it. '' when it can. One on
        the same address has ended, since two cannot listen there; so has one whose connection was cut, it seems."""
        known = self._peers.get(header.from_)
        if known is None or known.state is not UP or known.incarnation == header.from_inc:
            return ""
        if known.cut_since_ns is not None or hello.address in ("", known.hello.address):
            return ""
        at = f" at {known.hello.address}" if known.hello.address else ""
        return f"the name {header.from_} is taken by the node{at}: give one of them another --name"

    def refusal(self, event: HelloReceived, own: Hello, dials: Dials, now_ns: int) -> Refused | None:
        """Why a hello is not welcome; None when it is."""
        header, hello = event.header, event.message
        known = self._peers.get(header.from_)
        if reason := self.impossible(header, now_ns):
            return Refused(reason=reason)
        if hello.geometry is None:
            return Refused(reason=f"the name {header.from_} is a node's") if known else None
        if (known and known.state in (REMOVING, REMOVED)) or dials.removed(header.from_, hello.address):
            return Refused(reason="removed here by an operator, until asked to join again")
        if known is not None and known.incarnation != header.from_inc and event.link in (known.inn, known.out):
            return Refused(reason="another incarnation must come on a connection of its own")
        if known is not None and known.incarnation == header.from_inc and known.hello.geometry != hello.geometry:
            return Refused(reason="its KV geometry is another than it said before: only a restart may change it")
        if fields := differences(hello, own, self._unreadable):
            return Refused(reason=describe(fields), fields=fields)
        if known is None and not self.has_room(dials):
            return Refused(reason=f"this node knows {self._config.peers_max} members already")
        return None

    # ------------------------------------------------------------ for people to see

    def turn_away(self, header: Header, hello: Hello, reason: str) -> bool:
        """Remember a node that called and was refused. Whether that is news."""
        if hello.geometry is None or header.from_ == self._config.name or not NAME.fullmatch(header.from_):
            return False
        before = self._turned_away.get(header.from_)
        while len(self._turned_away) >= self._config.turned_away_max:
            del self._turned_away[next(iter(self._turned_away))]
        self._turned_away[header.from_] = Peer(
            name=header.from_,
            incarnation=header.from_inc,
            role=hello.role,
            address=hello.address,
            http=hello.http,
            state=PeerState.REFUSED,
            reason=reason,
            hello=hello,
        )
        return before is None or before.reason != reason

    def turned_away(self, target: str) -> Peer | None:
        """Who has called under that name, or from that address, and was refused."""
        return next((p for p in self._turned_away.values() if target in (p.name, p.address)), None)

    def let_in(self, name: str) -> None:
        self._turned_away.pop(name, None)

    def members(self, dials: Dials) -> list[Peer]:
        """Each once: a peer with the call to it, known by its name or, before an answer, by its address alone. Beside
        one that is up, whoever was called elsewhere and has its name, too."""
        shown = [_shown(p, _dial_to(p, dials)) for p in self._peers.values()]
        named = {p.name: None for p in shown}
        shown_at = {p.called_at: None for p in shown}
        for d in dials.all():
            namesake = d.state is DialState.REFUSED and (p := self._peers.get(d.name)) and p.state in USABLE
            if d.address not in shown_at and (d.name not in named or namesake):
                shown.append(_shown_dial(d))
        named = {p.name: None for p in shown}
        return shown + [p for p in self._turned_away.values() if p.name not in named]


def _dial_to(known: Known, dials: Dials) -> Dial | None:
    """The call to a peer; not one to another node that has its name."""
    at, named = dials.at(known.hello.address), dials.named(known.name)
    namesake = named is not None and named.state is DialState.REFUSED and known.state in USABLE
    return at or (None if namesake else named)


def _shown(known: Known, dial: Dial | None) -> Peer:
    """A peer that is down shows what has become of calling it."""
    if dial is None:
        return known.record()
    peer = replace(known.record(), called_at=dial.address, calling=dial.state in UNDERWAY)
    if known.state not in (GREETING, DEAD, LEFT):
        return peer
    if dial.state is DialState.REFUSED:
        return replace(peer, state=PeerState.REFUSED, reason=dial.reason)
    if known.reason and dial.reason not in ("", known.reason):
        return replace(peer, reason=f"{known.reason} (called again: {dial.reason})")
    return replace(peer, reason=known.reason or dial.reason)


def _shown_dial(dial: Dial) -> Peer:
    state = {
        DialState.OPENING: PeerState.GREETING,
        DialState.OPEN: PeerState.GREETING,
    }.get(dial.state) or PeerState(dial.state)
    return Peer(
        name=dial.name,
        address=dial.address,
        called_at=dial.address,
        calling=dial.state in UNDERWAY,
        link=dial.link,
        state=state,
        reason=dial.reason,
    )
