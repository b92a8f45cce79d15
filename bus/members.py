"""What Membership hears and decides, its numbers, and the record of a peer that the rest of the node sees."""

from __future__ import annotations

from enum import StrEnum

from .messages import (
    Agent,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    StalePeer,
    Welcome,
)
from .wire import Declared, Header

S = 1_000_000_000


class MembershipConfig(Declared):
    """Who we are, and our timers (docs/protocol.md) and limits. `hello.epoch` is only where the epoch starts."""

    name: str
    incarnation: bytes
    hello: Hello
    heartbeat_ns: int = 1 * S
    suspect_ns: int = 3 * S
    dead_ns: int = 5 * S
    cut_ns: int = 1 * S  # from a cut connection, too, if nothing is heard: the process has gone; a blip mends sooner
    in_use_ns: int = 60 * S  # a link counts as in use for so long after its last live attempt
    idle_ns: int = 60 * S  # a link so long without traffic is looked at for a moment, so that status tells the truth
    handshake_ns: int = 5 * S
    handshakes_max: int = 16
    backoff_ns: int = S // 20
    backoff_max_ns: int = 2 * S  # so long at most does one that is back wait for our call
    refused_retry_ns: int = 30 * S  # it may be restarted with other settings, but not soon
    removal_ns: int = 120 * S  # how long a removed peer's last leases are waited for, as in a drain
    retired_ns: int = 3600 * S
    retired_max: int = 1024
    peers_max: int = 1024
    addresses_max: int = 1024
    turned_away_max: int = 256  # refused callers that are remembered for `members()`


class PeerState(StrEnum):
    """As `members()` shows it. The first two also stand for addresses that no one has answered at yet."""

    WAITING = "waiting"
    GREETING = "greeting"
    UP = "up"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    REFUSED = "refused"
    REMOVING = "removing"
    REMOVED = "removed"


class Peer(Declared):
    """A member as we know it now. A snapshot: ask again for the present state."""

    name: str  # '' while no one has answered at `address`
    incarnation: bytes = b""
    role: str = ""
    address: str = ""  # as it says itself
    called_at: str = ""  # the address at which we call it, if we do
    calling: bool = False  # such a call is under way
    aliases: tuple[str, ...] = ()  # other addresses at which we found it
    http: str = ""
    link: str = ""  # where we ask it something; '' when there is none
    state: PeerState = PeerState.WAITING
    reason: str = ""  # why it is not up
    epoch: int = 0
    agents: tuple[Agent, ...] = ()  # of that epoch, by rank
    hello: Hello | None = None
    load: Heartbeat | None = None
    load_ns: int = 0  # when it came
    last_heard_ns: int = 0
    draining: bool = False
    busy: bool = False


# ---------------------------------------------------------------- events


class MembershipEvent(Declared, tag_field="t", tag=True):
    pass


class JoinAsked(MembershipEvent):
    """An operator or `--join` names a member's address. Un-removes it."""

    address: str


class RemoveAsked(MembershipEvent):
    """End the link to this member (name or address) after its last lease, and keep it removed."""

    target: str


class LinkOpened(MembershipEvent):
    """Answers OpenLink."""

    link: str
    address: str


class LinkFailed(MembershipEvent):
    """Answers OpenLink: the address cannot even be tried."""

    address: str
    problem: str


class LinkLost(MembershipEvent):
    """The connection under a link that we opened was cut. It may come back to the same life, or to another."""

    link: str
    reason: str = ""  # where it is known


class Heard(MembershipEvent):
    """Any message that has no event of its own here. `kind` tells whether it needs a hello before it."""

    link: str
    header: Header
    kind: str


class HelloReceived(MembershipEvent):
    link: str
    header: Header
    message: Hello


class WelcomeReceived(MembershipEvent):
    link: str
    header: Header
    message: Welcome


class RefusedReceived(MembershipEvent):
    link: str
    header: Header
    message: Refused


class AgentReceived(MembershipEvent):
    link: str
    header: Header
    message: Agent


class HeartbeatReceived(MembershipEvent):
    link: str
    header: Header
    message: Heartbeat


class GoodbyeReceived(MembershipEvent):
    link: str
    header: Header
    message: Goodbye


class DrainReceived(MembershipEvent):
    link: str
    header: Header
    message: Drain


class StaleReceived(MembershipEvent):
    link: str
    header: Header
    message: StalePeer


class Tick(MembershipEvent):
    pass


class BusyChanged(MembershipEvent):
    """Whether any attempt (on D) or lease (on P) with this peer is live."""

    peer: str
    busy: bool


class WatchChanged(MembershipEvent):
    """Whether the shell itself watches this peer: then no pings go there, nobody judges its silence, and nothing that
    it holds for us needs renewing. It ends by itself when the peer is not up any more. A simulation watches what no
    fault will touch."""

    peer: str
    watched: bool


class OwnAgentChanged(MembershipEvent):
    """A rank of ours has an agent. A higher epoch than before voids the other ranks' agents."""

    agent: Agent


class OwnLoadChanged(MembershipEvent):
    """What our heartbeats say from now on."""

    waiting_prefill_tokens: int
    running: int
    free_blocks: int
    prefill_tokens_per_s: int = 0
    prefill_step_us: int = 0


class DrainStarted(MembershipEvent):
    """We drain: peers are told, and so is whoever says hello later."""


class Leaving(MembershipEvent):
    """We are about to end: say goodbye, greet no one any more."""

    reason: str = ""


def event_of(link: str, header: Header, message: Message) -> MembershipEvent:
    """The event that a received message is for Membership."""
    received = _RECEIVED.get(type(message))
    if received is None:
        return Heard(link=link, header=header, kind=message.KIND)
    return received(link=link, header=header, message=message)


_RECEIVED: dict[type[Message], type[MembershipEvent]] = {
    Hello: HelloReceived,
    Welcome: WelcomeReceived,
    Refused: RefusedReceived,
    Agent: AgentReceived,
    Heartbeat: HeartbeatReceived,
    Goodbye: GoodbyeReceived,
    Drain: DrainReceived,
    StalePeer: StaleReceived,
}


# ---------------------------------------------------------------- effects


class MembershipEffect(Declared, tag_field="t", tag=True):
    pass


class OpenLink(MembershipEffect):
    """Open a link and answer with LinkOpened or LinkFailed."""

    address: str


class CloseLink(MembershipEffect):
    """`flush`: let what is queued leave (a goodbye). Otherwise nothing queued may reach a later life (R12)."""

    link: str
    flush: bool = False


class SendOn(MembershipEffect):
    link: str
    kind: str
    message: Message
    to: str = ""
    to_inc: bytes = b""
    cause: int = 0


class PeerUp(MembershipEffect):
    """Usable from now on; its PeerAgents follow."""

    peer: Peer


class PeerAgent(MembershipEffect):
    """An agent of the peer under `agent.epoch`; agents of older epochs are void."""

    peer: Peer
    agent: Agent


class PeerDown(MembershipEffect):
    """No longer usable. `proven`: this incarnation is over (goodbye, or hello of its successor), so leases of it
    may end; otherwise it is only our judgement, and ends no lease. A proof may follow a judgement."""

    peer: Peer
    reason: str
    proven: bool


class CallFailed(MembershipEffect):
    """No one at an address became a peer. Told once for each reason: it is called on by itself."""

    address: str
    name: str  # '' when no one has answered there
    reason: str


class TurnedAway(MembershipEffect):
    """A node called and was refused. Told once for each reason."""

    name: str
    address: str
    reason: str


class PeerWatched(MembershipEffect):
    """The shell watches this peer, or does so no longer."""

    peer: Peer
    watched: bool


class PeerDraining(MembershipEffect):
    """Nothing new is to be sent to it."""

    peer: Peer


class PeerRemoved(MembershipEffect):
    """What RemoveAsked asked for is done. `name` is '' for an address where no one had answered."""

    name: str
    address: str


class DrainAsked(MembershipEffect):
    """A tool asks this node to drain."""

    link: str
    cause: int


class Rejected(MembershipEffect):
    """The event changed nothing (beyond an answer); why, for counters and logs."""

    event: str
    reason: str
    link: str = ""


def closing(link: str, *, flush: bool = False) -> list[MembershipEffect]:
    return [CloseLink(link=link, flush=flush)] if link else []


def rejected(event: MembershipEvent, reason: str, link: str = "") -> Rejected:
    return Rejected(event=type(event).__name__, reason=reason, link=link)


def answer(link: str, header: Header, message: Message) -> SendOn:
    """To the sender of what came with this header."""
    return SendOn(
        link=link, kind=message.KIND, message=message, to=header.from_, to_inc=header.from_inc, cause=header.seq
    )
