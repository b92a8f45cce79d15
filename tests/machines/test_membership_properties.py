"""Membership under anything: random events of a small world, and random faults that then stop."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus import members as ms
from pdbus.bus.known import USABLE
from pdbus.bus.membership import Membership
from pdbus.bus.messages import (
    Agent,
    Cancel,
    Drain,
    Geometry,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
    Refused,
    StalePeer,
    Welcome,
)
from pdbus.bus.wire import Header, replace
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable

from tests.fake_net import Net, Node, S

GEOMETRY = geometry_for(1, 1, 4, 16, "float32")
OWN = b"own"
NAMES = ("p", "q", "me", "")
INCARNATIONS = (b"1", b"2", OWN, b"")
ADDRESSES = ("tcp://p:1", "tcp://q:1", "tcp://me:1", "")
LINKS = ("out:1", "out:2", "out:3", "in:1", "in:2")

hellos = st.builds(
    Hello,
    role=st.sampled_from(["prefill", "decode", "both", "tool"]),
    address=st.sampled_from(ADDRESSES),
    geometry=st.sampled_from([None, GEOMETRY, replace(GEOMETRY, layers=2), Geometry()]),
    epoch=st.integers(0, 3),
)
messages: st.SearchStrategy[Message] = st.one_of(
    hellos,
    st.builds(
        Welcome,
        hello=hellos,
        members=st.lists(
            st.builds(Member, name=st.sampled_from(NAMES), address=st.sampled_from(ADDRESSES), role=st.just("prefill")),
            max_size=2,
        ).map(tuple),
    ),
    st.just(Refused(reason="no")),
    st.builds(Agent, epoch=st.integers(0, 3), rank=st.integers(0, 1)),
    st.builds(Heartbeat, reply=st.booleans()),
    st.just(Goodbye()),
    st.just(Drain()),
    st.builds(StalePeer, current=st.sampled_from(INCARNATIONS)),
    st.just(Cancel(client_id="c")),
)
headers = st.builds(
    Header,
    from_=st.sampled_from(NAMES),
    from_inc=st.sampled_from(INCARNATIONS),
    to_inc=st.sampled_from([b"", OWN, b"other"]),
    seq=st.integers(1, 9),
)
events: st.SearchStrategy[ms.MembershipEvent] = st.one_of(
    st.builds(ms.event_of, st.sampled_from(LINKS), headers, messages),
    st.builds(ms.event_of, st.sampled_from(LINKS), headers, messages),
    st.builds(ms.Heard, link=st.sampled_from(LINKS), header=headers, kind=st.sampled_from(["lease.renew", "status"])),
    st.builds(ms.JoinAsked, address=st.sampled_from(ADDRESSES[:3])),
    st.builds(ms.RemoveAsked, target=st.sampled_from([*NAMES, *ADDRESSES])),
    st.builds(ms.LinkOpened, link=st.sampled_from(LINKS[:3]), address=st.sampled_from(ADDRESSES)),
    st.builds(ms.LinkLost, link=st.sampled_from(LINKS[:3])),
    st.builds(ms.BusyChanged, peer=st.sampled_from(NAMES), busy=st.booleans()),
    st.builds(ms.WatchChanged, peer=st.sampled_from(NAMES), watched=st.booleans()),
    st.builds(ms.OwnAgentChanged, agent=st.builds(Agent, epoch=st.integers(0, 3))),
    st.just(ms.DrainStarted()),
    st.just(ms.Tick()),
)


def machine() -> Membership:
    hello = Hello(role="both", address="tcp://me:1", geometry=GEOMETRY)
    return Membership(
        ms.MembershipConfig(name="me", incarnation=OWN, hello=hello, peers_max=2, retired_max=2), unreadable
    )


def seen(m: Membership) -> Any:
    return (m.members(), m.hello, m.next_deadline())


class Watch:
    """What must hold of the effects, whatever the events were."""

    def __init__(self) -> None:
        self.up: dict[str, bytes] = {}
        self.watched: dict[str, bytes] = {}

    def check(self, event: ms.MembershipEvent, effects: list[ms.MembershipEffect]) -> None:
        for effect in effects:
            match effect:
                case ms.PeerUp(peer=peer):
                    assert peer.name not in self.up, "up twice without a down between"
                    self.up[peer.name] = peer.incarnation
                    assert isinstance(event, ms.HelloReceived | ms.WelcomeReceived) or peer.hello is not None
                case ms.PeerWatched(peer=peer, watched=watched):
                    assert peer.state == "up" and (self.watched.get(peer.name) == peer.incarnation) is not watched
                    self.watched[peer.name] = peer.incarnation if watched else b""
                case ms.PeerDown(peer=peer, proven=proven):
                    assert not self.watched.get(peer.name), "down while watched"
                    assert self.up.pop(peer.name, None) in (None, peer.incarnation)
                    proof = (ms.HelloReceived, ms.WelcomeReceived, ms.GoodbyeReceived)
                    assert not proven or isinstance(event, proof)
                case ms.PeerAgent(peer=peer, agent=agent):
                    assert self.up.get(peer.name) == peer.incarnation
                    assert agent.epoch == peer.epoch
                case ms.SendOn(kind="stale_peer"):
                    assert not isinstance(event, ms.StaleReceived)


@settings(max_examples=300)
@given(st.lists(st.tuples(events, st.integers(0, 4)), max_size=40))
def test_the_kept_deadline_is_the_one_that_a_search_finds(steps: list[tuple[ms.MembershipEvent, int]]) -> None:
    m, now = machine(), 0
    for event, seconds in steps:
        now += seconds * S
        m.handle(event, now)
        kept = m.next_deadline()
        m._deadline_known = False
        assert kept == m.next_deadline()


@settings(max_examples=300)
@given(st.lists(st.tuples(events, st.integers(0, 4)), max_size=40))
def test_whatever_comes_the_rules_hold(steps: list[tuple[ms.MembershipEvent, int]]) -> None:
    m, watch, now = machine(), Watch(), 0
    for event, seconds in steps:
        now += seconds * S
        before = {p.name: p.incarnation for p in m.members() if p.name}
        effects = m.handle(event, now)
        watch.check(event, effects)
        after = {p.name: p.incarnation for p in m.members() if p.state in USABLE}
        for name, incarnation in after.items():
            changed = before.get(name) not in (None, incarnation)
            assert not changed or isinstance(event, ms.HelloReceived | ms.WelcomeReceived)
            assert incarnation not in (OWN, b"")
        assert set(after) <= set(watch.up)


@settings(max_examples=300)
@given(st.lists(st.tuples(events, st.sampled_from((0, 1, 4, 61, 130))), max_size=25))
def test_no_tick_leaves_a_deadline_in_the_past(steps: list[tuple[ms.MembershipEvent, int]]) -> None:
    """It would spin, at a full core: after a long pause of ours, say, or when a peer is back after a minute."""
    m, now = machine(), 0
    for event, seconds in steps:
        now += seconds * S
        m.handle(event, now)
        m.handle(ms.Tick(), now)
        due = m.next_deadline()
        assert due is None or due > now


@settings(max_examples=200)
@given(st.lists(events, max_size=25), events)
def test_a_rejected_event_changes_nothing(before: list[ms.MembershipEvent], event: ms.MembershipEvent) -> None:
    m = machine()
    for earlier in before:
        m.handle(earlier, S)
    m.handle(ms.Tick(), S)
    state = seen(m)
    effects = m.handle(event, S)
    only_refused = all(isinstance(e, ms.Rejected) for e in effects) and effects
    if only_refused and not isinstance(event, ms.HelloReceived):  # who was turned away is remembered for status
        assert seen(m) == state


@settings(max_examples=100)
@given(st.lists(st.tuples(events, st.integers(0, 4)), max_size=40))
def test_the_same_events_give_the_same_effects(steps: list[tuple[ms.MembershipEvent, int]]) -> None:
    """Replay depends on it."""
    one, two, now = machine(), machine(), 0
    for event, seconds in steps:
        now += seconds * S
        assert one.handle(event, now) == two.handle(event, now)


faults = st.one_of(
    st.tuples(st.just("kill"), st.sampled_from(["p1", "p2", "d1", "d2"])),
    st.tuples(st.just("restart"), st.sampled_from(["p1", "p2", "d1", "d2"])),
    st.tuples(st.just("busy"), st.sampled_from(["p1", "p2"])),
    st.tuples(st.just("loss"), st.sampled_from(["p1", "p2", "d1", "d2"])),
    st.tuples(st.just("cut"), st.sampled_from(["d1", "d2"])),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(faults, st.integers(0, 7)), max_size=12))
def test_once_faults_stop_every_decode_node_finds_every_prefill_node_again(
    steps: list[tuple[tuple[str, str], int]],
) -> None:
    net = Net()
    lives = dict.fromkeys(("p1", "p2", "d1", "d2"), 1)
    nodes = {name: Node(net, name, "prefill" if name[0] == "p" else "decode") for name in lives}

    def join(name: str) -> None:
        if name[0] == "d":
            nodes[name].join(nodes["p1"])
            nodes[name].join(nodes["p2"])

    def restart(name: str) -> None:
        lives[name] += 1
        nodes[name] = Node(net, name, "prefill" if name[0] == "p" else "decode", life=lives[name])
        join(name)

    for name in lives:
        join(name)
    for (what, name), seconds in steps:
        alive = net.at.get(nodes[name].address) is nodes[name]
        if what == "kill" and alive:
            nodes[name].die()
        elif what == "restart":
            restart(name)
        elif what == "busy":
            nodes["d1"].handle(ms.BusyChanged(peer=name, busy=True))
        elif what == "loss":
            net.drop = lambda node, message, name=name: node.name == name  # type: ignore[misc]
        elif what == "cut":
            for peer in nodes[name].machine.prefill_peers():
                nodes[name].handle(ms.LinkLost(link=peer.link))
        net.run(seconds)
    net.drop = lambda node, message: False
    for name in lives:
        if net.at.get(nodes[name].address) is not nodes[name]:
            restart(name)
    net.run(140)  # the longest: a minute until an idle link is looked at, death, and two failed handshakes
    for name in ("d1", "d2"):
        found = {p.name: p.incarnation for p in nodes[name].machine.prefill_peers()}
        assert found == {p: nodes[p].incarnation for p in ("p1", "p2")}
