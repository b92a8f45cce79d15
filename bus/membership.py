"""Who is there, which life of it, and may we use it? (design, sections 5, 6 and 9; handoff.md, R11 and R12)

Theory of operation. A *peer* is a node that has said hello to us or welcomed us; it is known by name, and exactly
one of its incarnations is current. Only a hello (or the welcome that answers ours) on a new connection makes
another one current; the old one is then retired for good, which is the one proof, beside a goodbye, that it is
over. All that carries another incarnation than the current one is answered with `stale_peer`, and not acted on.

Decode nodes call the prefill nodes that they learn of (asked to join, hello received, members in a welcome), since
they ask and prefill nodes answer; every node calls what it was asked to join. `dials` keeps those calls. Tools and
clients (no geometry) are welcomed and forgotten.

Liveness is judged only along links in use: we ping, and any message counts. Silence is our judgement alone. It
makes a peer suspect, then dead: not chosen, called anew, and never a reason to end a lease. A pause of our own is
not the peer's silence. A cut connection makes a peer suspect at once and starts the pings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .compatibility import DECODE_ROLES, PREFILL_ROLES, differences
from .dials import Dial, Dials, DialState
from .known import CURRENT, DEAD, LEFT, LIVE, REMOVED, REMOVING, UP, USABLE, Known
from .members import (
    AgentReceived,
    BusyChanged,
    CloseLink,
    DrainAsked,
    DrainReceived,
    DrainStarted,
    GoodbyeReceived,
    Heard,
    HeartbeatReceived,
    HelloReceived,
    JoinAsked,
    Leaving,
    LinkFailed,
    LinkLost,
    LinkOpened,
    MembershipConfig,
    MembershipEffect,
    MembershipEvent,
    OpenLink,
    OwnAgentChanged,
    OwnLoadChanged,
    Peer,
    PeerAgent,
    PeerDown,
    PeerDraining,
    PeerRemoved,
    PeerState,
    PeerUp,
    RefusedReceived,
    Rejected,
    RemoveAsked,
    SendOn,
    StaleReceived,
    Tick,
    WelcomeReceived,
)
from .messages import Agent, Drain, Goodbye, Heartbeat, Hello, Member, Message, Refused, StalePeer, Welcome
from .wire import Header, replace

HANDOFF_KINDS = ("prefill.", "transfer.", "lease.")  # nothing of these before a hello
NEVER_STALE = ("stale_peer", "error", "goodbye", "refused", "hello")  # no use in answering these with stale_peer


class Membership:
    """The machine. `handle` alone changes it; `next_deadline` says when a Tick is due (earlier does no harm)."""

    def __init__(self, config: MembershipConfig) -> None:
        self._config = config
        self._hello = config.hello
        self._peers: dict[str, Known] = {}
        self._dials = Dials(config)
        self._retired: dict[bytes, int] = {}  # incarnation -> when, oldest first
        self._turned_away: dict[str, Peer] = {}  # by name: who called and was refused
        self._agents: dict[int, Agent] = {}
        self._load = Heartbeat()
        self._draining = False
        self._leaving = False
        self._handlers: dict[type[MembershipEvent], Callable[[Any, int], list[MembershipEffect]]] = {
            JoinAsked: self._join,
            RemoveAsked: self._remove,
            LinkOpened: self._link_opened,
            LinkFailed: self._link_failed,
            LinkLost: self._link_lost,
            Heard: self._heard,
            HelloReceived: self._hello_received,
            WelcomeReceived: self._welcome_received,
            RefusedReceived: self._refused_received,
            AgentReceived: self._agent_received,
            HeartbeatReceived: self._heartbeat_received,
            GoodbyeReceived: self._goodbye_received,
            DrainReceived: self._drain_received,
            StaleReceived: self._stale_received,
            Tick: self._tick,
            BusyChanged: self._busy_changed,
            OwnAgentChanged: self._own_agent_changed,
            OwnLoadChanged: self._own_load_changed,
            DrainStarted: self._drain_started,
            Leaving: self._leave,
        }

    # ------------------------------------------------------------ the doors

    def handle(self, event: MembershipEvent, now_ns: int) -> list[MembershipEffect]:
        effects = self._handlers[type(event)](event, now_ns)
        if type(event) is not Heard and not self._leaving:
            effects.extend(OpenLink(address=a) for a in self._dials.start_due(now_ns))
        return effects

    def next_deadline(self) -> int | None:
        deadlines = [p.deadline_ns(self._config) for p in self._peers.values()]
        if not self._leaving:
            deadlines.append(self._dials.next_due_ns())
        return min((d for d in deadlines if d is not None), default=None)

    def accepts(self, header: Header, kind: str) -> bool:
        """Whether a message may be acted on: both incarnations are current, and a hello came first if it must."""
        return self._stale(header, kind) is None

    def peer(self, name: str) -> Peer | None:
        known = self._peers.get(name)
        return known.record() if known else None

    def peers(self) -> list[Peer]:
        """Those that are up or suspect."""
        return [p.record() for p in self._peers.values() if p.state in USABLE]

    def prefill_peers(self) -> list[Peer]:
        """Those that a decode node may send a new prompt to: up, not draining, with a link."""
        return [
            p.record()
            for p in self._peers.values()
            if p.state is UP and not p.draining and p.link and p.hello.role in PREFILL_ROLES
        ]

    def members(self) -> list[Peer]:
        """Everyone that we know or try to reach, whatever the state, with the reason; for people and tools."""
        shown = [self._shown(p) for p in self._peers.values()]
        named = {p.name for p in shown}
        shown += [self._shown_dial(d) for d in self._dials.all() if d.name not in named]
        return shown + [p for p in self._turned_away.values() if p.name not in named]

    @property
    def hello(self) -> Hello:
        """What we say of ourselves now."""
        return self._hello

    # ------------------------------------------------------------ asked by people

    def _join(self, event: JoinAsked, now_ns: int) -> list[MembershipEffect]:
        if event.address == self._hello.address:
            return [_rejected(event, "this is the node itself")]
        known = next((p for p in self._peers.values() if p.hello.address == event.address), None)
        if known is not None:
            known.move("asked")
        dial = self._dials.at(event.address)
        if dial is not None:
            return [] if self._dials.ask(dial, now_ns) else [_rejected(event, f"already {dial.state}")]
        if self._dials.full():
            return [_rejected(event, f"{self._config.addresses_max} addresses are being called already")]
        self._dials.add(event.address, "", now_ns)
        return []

    def _remove(self, event: RemoveAsked, now_ns: int) -> list[MembershipEffect]:
        dial = self._dials.at(event.target) or self._dials.named(event.target)
        known = self._peers.get(event.target) or self._peers.get(dial.name if dial else "")
        known = known or next((p for p in self._peers.values() if p.hello.address == event.target), None)
        if known is not None:
            if known.state in (REMOVING, REMOVED):
                return [_rejected(event, f"already {known.state}")]
            known.move("remove", "removed")
            known.remove_ns = now_ns + self._config.removal_ns
            return self._removed(known) if known.state is REMOVED or not known.busy else []
        if dial is None or dial.state is DialState.REMOVED:
            return [_rejected(event, f"no member {event.target}")]
        closing = _close(dial.link)
        self._dials.remove(dial)
        return [*closing, PeerRemoved(name=dial.name, address=dial.address)]

    def _removed(self, known: Known) -> list[MembershipEffect]:
        """The last lease has ended, or was waited for long enough."""
        effects: list[MembershipEffect] = []
        if known.move("idle", "removed"):
            effects = [self._send(known, known.link, Goodbye(reason="removed")), *_close(known.out, flush=True)]
            effects.append(PeerDown(peer=known.record(), reason="removed", proven=False))
        dial = self._dials.named(known.name) or self._dials.at(known.hello.address)
        if dial is not None:
            effects += [] if dial.link == known.out else _close(dial.link)
            self._dials.remove(dial)
        known.out = known.inn = ""
        return [*effects, PeerRemoved(name=known.name, address=known.hello.address)]

    def _drain_started(self, event: DrainStarted, now_ns: int) -> list[MembershipEffect]:
        self._draining = True
        return [self._send(p, p.link, Drain()) for p in self._usable()]

    def _leave(self, event: Leaving, now_ns: int) -> list[MembershipEffect]:
        self._leaving = True
        return [self._send(p, p.link, Goodbye(reason=event.reason)) for p in self._usable()]

    # ------------------------------------------------------------ asked by the node

    def _busy_changed(self, event: BusyChanged, now_ns: int) -> list[MembershipEffect]:
        known = self._peers.get(event.peer)
        if known is None or known.busy == event.busy:
            return [_rejected(event, "no such peer" if known is None else "no change")]
        if event.busy:
            known.use(now_ns)
        else:
            known.use_until_ns = now_ns + self._config.in_use_ns
        known.busy = event.busy
        return self._removed(known) if known.state is REMOVING and not event.busy else []

    def _own_agent_changed(self, event: OwnAgentChanged, now_ns: int) -> list[MembershipEffect]:
        if event.agent.epoch < self._hello.epoch:
            return [_rejected(event, f"epoch {event.agent.epoch} is over, {self._hello.epoch} is current")]
        if event.agent.epoch > self._hello.epoch:
            self._agents.clear()
            self._hello = replace(self._hello, epoch=event.agent.epoch)
        self._agents[event.agent.rank] = event.agent
        return [self._send(p, p.link, event.agent) for p in self._usable()]

    def _own_load_changed(self, event: OwnLoadChanged, now_ns: int) -> list[MembershipEffect]:
        self._load = Heartbeat(
            waiting_prefill_tokens=event.waiting_prefill_tokens, running=event.running, free_blocks=event.free_blocks
        )
        return []

    # ------------------------------------------------------------ links

    def _link_opened(self, event: LinkOpened, now_ns: int) -> list[MembershipEffect]:
        if not self._dials.opened(event.address, event.link, now_ns):
            return [*_close(event.link), _rejected(event, "no longer wanted")]
        return [SendOn(link=event.link, kind=Hello.KIND, message=self._hello)]

    def _link_failed(self, event: LinkFailed, now_ns: int) -> list[MembershipEffect]:
        dial = self._dials.at(event.address)
        if dial is None or dial.state is not DialState.OPENING:
            return [_rejected(event, "not being opened")]
        self._dials.fail(dial, event.problem, now_ns)
        return []

    def _link_lost(self, event: LinkLost, now_ns: int) -> list[MembershipEffect]:
        dial = self._dials.on(event.link)
        if dial is None:
            return [_rejected(event, "unknown link", event.link)]
        if dial.state is DialState.GREETING:
            self._dials.fail(dial, "the connection was cut during the handshake", now_ns)
            return _close(event.link)
        known = self._peers.get(dial.name)
        if known is None or known.state not in LIVE:
            return [_rejected(event, "no live peer there", event.link)]
        known.move("cut", "the connection was cut")
        known.use(now_ns)
        known.use_until_ns = max(known.use_until_ns, now_ns + self._config.in_use_ns)
        return []

    # ------------------------------------------------------------ hello, welcome, refused

    def _hello_received(self, event: HelloReceived, now_ns: int) -> list[MembershipEffect]:
        header, hello = event.header, event.message
        if refusal := self._refusal(event, now_ns):
            self._remember_refusal(header, hello, refusal)
            return [self._answer(event.link, header, refusal), _rejected(event, refusal.reason, event.link)]
        welcome = self._answer(event.link, header, Welcome(hello=self._hello, members=self._introduce(header.from_)))
        if hello.geometry is None:
            return [welcome]
        effects = self._greeted(header, hello, now_ns)
        known = self._peers[header.from_]
        known.inn = event.link
        self._want(known, now_ns)
        return [*effects, welcome, *self._present(known, event.link), *self._announce(known)]

    def _refusal(self, event: HelloReceived, now_ns: int) -> Refused | None:
        header, hello = event.header, event.message
        known = self._peers.get(header.from_)
        if self._leaving:
            return Refused(reason="this node is shutting down")
        if reason := self._impossible(header, now_ns):
            return Refused(reason=reason)
        if hello.geometry is None:
            return Refused(reason=f"the name {header.from_} is a node's") if known else None
        if known is not None and known.state in (REMOVING, REMOVED):
            return Refused(reason="removed here by an operator, until asked to join again")
        if known is not None and known.incarnation != header.from_inc and event.link in (known.inn, known.out):
            return Refused(reason="another incarnation must come on a connection of its own")
        if fields := differences(hello, self._hello):
            return Refused(reason=_differ(fields), fields=fields)
        if known is None and len(self._peers) >= self._config.peers_max and not self._forget_one():
            return Refused(reason=f"this node knows {self._config.peers_max} members already")
        return None

    def _impossible(self, header: Header, now_ns: int) -> str:
        """Why this sender can be no peer of ours at all; '' when it can."""
        if header.from_inc == self._config.incarnation:
            return "this is the node itself"
        if header.from_ == self._config.name:
            return f"the name {header.from_} is taken by this node"
        if not header.from_ or not header.from_inc:
            return "a name and an incarnation are needed in the header"
        if self._is_retired(header.from_inc, now_ns):
            return f"this incarnation is retired: another node named {header.from_} came after it"
        return ""

    def _welcome_received(self, event: WelcomeReceived, now_ns: int) -> list[MembershipEffect]:
        header, hello = event.header, event.message.hello
        dial = self._dials.on(event.link)
        if dial is None or dial.state is not DialState.GREETING:
            return [_rejected(event, "no hello of ours is waiting there", event.link)]
        if header.to_inc not in (b"", self._config.incarnation):
            return [_rejected(event, "meant for another incarnation", event.link)]
        fields = differences(self._hello, hello)
        if reason := self._impossible(header, now_ns) or (_differ(fields) if fields else ""):
            self._dials.refuse(dial, reason, now_ns)
            return [*_close(event.link), _rejected(event, reason, event.link)]
        if hello.geometry is None:
            self._dials.refuse(dial, f"a {hello.role} is no member", now_ns)
            return [*_close(event.link), _rejected(event, "no geometry", event.link)]
        return self._welcomed(event, dial, now_ns)

    def _welcomed(self, event: WelcomeReceived, dial: Dial, now_ns: int) -> list[MembershipEffect]:
        header, hello = event.header, event.message.hello
        known = self._peers.get(header.from_)
        if known is not None and known.state in (REMOVING, REMOVED):
            self._dials.remove(dial)
            return [*_close(event.link), _rejected(event, "removed here", event.link)]
        if known is not None and known.incarnation == header.from_inc and known.out and known.state in USABLE:
            self._dials.drop(dial)  # two addresses of one peer: the first link stays
            return [*_close(event.link), _rejected(event, f"{header.from_} has a link already", event.link)]
        effects = self._greeted(header, hello, now_ns)
        known = self._peers[header.from_]
        known.out = event.link
        self._dials.welcome(dial, known.name, now_ns)
        for member in event.message.members:
            self._learn(member, now_ns)
        return [*effects, *self._present(known, event.link), *self._announce(known)]

    def _refused_received(self, event: RefusedReceived, now_ns: int) -> list[MembershipEffect]:
        dial = self._dials.on(event.link)
        if dial is None or dial.state is not DialState.GREETING:
            return [_rejected(event, "no hello of ours is waiting there", event.link)]
        dial.name = dial.name or event.header.from_
        self._dials.refuse(dial, event.message.reason, now_ns)
        return _close(event.link)

    def _greeted(self, header: Header, hello: Hello, now_ns: int) -> list[MembershipEffect]:
        """Make this incarnation the current one of its name. Tells the end of the one before."""
        effects: list[MembershipEffect] = []
        known = self._peers.get(header.from_)
        if known is not None and known.incarnation != header.from_inc:
            effects = self._succeeded(known, now_ns)
            known = None
        if known is None:
            known = self._peers[header.from_] = Known(header.from_, header.from_inc, hello)
        known.hello = hello
        known.raise_epoch(hello.epoch)
        known.last_heard_ns = max(known.last_heard_ns, now_ns)
        self._turned_away.pop(known.name, None)
        return effects

    def _succeeded(self, known: Known, now_ns: int) -> list[MembershipEffect]:
        """A new incarnation of the name has said hello: proof that this one is over."""
        self._retire(known.incarnation, now_ns)
        reason = f"{known.name} was restarted"
        effects: list[MembershipEffect] = []
        dial = self._dials.on(known.out)
        if dial is not None and dial.state is DialState.OPEN:
            effects += _close(known.out)
            self._dials.fail(dial, reason, now_ns)
            self._dials.ask(dial, now_ns)
        return [*effects, PeerDown(peer=replace(known.record(), state=LEFT, reason=reason), reason=reason, proven=True)]

    def _present(self, known: Known, link: str) -> list[MembershipEffect]:
        """What follows a welcome: our agents, and that we drain."""
        own: list[Message] = [self._agents[rank] for rank in sorted(self._agents)]
        own += [Drain()] if self._draining else []
        return [self._send(known, link, message) for message in own]

    def _announce(self, known: Known) -> list[MembershipEffect]:
        """Tell the node that the peer is up, unless it was."""
        was_usable = known.state in USABLE
        known.move("greeted")
        if was_usable:
            return []
        peer = known.record()
        return [PeerUp(peer=peer), *(PeerAgent(peer=peer, agent=agent) for agent in peer.agents)]

    def _introduce(self, to: str) -> tuple[Member, ...]:
        """Whom we know, for a welcome."""
        return tuple(
            Member(name=p.name, address=p.hello.address, role=p.hello.role)
            for p in self._usable()
            if p.name != to and p.hello.address
        )

    def _learn(self, member: Member, now_ns: int) -> None:
        if self._dials.named(member.name) is None and member.name != self._config.name:
            self._call(member.name, member.address, member.role, now_ns)

    def _want(self, known: Known, now_ns: int) -> None:
        """A peer has told its address itself: that counts more than the one we knew."""
        dial = self._dials.named(known.name)
        if dial is not None and dial.state is not DialState.OPEN and dial.address != known.hello.address:
            self._dials.drop(dial)
        self._call(known.name, known.hello.address, known.hello.role, now_ns)

    def _call(self, name: str, address: str, role: str, now_ns: int) -> None:
        """Call a prefill node that we have heard of, if we decode."""
        if self._hello.role not in DECODE_ROLES or role not in PREFILL_ROLES or not address:
            return
        known = self._peers.get(name)
        if (known and known.state in (REMOVING, REMOVED)) or address == self._hello.address:
            return
        dial = self._dials.at(address)
        if dial is None and self._dials.named(name) is None and not self._dials.full():
            self._dials.add(address, name, now_ns)
        elif dial is not None and dial.state in (DialState.WAITING, DialState.REFUSED):
            self._dials.ask(dial, now_ns)

    def _forget_one(self) -> bool:
        """Make room: of those that are gone and not called, the one known longest."""
        for known in list(self._peers.values()):
            if known.state in (DEAD, LEFT) and self._dials.named(known.name) is None:
                self._retire(known.incarnation, known.last_heard_ns)
                del self._peers[known.name]
                return True
        return False

    def _remember_refusal(self, header: Header, hello: Hello, refusal: Refused) -> None:
        if hello.geometry is None or not header.from_ or header.from_ == self._config.name:
            return
        while len(self._turned_away) >= self._config.turned_away_max:
            del self._turned_away[next(iter(self._turned_away))]
        self._turned_away[header.from_] = Peer(
            name=header.from_, incarnation=header.from_inc, role=hello.role, address=hello.address, http=hello.http,
            state=PeerState.REFUSED, reason=refusal.reason, hello=hello,
        )  # fmt: skip

    # ------------------------------------------------------------ everything that peers say later

    def _heard(self, event: Heard, now_ns: int) -> list[MembershipEffect]:
        if self._stale(event.header, event.kind) is not None:
            return self._stale_answer(event.link, event.header, event.kind)
        known = self._peers.get(event.header.from_)
        return self._listen(known, event.link, now_ns) if known else []

    def _listen(self, known: Known, link: str, now_ns: int) -> list[MembershipEffect]:
        """It lives. One judged dead is up again where it calls us, else it is called anew at once."""
        known.last_heard_ns = max(known.last_heard_ns, now_ns)
        if known.state is UP:
            return []
        if known.state is DEAD:
            return self._back(known, link, now_ns)
        known.move("heard")
        return []

    def _back(self, known: Known, link: str, now_ns: int) -> list[MembershipEffect]:
        dial = self._dials.named(known.name)
        if dial is not None:
            if dial.state is DialState.WAITING:
                dial.due_ns = min(dial.due_ns, now_ns)
            return []
        if link != known.inn or not known.move("heard"):
            return []
        peer = known.record()
        return [PeerUp(peer=peer), *(PeerAgent(peer=peer, agent=agent) for agent in peer.agents)]

    def _stale(self, header: Header, kind: str) -> str | None:
        """Why this message is from, or for, another life; None when it may be acted on."""
        if header.to_inc and header.to_inc != self._config.incarnation:
            return "meant for another incarnation of this node"
        known = self._peers.get(header.from_)
        if known is not None:
            if header.from_inc != known.incarnation or known.state not in CURRENT:
                return f"not from the current incarnation of {header.from_}"
        elif header.from_inc in self._retired or kind.startswith(HANDOFF_KINDS):
            return "no hello came before it"
        return None

    def _stale_answer(self, link: str, header: Header, kind: str) -> list[MembershipEffect]:
        reason = self._stale(header, kind) or ""
        rejected = Rejected(event=kind, reason=reason, link=link)
        if kind in NEVER_STALE:
            return [rejected]
        return [self._answer(link, header, StalePeer(current=self._config.incarnation)), rejected]

    def _agent_received(self, event: AgentReceived, now_ns: int) -> list[MembershipEffect]:
        if self._stale(event.header, Agent.KIND) is not None:
            return self._stale_answer(event.link, event.header, Agent.KIND)
        known, agent = self._peers.get(event.header.from_), event.message
        if known is None or known.state not in USABLE:
            return [_rejected(event, "no such peer", event.link)]
        effects = self._listen(known, event.link, now_ns)
        if agent.epoch < known.epoch or known.agents.get(agent.rank) == agent:
            return effects
        known.raise_epoch(agent.epoch)
        known.agents[agent.rank] = agent
        return [*effects, PeerAgent(peer=known.record(), agent=agent)]

    def _heartbeat_received(self, event: HeartbeatReceived, now_ns: int) -> list[MembershipEffect]:
        if self._stale(event.header, Heartbeat.KIND) is not None:
            return self._stale_answer(event.link, event.header, Heartbeat.KIND)
        effects: list[MembershipEffect] = []
        known = self._peers.get(event.header.from_)
        if known is not None:
            known.load = event.message
            effects = self._listen(known, event.link, now_ns)
        return [*effects, self._answer(event.link, event.header, self._load)] if event.message.reply else effects

    def _goodbye_received(self, event: GoodbyeReceived, now_ns: int) -> list[MembershipEffect]:
        known = self._peers.get(event.header.from_)
        reason = self._stale(event.header, Goodbye.KIND)
        if known is None or reason is not None:
            return [_rejected(event, reason or "no such peer", event.link)]
        known.draining = False
        if known.state is REMOVING:
            return self._removed(known)
        why = f"it said goodbye: {event.message.reason}".removesuffix(": ")
        known.move("goodbye", why)
        return self._down(known, why, True, now_ns)

    def _drain_received(self, event: DrainReceived, now_ns: int) -> list[MembershipEffect]:
        if self._stale(event.header, Drain.KIND) is not None:
            return self._stale_answer(event.link, event.header, Drain.KIND)
        known = self._peers.get(event.header.from_)
        if known is None:
            return [DrainAsked(link=event.link, cause=event.header.seq)]
        effects = self._listen(known, event.link, now_ns)
        known.draining = True
        return [*effects, PeerDraining(peer=known.record())]

    def _stale_received(self, event: StaleReceived, now_ns: int) -> list[MembershipEffect]:
        """Someone there does not take us, or itself, for what we think: say hello anew on a new connection."""
        if event.message.current in self._retired:
            return [_rejected(event, "late, from a retired incarnation", event.link)]
        dial = self._dials.on(event.link)
        if dial is not None and dial.state is DialState.GREETING:
            self._dials.fail(dial, "it answered stale_peer", now_ns)
            return _close(event.link)
        known = next((p for p in self._peers.values() if event.link in (p.out, p.inn) and p.state in LIVE), None)
        if known is None:
            return [_rejected(event, "no live peer there", event.link)]
        return self._lost(known, "it answered stale_peer: one of us was restarted", now_ns)

    # ------------------------------------------------------------ time

    def _tick(self, event: Tick, now_ns: int) -> list[MembershipEffect]:
        due = self.next_deadline()
        if due is not None and now_ns - due > self._config.heartbeat_ns:
            for known in self._peers.values():
                known.forgive(now_ns)  # it was us who paused
        effects: list[MembershipEffect] = []
        for dial in self._dials.overdue(now_ns):
            effects += _close(dial.link)
            self._dials.fail(dial, f"no answer within {self._config.handshake_ns / 1e9:g} s", now_ns)
        for known in list(self._peers.values()):
            if known.state in LIVE:
                effects += self._watch(known, now_ns)
        return effects

    def _watch(self, known: Known, now_ns: int) -> list[MembershipEffect]:
        if known.state is REMOVING and now_ns >= known.remove_ns:
            return self._removed(known)
        if not known.in_use(now_ns):
            return []
        silent_ns = now_ns - known.silent_since_ns
        if silent_ns >= self._config.dead_ns:
            return self._lost(known, f"silent for {silent_ns / 1e9:.1f} s", now_ns)
        if silent_ns >= self._config.suspect_ns:
            known.move("silent", f"silent for {silent_ns / 1e9:.1f} s")
        if now_ns < known.ping_ns:
            return []
        known.ping_ns = now_ns + self._config.heartbeat_ns
        return [self._send(known, known.link, replace(self._load, reply=True))]

    def _lost(self, known: Known, reason: str, now_ns: int) -> list[MembershipEffect]:
        """Our judgement only: nothing is proven."""
        if known.state is REMOVING:
            return self._removed(known)
        known.move("lost", reason)
        return self._down(known, reason, False, now_ns)

    def _down(self, known: Known, reason: str, proven: bool, now_ns: int) -> list[MembershipEffect]:
        effects = _close(known.out)
        dial = self._dials.on(known.out)
        if dial is not None:
            self._dials.fail(dial, reason, now_ns)
        known.out = ""
        return [*effects, PeerDown(peer=known.record(), reason=reason, proven=proven)]

    # ------------------------------------------------------------ helpers

    def _usable(self) -> list[Known]:
        return [p for p in self._peers.values() if p.state in USABLE]

    def _retire(self, incarnation: bytes, now_ns: int) -> None:
        while len(self._retired) >= self._config.retired_max:
            del self._retired[next(iter(self._retired))]
        self._retired[incarnation] = now_ns

    def _is_retired(self, incarnation: bytes, now_ns: int) -> bool:
        at = self._retired.get(incarnation)
        return at is not None and now_ns - at < self._config.retired_ns

    def _send(self, known: Known, link: str, message: Message) -> SendOn:
        return SendOn(link=link, kind=message.KIND, message=message, to=known.name, to_inc=known.incarnation)

    def _answer(self, link: str, header: Header, message: Message) -> SendOn:
        return SendOn(
            link=link, kind=message.KIND, message=message, to=header.from_, to_inc=header.from_inc, cause=header.seq
        )

    def _shown(self, known: Known) -> Peer:
        """A peer that is down shows what has become of calling it."""
        dial = self._dials.named(known.name)
        if dial is None or known.state not in (DEAD, LEFT) or dial.state is not DialState.REFUSED:
            return known.record()
        return replace(known.record(), state=PeerState.REFUSED, reason=dial.reason)

    def _shown_dial(self, dial: Dial) -> Peer:
        state = PeerState.GREETING if dial.state is DialState.OPENING else PeerState(dial.state)
        return Peer(name=dial.name, address=dial.address, link=dial.link, state=state, reason=dial.reason)


def _close(link: str, *, flush: bool = False) -> list[MembershipEffect]:
    return [CloseLink(link=link, flush=flush)] if link else []


def _rejected(event: MembershipEvent, reason: str, link: str = "") -> Rejected:
    return Rejected(event=type(event).__name__, reason=reason, link=link)


def _differ(fields: tuple[tuple[str, str, str], ...]) -> str:
    return "cannot share KV: " + ", ".join(f"{name} {one} against {other}" for name, one, other in fields)
