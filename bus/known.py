"""One peer as it changes: its state, its links, its silence. Only Membership touches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .members import MembershipConfig, MembershipEffect, Peer, PeerAgent, PeerState, PeerUp, PeerWatched, SendOn
from .messages import Agent, Heartbeat, Hello, Message

UP, SUSPECT, DEAD, LEFT = PeerState.UP, PeerState.SUSPECT, PeerState.DEAD, PeerState.LEFT
GREETING, REMOVING, REMOVED = PeerState.GREETING, PeerState.REMOVING, PeerState.REMOVED

# What happens to a peer's state. Anything not listed changes nothing.
PEERS: dict[tuple[PeerState, str], PeerState] = {
    (GREETING, "greeted"): UP,
    (UP, "greeted"): UP,
    (SUSPECT, "greeted"): UP,
    (DEAD, "greeted"): UP,
    (LEFT, "greeted"): UP,
    (UP, "cut"): SUSPECT,
    (UP, "silent"): SUSPECT,
    (SUSPECT, "heard"): UP,
    (DEAD, "heard"): UP,  # only where the peer calls us: we cannot call it anew
    (UP, "lost"): DEAD,  # silent for too long, or it answered stale_peer
    (SUSPECT, "lost"): DEAD,
    (REMOVING, "lost"): REMOVED,
    (UP, "goodbye"): LEFT,
    (SUSPECT, "goodbye"): LEFT,
    (DEAD, "goodbye"): LEFT,
    (REMOVING, "goodbye"): REMOVED,
    (UP, "remove"): REMOVING,
    (SUSPECT, "remove"): REMOVING,
    (DEAD, "remove"): REMOVED,
    (LEFT, "remove"): REMOVED,
    (REMOVING, "idle"): REMOVED,
    (REMOVING, "asked"): UP,  # nothing was said of it to the peer yet
    (REMOVED, "asked"): GREETING,
    (GREETING, "remove"): REMOVED,
}

ALIASES_MAX = 8
USABLE = (UP, SUSPECT)
LIVE = (UP, SUSPECT, REMOVING)  # its silence matters
CURRENT = (UP, SUSPECT, DEAD, REMOVING)  # what this incarnation says is acted on


@dataclass(slots=True)
class Known:
    name: str
    incarnation: bytes
    hello: Hello
    state: PeerState = GREETING
    out: str = ""  # the link that we opened
    inn: str = ""  # the latest one on which it said hello
    reason: str = ""
    epoch: int = 0
    agents: dict[int, Agent] = field(default_factory=dict)  # of that epoch, by rank
    load: Heartbeat | None = None
    load_ns: int = 0
    last_heard_ns: int = 0
    cut_since_ns: int | None = None  # until something is heard again
    draining: bool = False
    busy: bool = False
    use_until_ns: int = 0  # while not busy
    use_since_ns: int = 0  # silence counts from here at the earliest
    ping_ns: int = 0
    remove_ns: int = 0
    watched: bool = False  # by the shell, while up
    removal: int = 0  # which command of the operator's removed it
    aliases: tuple[str, ...] = ()  # addresses that lead here too, beside the one that is called

    @property
    def link(self) -> str:
        return self.out or self.inn

    def move(self, verb: str, reason: str = "") -> bool:
        """False, and nothing changes, when the table has no such transition."""
        after = PEERS.get((self.state, verb))
        if after is None:
            return False
        self.state, self.reason = after, reason
        return True

    def raise_epoch(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self.agents.clear()

    def also_at(self, address: str) -> None:
        """The newest few: who adds ever more names of one node has a script that errs."""
        if address not in (self.hello.address, *self.aliases):
            self.aliases = (*self.aliases, address)[-ALIASES_MAX:]

    def say(self, link: str, message: Message) -> SendOn:
        return SendOn(link=link, kind=message.KIND, message=message, to=self.name, to_inc=self.incarnation)

    def announce(self, verb: str = "greeted") -> list[MembershipEffect]:
        """Tell the node that the peer is up, unless it was."""
        was_usable = self.state in USABLE
        if not self.move(verb) or was_usable:
            return []
        peer = self.record()
        return [PeerUp(peer=peer), *(PeerAgent(peer=peer, agent=agent) for agent in peer.agents)]

    def unwatch(self) -> list[MembershipEffect]:
        """Comes before whatever makes a watched peer less than up."""
        if not self.watched:
            return []
        self.watched = False
        return [PeerWatched(peer=self.record(), watched=False)]

    # ------------------------------------------------------------ silence

    def in_use(self, now_ns: int) -> bool:
        return self.busy or now_ns < self.use_until_ns

    def use(self, now_ns: int) -> None:
        """The link comes into use: silence before that was nobody's fault. Pings at once."""
        if not self.in_use(now_ns):
            self.use_since_ns = self.ping_ns = now_ns

    def use_for(self, now_ns: int, period_ns: int) -> None:
        """In use for so long at least, without an attempt."""
        self.use(now_ns)
        self.use_until_ns = max(self.use_until_ns, now_ns + period_ns)

    def forgive(self, now_ns: int) -> None:
        self.use_since_ns = now_ns
        if self.cut_since_ns is not None:
            self.cut_since_ns = now_ns

    def cut(self, now_ns: int) -> None:
        """Asks at once whether it is still there: the answer comes by a new connection or not at all."""
        self.cut_since_ns = self.ping_ns = now_ns

    def heard(self, now_ns: int) -> None:
        self.last_heard_ns = max(self.last_heard_ns, now_ns)
        self.cut_since_ns = None

    @property
    def silent_since_ns(self) -> int:
        return max(self.last_heard_ns, self.use_since_ns)

    def deadline_ns(self, config: MembershipConfig) -> int | None:
        """When a Tick has something to do here."""
        if self.watched or self.state not in LIVE:
            return None
        if self.busy or self.ping_ns < self.use_until_ns:
            limit = config.suspect_ns if self.state is UP else config.dead_ns
            due = min(self.ping_ns, self.silent_since_ns + limit)
            if self.cut_since_ns is not None:
                due = min(due, self.cut_since_ns + config.cut_ns)
        else:
            due = max(self.use_until_ns, self.last_heard_ns + config.idle_ns)
        return min(due, self.remove_ns) if self.state is REMOVING else due

    # ------------------------------------------------------------ for others to see

    def record(self) -> Peer:
        return Peer(
            name=self.name,
            incarnation=self.incarnation,
            role=self.hello.role,
            address=self.hello.address,
            http=self.hello.http,
            link=self.link,
            state=self.state,
            reason=self.reason,
            epoch=self.epoch,
            agents=tuple(self.agents[rank] for rank in sorted(self.agents)),
            hello=self.hello,
            load=self.load,
            load_ns=self.load_ns,
            last_heard_ns=self.last_heard_ns,
            draining=self.draining,
            busy=self.busy,
            aliases=self.aliases,
        )
