"""Who is there, which life of it, and may we use it? (docs/protocol.md: "A member", R11 and R12)

Theory of operation. A *peer* is a node that has said hello to us or welcomed us; it is known by name, and exactly
one of its incarnations is current. Only a hello (or the welcome that answers ours) on a new connection makes
another one current; the old one is then retired, which is the one proof, beside a goodbye, that it is over. (Should
it live, as when two nodes were given one name, it comes back by answering us once its successor has gone.) All that
carries another incarnation than the current one is answered with `stale_peer`, and not acted on.

Every node calls what it was asked to join, and then whomever a welcome names: so all know the newcomer and it knows
all, whichever member it joined. A decode node also calls back a prefill node that says hello, since decode nodes ask
and prefill nodes answer. `dials` keeps those calls. Tools and clients (no geometry) are welcomed and forgotten.

Whether a peer still lives is judged in `liveness`, what the operator asked for is kept in `commands`, and what we say
of ourselves in `own`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import members as ms
from .commands import Commands
from .compatibility import DECODE_ROLES, PREFILL_ROLES, Unreadable, describe, differences
from .dials import Dial, Dials, DialState
from .known import DEAD, LEFT, LIVE, REMOVED, REMOVING, UP, USABLE, Known
from .liveness import Liveness
from .messages import Drain, Goodbye, Hello, Member, Refused, StalePeer, Welcome
from .own import Own
from .roster import Roster
from .wire import Header, replace

LEAVING = Refused(reason="this node is shutting down")
CURRENT_ONLY = (ms.Heard, ms.AgentReceived, ms.HeartbeatReceived, ms.DrainReceived)  # said between current lives
NEVER_STALE = ("error", "goodbye", "refused", "welcome")  # no use in answering these with stale_peer


class Membership:
    """The machine. `handle` alone changes it; `next_deadline` says when a ms.Tick is due (earlier does no harm)."""

    def __init__(self, config: ms.MembershipConfig, unreadable: Unreadable) -> None:
        """`unreadable` tells whether two nodes' KV geometries work together."""
        self._config = config
        self._unreadable = unreadable
        self._own = Own(config.hello)
        self._roster = Roster(config, unreadable)
        self._dials = Dials(config)
        self._commands = Commands(config, self._roster, self._dials)
        self._liveness = Liveness(config, self._own, self._roster, self._dials, self._commands)
        self._leaving = False
        self._deadline: int | None = None
        self._deadline_known = False
        self._handlers: dict[type[ms.MembershipEvent], Callable[[Any, int], list[ms.MembershipEffect]]] = {
            ms.JoinAsked: self._commands.join,
            ms.RemoveAsked: self._commands.remove,
            ms.LinkOpened: self._link_opened,
            ms.LinkFailed: self._link_failed,
            ms.LinkLost: self._link_lost,
            ms.Heard: self._heard,
            ms.HelloReceived: self._hello_received,
            ms.WelcomeReceived: self._welcome_received,
            ms.RefusedReceived: self._refused_received,
            ms.AgentReceived: self._agent_received,
            ms.HeartbeatReceived: self._heartbeat_received,
            ms.GoodbyeReceived: self._goodbye_received,
            ms.DrainReceived: self._drain_received,
            ms.StaleReceived: self._stale_received,
            ms.Tick: self._tick,
            ms.BusyChanged: self._liveness.busy_changed,
            ms.WatchChanged: self._liveness.watch_changed,
            ms.OwnAgentChanged: self._own_agent_changed,
            ms.OwnLoadChanged: self._own_load_changed,
            ms.DrainStarted: self._drain_started,
            ms.Leaving: self._leave,
        }

    # ------------------------------------------------------------ the doors

    def handle(self, event: ms.MembershipEvent, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._alone_concerned(event) if self._deadline_known else None
        before = known.deadline_ns(self._config) if known else None
        effects = self._refused_as_stale(event)
        if effects is None:
            effects = self._handlers[type(event)](event, now_ns)
        if type(event) is not ms.Heard and not self._leaving and (due := self._dials.start_due(now_ns)):
            effects.extend(ms.OpenLink(address=a) for a in due)
            known = None
        self._deadline_moved(known, before)
        return effects

    def next_deadline(self) -> int | None:
        if not self._deadline_known:
            deadlines = [p.deadline_ns(self._config) for p in self._roster.all()]
            if not self._leaving:
                deadlines.append(self._dials.next_due_ns())
            self._deadline, self._deadline_known = min((d for d in deadlines if d is not None), default=None), True
        return self._deadline

    def _alone_concerned(self, event: ms.MembershipEvent) -> Known | None:
        """The one peer whose deadline these frequent events can move: with many peers, looking at all is slow."""
        if isinstance(event, ms.Heard):
            known = self._roster.get(event.header.from_)
        elif isinstance(event, ms.BusyChanged):
            known = self._roster.get(event.peer)
        else:
            return None
        return known if known is not None and known.state is UP else None

    def _deadline_moved(self, known: Known | None, before: int | None) -> None:
        after = known.deadline_ns(self._config) if known else None
        if known is None or (before == self._deadline and after != before):
            self._deadline_known = False
        elif after is not None and (self._deadline is None or after < self._deadline):
            self._deadline = after

    def peer(self, name: str) -> ms.Peer | None:
        known = self._roster.get(name)
        return known.record() if known else None

    def prefill_names(self) -> list[str]:
        """Those that a decode node may send a new prompt to: up, not draining, with a link."""
        return [
            p.name
            for p in self._roster.all()
            if p.state is UP and not p.draining and p.link and p.hello.role in PREFILL_ROLES
        ]

    def prefill_peers(self) -> list[ms.Peer]:
        """The same as records."""
        return [p for name in self.prefill_names() if (p := self.peer(name)) is not None]

    def members(self) -> list[ms.Peer]:
        """Everyone that we know or try to reach, whatever the state, with the reason; for people and tools."""
        return self._roster.members(self._dials)

    @property
    def hello(self) -> Hello:
        """What we say of ourselves now."""
        return self._own.hello

    # ------------------------------------------------------------ asked by the node

    def _drain_started(self, event: ms.DrainStarted, now_ns: int) -> list[ms.MembershipEffect]:
        self._own.draining = True
        return [p.say(p.link, Drain()) for p in self._roster.usable()]

    def _leave(self, event: ms.Leaving, now_ns: int) -> list[ms.MembershipEffect]:
        self._leaving = True
        return [p.say(p.link, Goodbye(reason=event.reason)) for p in self._roster.usable()]

    def _own_agent_changed(self, event: ms.OwnAgentChanged, now_ns: int) -> list[ms.MembershipEffect]:
        if not self._own.change_agent(event):
            return [ms.rejected(event, f"epoch {event.agent.epoch} is over, {self._own.hello.epoch} is current")]
        return [p.say(p.link, event.agent) for p in self._roster.usable()]

    def _own_load_changed(self, event: ms.OwnLoadChanged, now_ns: int) -> list[ms.MembershipEffect]:
        self._own.change_load(event)
        return []

    # ------------------------------------------------------------ links

    def _link_opened(self, event: ms.LinkOpened, now_ns: int) -> list[ms.MembershipEffect]:
        if not self._dials.opened(event.address, event.link, now_ns):
            return [*ms.closing(event.link), ms.rejected(event, "no longer wanted")]
        return [ms.SendOn(link=event.link, kind=Hello.KIND, message=self._own.hello)]

    def _link_failed(self, event: ms.LinkFailed, now_ns: int) -> list[ms.MembershipEffect]:
        dial = self._dials.at(event.address)
        if dial is None or dial.state is not DialState.OPENING:
            return [ms.rejected(event, "not being opened")]
        return self._call_failed(dial, event.problem, now_ns)

    def _link_lost(self, event: ms.LinkLost, now_ns: int) -> list[ms.MembershipEffect]:
        dial = self._dials.on(event.link)
        if dial is None:
            return [ms.rejected(event, "unknown link", event.link)]
        if dial.state is DialState.GREETING:
            reason = event.reason or "the connection was cut during the handshake"
            return [*ms.closing(event.link), *self._call_failed(dial, reason, now_ns)]
        known = self._roster.get(dial.name)
        if known is None or known.state not in LIVE:
            return [ms.rejected(event, "no live peer there", event.link)]
        return self._liveness.cut(known, event.reason or "the connection was cut", now_ns)

    # ------------------------------------------------------------ hello, welcome, refused

    def _hello_received(self, event: ms.HelloReceived, now_ns: int) -> list[ms.MembershipEffect]:
        header, hello = event.header, event.message
        refusal = self._roster.refusal(event, self._own.hello, self._dials, now_ns)
        if refusal is None and (reason := self._name_taken(header, hello, now_ns)):
            refusal = Refused(reason=reason)
        if refusal := LEAVING if self._leaving else refusal:
            effects = [ms.answer(event.link, header, refusal), ms.rejected(event, refusal.reason, event.link)]
            if self._roster.turn_away(header, hello, refusal.reason):
                effects.append(ms.TurnedAway(name=header.from_, address=hello.address, reason=refusal.reason))
            return effects
        welcome = ms.answer(
            event.link, header, Welcome(hello=self._own.hello, members=self._roster.introduce(header.from_))
        )
        if hello.geometry is None:
            return [welcome]
        known, effects = self._greeted(header, hello, now_ns)
        known.inn = event.link
        self._want(known, now_ns)
        return [*effects, welcome, *self._present(known, event.link), *known.announce()]

    def _name_taken(self, header: Header, hello: Hello, now_ns: int) -> str:
        """Why this life cannot have its name. Who has it is looked at: on an idle link it may have vanished."""
        reason = self._roster.taken(header, hello)
        if reason and (known := self._roster.get(header.from_)):
            known.use_for(now_ns, self._config.dead_ns + self._config.heartbeat_ns)
        return reason

    def _welcome_received(self, event: ms.WelcomeReceived, now_ns: int) -> list[ms.MembershipEffect]:
        header, hello = event.header, event.message.hello
        dial = self._dials.on(event.link)
        if dial is None or dial.state is not DialState.GREETING:
            return [ms.rejected(event, "no hello of ours is waiting there", event.link)]
        if header.to_inc not in (b"", self._config.incarnation):
            return [ms.rejected(event, "meant for another incarnation", event.link)]
        reason = self._roster.impossible(header, now_ns, answers=True)
        if not reason and (reason := self._name_taken(header, hello, now_ns)):
            dial.name = header.from_
            # It has welcomed us, takes us for a member, and would not know.
            bye = ms.answer(event.link, header, Goodbye(reason=reason))
            return [bye, *self._refuse_call(dial, reason, now_ns, flush=True), ms.rejected(event, reason, event.link)]
        if not reason and (fields := differences(self._own.hello, hello, self._unreadable)):
            reason, dial.name = describe(fields), dial.name or header.from_
        if reason:
            return [*self._refuse_call(dial, reason, now_ns), ms.rejected(event, reason, event.link)]
        if hello.geometry is None:
            reason = f"a {hello.role} is no member"
            return [*self._refuse_call(dial, reason, now_ns), ms.rejected(event, "no geometry", event.link)]
        return self._welcomed(event, dial, now_ns)

    def _welcomed(self, event: ms.WelcomeReceived, dial: Dial, now_ns: int) -> list[ms.MembershipEffect]:
        header, hello = event.header, event.message.hello
        known = self._roster.get(header.from_)
        if self._commands.keep_out(header.from_, hello.address, dial):
            leases = known is not None and known.state is REMOVING  # a goodbye would end them
            said = [] if leases else [ms.answer(event.link, header, Goodbye(reason="removed"))]
            return [*said, *ms.closing(event.link, flush=True), ms.rejected(event, "removed here", event.link)]
        if known is not None and known.incarnation == header.from_inc and known.out and known.state in USABLE:
            # Two addresses of one peer: the first link stays, and a word on it tells the peer where we are.
            self._dials.drop(dial)
            known.also_at(dial.address)
            rejected = ms.rejected(event, f"{header.from_} has a link already", event.link)
            return [*ms.closing(event.link), known.say(known.out, self._own.heartbeat()), rejected]
        known, effects = self._greeted(header, hello, now_ns)
        known.out = event.link
        self._dials.welcome(dial, known.name, now_ns)
        self._learn(event.message.members, now_ns)
        return [*effects, *self._present(known, event.link), *known.announce()]

    def _refused_received(self, event: ms.RefusedReceived, now_ns: int) -> list[ms.MembershipEffect]:
        dial = self._dials.on(event.link)
        if dial is None or dial.state is not DialState.GREETING:
            return [ms.rejected(event, "no hello of ours is waiting there", event.link)]
        dial.name = dial.name or event.header.from_
        effects = self._refuse_call(dial, event.message.reason, now_ns)
        known = self._roster.get(dial.name)
        if known is not None and known.state in LIVE and known.incarnation == event.header.from_inc:
            effects += self._liveness.lost(known, event.message.reason, now_ns)
        return effects

    def _refuse_call(self, dial: Dial, reason: str, now_ns: int, *, flush: bool = False) -> list[ms.MembershipEffect]:
        """They refused us, or we them: another try only slowly."""
        link = dial.link
        self._dials.refuse(dial, reason, now_ns)
        return [*ms.closing(link, flush=flush), *self._news_of(dial)]

    def _call_failed(self, dial: Dial, reason: str, now_ns: int) -> list[ms.MembershipEffect]:
        """No news of one that has been said to be gone: it is called so that it is found when it comes back."""
        self._dials.fail(dial, reason, now_ns)
        known = self._roster.get(dial.name)
        return [] if known is not None and known.state in (DEAD, LEFT) else self._news_of(dial)

    def _news_of(self, dial: Dial) -> list[ms.MembershipEffect]:
        if not self._dials.is_news(dial):
            return []
        return [ms.CallFailed(address=dial.address, name=dial.name, reason=dial.reason)]

    def _greeted(self, header: Header, hello: Hello, now_ns: int) -> tuple[Known, list[ms.MembershipEffect]]:
        """Make this incarnation the current one of its name. Tells the end of the one before."""
        effects: list[ms.MembershipEffect] = []
        known = self._roster.get(header.from_)
        if known is not None and known.incarnation != header.from_inc:
            effects = self._succeeded(known, now_ns)
            known = None
        if known is None:
            self._roster.make_room(self._dials)
            known = self._roster.enter(header, hello)
        known.hello = hello
        known.raise_epoch(hello.epoch)
        known.heard(now_ns)
        self._roster.let_in(known.name)
        return known, effects

    def _succeeded(self, known: Known, now_ns: int) -> list[ms.MembershipEffect]:
        """A new incarnation of the name has said hello: proof that this one is over."""
        self._roster.retire(known.incarnation, now_ns)
        reason = f"{known.name} was restarted"
        effects: list[ms.MembershipEffect] = []
        dial = self._dials.on(known.out)
        if dial is not None and dial.state is DialState.OPEN:
            effects += ms.closing(known.out)
            self._dials.fail(dial, reason, now_ns)
            self._dials.ask(dial, now_ns)
        if known.state is LEFT:
            return effects  # its goodbye was proof enough
        effects += known.unwatch()
        over = replace(known.record(), state=LEFT, reason=reason)
        return [*effects, ms.PeerDown(peer=over, reason=reason, proven=True)]

    def _present(self, known: Known, link: str) -> list[ms.MembershipEffect]:
        """What follows a welcome."""
        return [known.say(link, message) for message in self._own.after_welcome()]

    def _learn(self, members: Sequence[Member], now_ns: int) -> None:
        """Who joins calls everyone that a welcome names, whatever they do, so that all come to know it, and it them."""
        called = self._dials.names()
        for member in members:
            known = self._roster.get(member.name)
            introduced = known is not None and known.state in USABLE
            if member.name != self._config.name and not introduced and member.name not in called:
                self._call(member.name, member.address, now_ns)
                called[member.name] = None

    def _want(self, known: Known, now_ns: int) -> None:
        """A peer has told its address itself: that counts more than the one we knew."""
        dial = self._dials.named(known.name)
        address = known.hello.address
        if (
            dial is not None
            and dial.state in (DialState.WAITING, DialState.REFUSED)
            and address not in ("", dial.address)
        ):
            self._dials.drop(dial)
        if self._own.hello.role in DECODE_ROLES and known.hello.role in PREFILL_ROLES:
            self._call(known.name, address, now_ns)

    def _call(self, name: str, address: str, now_ns: int) -> None:
        """Call a node that we have heard of, unless it was removed here."""
        if not address:
            return
        known = self._roster.get(name)
        if (known and known.state in (REMOVING, REMOVED)) or address == self._own.hello.address:
            return
        dial = self._dials.at(address)
        if dial is None and not self._dials.full() and self._dials.named(name) is None:
            self._dials.add(address, name, now_ns)
        elif dial is not None and dial.state in (DialState.WAITING, DialState.REFUSED):
            self._dials.ask(dial, now_ns)

    # ------------------------------------------------------------ everything that peers say later

    def _heard(self, event: ms.Heard, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._roster.get(event.header.from_)
        return self._liveness.heard(known, event.link, now_ns) if known else []

    def _refused_as_stale(self, event: ms.MembershipEvent) -> list[ms.MembershipEffect] | None:
        """What another life says, or says to another life, is answered and not acted on. None: it may be."""
        if not isinstance(event, CURRENT_ONLY):
            return None
        kind = event.kind if isinstance(event, ms.Heard) else event.message.KIND
        reason = self._roster.stale(event.header, kind)
        if not reason:
            return None
        rejected = ms.rejected(event, f"{kind}: {reason}", event.link)
        if kind in NEVER_STALE:
            return [rejected]
        return [ms.answer(event.link, event.header, StalePeer(current=self._config.incarnation)), rejected]

    def _agent_received(self, event: ms.AgentReceived, now_ns: int) -> list[ms.MembershipEffect]:
        known, agent = self._roster.get(event.header.from_), event.message
        if known is None or known.state not in USABLE:
            return [ms.rejected(event, "no such peer", event.link)]
        ranks = known.hello.geometry.ranks if known.hello.geometry else 1
        if not 0 <= agent.rank < ranks:
            return [ms.rejected(event, f"an agent of rank {agent.rank}, but it has {ranks}", event.link)]
        effects = self._liveness.heard(known, event.link, now_ns)
        if agent.epoch < known.epoch or known.agents.get(agent.rank) == agent:
            return effects
        known.raise_epoch(agent.epoch)
        known.agents[agent.rank] = agent
        return [*effects, ms.PeerAgent(peer=known.record(), agent=agent)]

    def _heartbeat_received(self, event: ms.HeartbeatReceived, now_ns: int) -> list[ms.MembershipEffect]:
        effects: list[ms.MembershipEffect] = []
        known = self._roster.get(event.header.from_)
        if known is not None:
            known.load, known.load_ns = event.message, now_ns
            effects = self._liveness.heard(known, event.link, now_ns)
            if known.out and event.message.epoch > (known.epoch if known.agents else 0):
                effects.append(known.say(known.out, self._own.hello))  # a cut took its agents; they follow a hello
        if event.message.reply:
            effects.append(ms.answer(event.link, event.header, self._own.heartbeat()))
        return effects

    def _goodbye_received(self, event: ms.GoodbyeReceived, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._roster.get(event.header.from_)
        reason = self._roster.stale(event.header, Goodbye.KIND)
        if known is None or reason:
            return [ms.rejected(event, reason or "no such peer", event.link)]
        if event.link not in (known.out, known.inn):
            return [ms.rejected(event, "it has called anew since", event.link)]
        known.draining = False
        if known.state is REMOVING:
            return self._commands.removed(known)
        why = f"it said goodbye: {event.message.reason}".removesuffix(": ")
        unwatched = known.unwatch()
        known.move("goodbye", why)
        known.inn = ""
        return unwatched + self._liveness.down(known, why, True, now_ns)

    def _drain_received(self, event: ms.DrainReceived, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._roster.get(event.header.from_)
        if known is None:
            return [ms.DrainAsked(link=event.link, cause=event.header.seq)]
        effects = self._liveness.heard(known, event.link, now_ns)
        known.draining = True
        return [*effects, ms.PeerDraining(peer=known.record())]

    def _stale_received(self, event: ms.StaleReceived, now_ns: int) -> list[ms.MembershipEffect]:
        """Someone there does not take us, or itself, for what we think: say hello anew on a new connection."""
        if self._roster.is_retired(event.message.current, now_ns):
            return [ms.rejected(event, "late, from a retired incarnation", event.link)]
        dial = self._dials.on(event.link)
        if dial is not None and dial.state is DialState.GREETING:
            return [*ms.closing(event.link), *self._call_failed(dial, "it answered stale_peer", now_ns)]
        known = self._roster.live_on(event.link)
        if known is None:
            return [ms.rejected(event, "no live peer there", event.link)]
        return self._liveness.lost(known, "it answered stale_peer: one of us was restarted", now_ns)

    # ------------------------------------------------------------ time

    def _tick(self, event: ms.Tick, now_ns: int) -> list[ms.MembershipEffect]:
        due = self.next_deadline()
        if due is not None and now_ns - due > self._config.heartbeat_ns:
            self._liveness.forgive(now_ns)
        effects: list[ms.MembershipEffect] = []
        for dial in self._dials.overdue(now_ns):
            effects += ms.closing(dial.link)
            effects += self._call_failed(dial, f"no answer within {self._config.handshake_ns / 1e9:g} s", now_ns)
        return effects + self._liveness.look(now_ns)
