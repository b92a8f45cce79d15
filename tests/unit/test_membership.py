"""Who is a member, in which life, and for how long: one behaviour each, on machines joined by a fake net."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus import members as ms
from pdbus.bus.known import PEERS
from pdbus.bus.messages import (
    Agent,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    PrefillCancel,
    Refused,
    StalePeer,
    Status,
    TryId,
    Welcome,
)
from pdbus.bus.wire import Header, replace

from tests.fake_net import GEOMETRY, Net, Node, S


def pair() -> tuple[Net, Node, Node]:
    """A prefill node and a decode node that has joined it."""
    net = Net()
    p, d = Node(net, "p", "prefill"), Node(net, "d", "decode")
    d.join(p)
    return net, p, d


def asks(p: Node) -> PrefillCancel:
    return PrefillCancel(try_=TryId(node="d", incarnation=p.incarnation, request=bytes(16), attempt=1))


# ---------------------------------------------------------------- hello


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak", "x" * 65, "-option", "ü"])
def test_a_node_s_name_is_one_that_can_stand_in_logs_and_file_names(name: str) -> None:
    net = Net()
    p = Node(net, "p", "prefill")
    header, hello = Header(from_=name, from_inc=b"i" * 16, seq=1), Node(net, "d", "decode").machine.hello
    p.handle(ms.HelloReceived(link="in:1", header=header, message=hello))
    assert p.machine.members() == [] and p.got(ms.TurnedAway) == []
    [answer] = [e.message for e in p.got(ms.SendOn)]
    assert isinstance(answer, Refused) and "a name of up to 64 letters" in answer.reason


def test_joining_makes_both_sides_know_each_other() -> None:
    _, p, d = pair()
    assert [peer.name for peer in d.machine.prefill_peers()] == ["p"]
    assert p.usable() == ["d"]
    assert len(d.got(ms.PeerUp)) == len(p.got(ms.PeerUp)) == 1


def test_a_decode_node_calls_the_prefill_node_that_calls_it() -> None:
    """Decode nodes ask and prefill nodes answer: it needs a connection of its own making."""
    net = Net()
    p, d = Node(net, "p", "prefill"), Node(net, "d", "decode")
    p.join(d)
    assert d.machine.prefill_peers()[0].link.startswith("out:")


def test_a_prefill_node_calls_nobody_it_was_not_told_to() -> None:
    _, p, _ = pair()
    assert p.got(ms.OpenLink) == []


def test_a_new_decode_node_learns_of_all_prefill_nodes_from_any_member() -> None:
    net, _, d = pair()
    p2, d2 = Node(net, "p2", "prefill"), Node(net, "d2", "decode")
    d.join(p2)
    d2.join(d)
    assert sorted(peer.name for peer in d2.machine.prefill_peers()) == ["p", "p2"]


@pytest.mark.parametrize("seed", ["p", "d", "p2", "d2"])
def test_whoever_joins_any_member_is_known_to_all_and_knows_all(seed: str) -> None:
    """A prefill node that joins another one is of use only to the decode nodes that hear of it."""
    net = Net()
    nodes = [Node(net, "p", "prefill")]
    for name, role, joins in (("d", "decode", 0), ("p2", "prefill", 0), ("d2", "decode", 2)):
        nodes.append(Node(net, name, role))
        nodes[-1].join(nodes[joins])
    late = [Node(net, "p3", "prefill"), Node(net, "d3", "decode")]
    for node in late:
        node.join(next(n for n in nodes if n.name == seed))
    everyone = sorted(node.name for node in (*nodes, *late))
    for node in (*nodes, *late):
        assert sorted([node.name, *node.usable()]) == everyone
    for node in (nodes[1], nodes[3], late[1]):
        assert sorted(peer.name for peer in node.machine.prefill_peers()) == ["p", "p2", "p3"]


def test_nodes_that_do_both_call_each_other() -> None:
    net = Net()
    a, b = Node(net, "a", "both"), Node(net, "b", "both")
    a.join(b)
    assert a.machine.prefill_peers()[0].link.startswith("out:")
    assert b.machine.prefill_peers()[0].link.startswith("out:")


def test_agents_follow_a_welcome_and_every_new_epoch() -> None:
    net = Net()
    p, d = Node(net, "p", "prefill"), Node(net, "d", "decode")
    p.handle(ms.OwnAgentChanged(agent=Agent(epoch=1, name="one")))
    d.join(p)
    p.handle(ms.OwnAgentChanged(agent=Agent(epoch=2, name="two")))
    net.deliver()
    assert [(e.agent.name, e.peer.epoch) for e in d.got(ms.PeerAgent)] == [("one", 1), ("two", 2)]
    peer = d.machine.peer("p")
    assert peer is not None
    assert [a.name for a in peer.agents] == ["two"]


def test_a_new_epoch_voids_the_agents_of_all_ranks() -> None:
    """A read from a rank's old agent would reach memory that is gone."""
    net, p, d = pair()
    for agent in (Agent(epoch=1, rank=0), Agent(epoch=1, rank=1), Agent(epoch=2, rank=0)):
        p.handle(ms.OwnAgentChanged(agent=agent))
    net.deliver()
    d2 = Node(net, "d2", "decode")
    d2.join(p)
    for node in (d, d2):
        peer = node.machine.peer("p")
        assert peer is not None
        assert [(a.epoch, a.rank) for a in peer.agents] == [(2, 0)]


def test_an_agent_of_an_epoch_that_is_over_is_ignored() -> None:
    _, p, d = pair()
    link = d.machine.prefill_peers()[0].link
    header = Header(from_="p", from_inc=p.incarnation, to_inc=d.incarnation)
    d.hear(link, header, Agent(epoch=5))
    d.forget()
    d.hear(link, header, Agent(epoch=4))
    assert d.got(ms.PeerAgent) == []


def test_an_agent_of_a_rank_that_the_peer_has_not_is_rejected() -> None:
    """Nothing is kept for whatever numbers a peer makes up."""
    _, p, d = pair()
    link = d.machine.prefill_peers()[0].link
    header = Header(from_="p", from_inc=p.incarnation, to_inc=d.incarnation)
    for rank in (-1, 1, 1 << 40):
        d.forget()
        d.hear(link, header, Agent(epoch=1, rank=rank))
        assert d.got(ms.PeerAgent) == [] and len(d.got(ms.Rejected)) == 1


def test_a_node_cannot_change_its_geometry_within_an_incarnation() -> None:
    """Plans for its memory would be of another one."""
    _, p, d = pair()
    header = Header(from_="p", from_inc=p.incarnation)
    d.forget()
    changed = replace(p.machine.hello, geometry=replace(GEOMETRY, block_size=32))
    d.hear("in:again", header, changed)
    (refused,) = d.sent(Refused)
    assert isinstance(refused, Refused) and refused.reason.startswith("its KV geometry is another than it said before")
    d.forget()
    d.hear("in:again", header, p.machine.hello)
    assert d.sent(Refused) == []


def test_tools_are_welcomed_and_forgotten() -> None:
    _, p, d = pair()
    header = Header(from_="tool", from_inc=b"t")
    effects = d.hear("in:tool", header, Hello(role="tool"))
    welcome = next(e.message for e in effects if isinstance(e, ms.SendOn))
    assert isinstance(welcome, Welcome)
    assert [m.name for m in welcome.members] == ["p"]
    assert [peer.name for peer in d.machine.members()] == [p.name]


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("layers", {"geometry": replace(GEOMETRY, layers=1)}),
        ("block_size", {"geometry": replace(GEOMETRY, block_size=1031)}),
        ("dtype", {"geometry": replace(GEOMETRY, dtype="bfloat16")}),
        ("layout", {"geometry": replace(GEOMETRY, layout="sideways")}),
        ("kv_heads", {"geometry": replace(GEOMETRY, kv_heads=2)}),
        ("head_dim", {"geometry": replace(GEOMETRY, head_dim=1)}),
        ("parts", {"geometry": replace(GEOMETRY, kv_parts=1)}),
        ("tp", {"geometry": replace(GEOMETRY, tp=1000)}),
        ("fingerprint", {"fingerprint": "other"}),
        ("version", {"version": "0.3.0"}),
        ("version", {"version": "1.1.0"}),
        ("version", {"version": "mine"}),
        ("deterministic", {"deterministic": True}),
    ],
)
def test_a_pair_that_cannot_share_kv_is_refused_by_field_with_both_values(field: str, theirs: dict[str, Any]) -> None:
    net = Net()
    p, d = Node(net, "p", "prefill", **theirs), Node(net, "d", "decode")
    d.join(p)
    refused = p.sent(Refused)[0]
    assert isinstance(refused, Refused)
    assert [name for name, _, _ in refused.fields] == [field]
    assert refused.fields[0][1] != refused.fields[0][2]
    assert d.machine.prefill_peers() == []
    assert d.state_of("p") == "refused"
    assert p.state_of("d") == "refused"
    assert field in d.machine.members()[0].reason


@pytest.mark.parametrize("version", ["0.1.9", "0.2.3", "0.0.4", "0.2.0rc1"])
def test_max_model_len_and_versions_next_to_each_other_may_differ(version: str) -> None:
    net = Net()
    p, d = Node(net, "p", "prefill", max_model_len=5, version=version), Node(net, "d", "decode", max_model_len=9)
    d.join(p)
    assert d.state_of("p") == "up"


def test_two_that_never_share_kv_are_not_compared() -> None:
    net = Net()
    a, b = Node(net, "a", "decode", fingerprint="x"), Node(net, "b", "decode", fingerprint="y")
    a.join(b)
    assert a.state_of("b") == "up"


def test_a_refused_peer_disturbs_no_other_and_is_tried_again_slowly() -> None:
    net, _, d = pair()
    odd = Node(net, "odd", "prefill", fingerprint="x")
    d.join(odd)
    assert [peer.name for peer in d.machine.prefill_peers()] == ["p"]
    Node(net, "odd", "prefill", life=2)
    net.run(29)
    assert d.state_of("odd") == "refused"
    net.run(2)
    assert d.state_of("odd") == "up"


def test_a_node_refuses_itself_and_its_own_name() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    rival = Node(net, "d", "prefill", life=2, address="tcp://rival:1")
    d.handle(ms.JoinAsked(address=d.address))
    assert d.got(ms.Rejected)[-1].reason == "this is the node itself"
    rival.join(d)
    assert "taken" in rival.machine.members()[0].reason


# ---------------------------------------------------------------- incarnations


def test_a_restarted_peer_is_proof_that_its_old_life_is_over() -> None:
    net, _, d = pair()
    p2 = Node(net, "p", "prefill", life=2)
    p2.join(d)
    net.run(1)
    down = d.got(ms.PeerDown)
    assert [(e.proven, e.peer.incarnation[:3]) for e in down] == [(True, b"p#1")]
    assert d.machine.prefill_peers()[0].incarnation == p2.incarnation


def test_a_retired_life_cannot_come_back() -> None:
    """Two nodes with one name would otherwise take it from each other for ever."""
    net, p, d = pair()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))  # it seems to be gone
    p2 = Node(net, "p", "prefill", life=2, address="tcp://elsewhere:1")
    p2.join(d)
    p.join(d)
    assert p.state_of("d") == "refused"
    assert "retired" in p.machine.members()[0].reason
    peer = d.machine.peer("p")
    assert peer is not None
    assert peer.incarnation == p2.incarnation


def test_a_retired_life_that_has_outlived_the_one_after_it_is_taken_again() -> None:
    """Whoever started a second node under a name, and stopped it, gets the first one back by joining it."""
    net, p, d = pair()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))  # it seems to be gone
    p2 = Node(net, "p", "prefill", life=2, address="tcp://elsewhere:1")
    p2.join(d)
    d.join(p)
    assert d.machine.peer("p").incarnation == p2.incarnation  # type: ignore[union-attr]
    p2.handle(ms.Leaving())
    p2.die()
    net.deliver()
    d.join(p)
    assert [peer.incarnation for peer in d.machine.prefill_peers()] == [p.incarnation]


def test_retired_lives_are_forgotten_after_an_hour() -> None:
    net, _, d = pair()
    p2 = Node(net, "p", "prefill", life=2)
    p2.join(d)
    hello = Hello(role="prefill", geometry=GEOMETRY, fingerprint="f", version="0.1.0")
    header = Header(from_="p", from_inc=b"p#1".ljust(16, b"."))
    net.now += 3_599 * S
    d.hear("in:late", header, hello)
    assert d.state_of("p") == "up"
    peer = d.machine.peer("p")
    assert peer is not None
    assert peer.incarnation == p2.incarnation
    net.now += 2 * S
    d.hear("in:later", header, hello)
    peer = d.machine.peer("p")
    assert peer is not None
    assert peer.incarnation == header.from_inc


def test_another_incarnation_on_an_old_connection_is_refused() -> None:
    _, _, d = pair()
    link = d.machine.prefill_peers()[0].link
    hello = Hello(role="prefill", geometry=GEOMETRY, fingerprint="f", version="0.1.0")
    d.hear(link, Header(from_="p", from_inc=b"new"), hello)
    assert isinstance(d.sent(Refused)[0], Refused)
    assert d.got(ms.PeerDown) == []


def test_what_is_meant_for_an_old_life_is_answered_stale_and_leads_to_a_new_hello() -> None:
    """A connection is re-made by itself to whoever listens on the port now: only incarnations tell."""
    net, p, d = pair()
    p2 = Node(net, "p", "prefill", life=2)
    link = d.machine.prefill_peers()[0].link
    d.send(link, asks(d), to="p", to_inc=p.incarnation)
    net.run(1)
    assert len(p2.sent(StalePeer)) == 1
    assert d.machine.prefill_peers()[0].incarnation == p2.incarnation
    assert [e.proven for e in d.got(ms.PeerDown)] == [False, True]


def test_what_comes_from_an_old_life_is_answered_stale_and_not_acted_on() -> None:
    net, p, d = pair()
    p2 = Node(net, "p", "prefill", life=2)
    p2.join(d)
    d.forget()
    old = Header(from_="p", from_inc=p.incarnation, to_inc=d.incarnation, seq=9)
    d.hear("in:old", old, Heartbeat(waiting_prefill_tokens=99))
    assert [(e.kind, e.cause) for e in d.got(ms.SendOn)] == [("stale_peer", 9)]
    peer = d.machine.peer("p")
    assert peer is not None
    assert peer.load is None
    d.handle(ms.Heard(link="in:old", header=old, kind="prefill.done"))
    assert len(d.sent(StalePeer)) == 2


def test_stale_peer_is_never_answered() -> None:
    _, _, d = pair()
    for to_inc in (b"wrong", d.incarnation):
        d.forget()
        d.hear("in:x", Header(from_="p", from_inc=b"wrong", to_inc=to_inc), StalePeer(current=b"whatever"))
        assert d.got(ms.SendOn) == []


def test_a_stale_peer_of_a_retired_life_is_ignored() -> None:
    net, p, d = pair()
    p2 = Node(net, "p", "prefill", life=2)
    p2.join(d)
    net.run(1)
    link = d.machine.prefill_peers()[0].link
    d.hear(link, Header(from_="p", from_inc=p.incarnation), StalePeer(current=p.incarnation))
    assert d.state_of("p") == "up"


@pytest.mark.parametrize("kind", ["prefill.request", "transfer.done", "lease.renew"])
def test_nothing_of_a_hand_off_is_taken_before_a_hello(kind: str) -> None:
    net = Net()
    p = Node(net, "p", "prefill")
    stranger = Header(from_="x", from_inc=b"x", to_inc=p.incarnation)
    assert p.handle(ms.Heard(link="in:x", header=stranger, kind="generate")) == []
    p.handle(ms.Heard(link="in:x", header=stranger, kind=kind))
    assert len(p.sent(StalePeer)) == 1


def test_goodbye_is_proof_and_the_same_life_may_come_back() -> None:
    net, p, d = pair()
    d.handle(ms.Leaving(reason="shutdown"))
    net.deliver()
    assert [(e.proven, e.reason) for e in p.got(ms.PeerDown)] == [(True, "it said goodbye: shutdown")]
    p.forget()
    p.hear("in:d", Header(from_="d", from_inc=d.incarnation), Heartbeat())
    assert len(p.sent(StalePeer)) == 1


# ---------------------------------------------------------------- silence


def test_no_heartbeats_go_along_links_that_are_not_in_use() -> None:
    net, p, d = pair()
    net.run(50)
    assert d.sent(Heartbeat) == p.sent(Heartbeat) == []


def test_a_link_in_use_carries_a_heartbeat_each_second_and_for_a_minute_after() -> None:
    net, _, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    net.run(10)
    assert len(d.sent(Heartbeat)) in (10, 11)
    d.handle(ms.BusyChanged(peer="p", busy=False))
    d.forget()
    net.run(59)
    assert len(d.sent(Heartbeat)) in (59, 60)
    d.forget()
    net.run(30)
    assert len(d.sent(Heartbeat)) <= 2


def test_no_heartbeats_go_to_a_peer_that_the_shell_watches_and_none_judges_its_silence() -> None:
    net, p, d = pair()
    d.handle(ms.WatchChanged(peer="p", watched=True))
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.forget()
    p.die()
    net.run(300)
    assert d.effects == [] and d.machine.next_deadline() is None and d.state_of("p") == "up"


def test_a_peer_that_is_watched_no_longer_is_silent_from_then_on() -> None:
    net, p, d = pair()
    d.handle(ms.WatchChanged(peer="p", watched=True))
    d.handle(ms.BusyChanged(peer="p", busy=True))
    p.die()
    net.run(300)
    d.handle(ms.WatchChanged(peer="p", watched=False))
    net.run(4.9)
    assert d.state_of("p") == "suspect"
    net.run(0.2)
    assert d.state_of("p") == "dead"


def test_a_cut_ends_the_watching() -> None:
    """Or nobody would find that the peer has gone."""
    net, p, d = pair()
    d.handle(ms.WatchChanged(peer="p", watched=True))
    p.die()
    d.forget()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))
    assert [e.watched for e in d.got(ms.PeerWatched)] == [False]
    net.run(6)
    assert d.state_of("p") == "dead"


def test_a_heartbeat_that_asks_is_answered_with_our_load() -> None:
    _, p, d = pair()
    p.handle(ms.OwnLoadChanged(waiting_prefill_tokens=7, running=1, free_blocks=3))
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.Tick())
    d.net.deliver()
    peer = d.machine.peer("p")
    assert peer is not None
    assert peer.load is not None
    assert peer.load.waiting_prefill_tokens == 7


def test_silence_makes_a_peer_suspect_then_dead_and_proves_nothing() -> None:
    net, p, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    p.die()
    net.run(3.5)
    assert d.state_of("p") == "suspect"
    assert d.machine.prefill_peers() == []
    net.run(2)
    assert d.state_of("p") == "dead"
    assert [e.proven for e in d.got(ms.PeerDown)] == [False]


def test_a_dead_peers_link_is_closed_without_letting_anything_out() -> None:
    """What is queued on it would reach the peer's next life."""
    net, p, d = pair()
    link = d.machine.prefill_peers()[0].link
    d.handle(ms.BusyChanged(peer="p", busy=True))
    p.die()
    net.run(6)
    assert ms.CloseLink(link=link, flush=False) in d.effects


def test_any_traffic_counts_as_life() -> None:
    net, p, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    net.drop = lambda node, message: isinstance(message, Heartbeat)
    link = d.machine.prefill_peers()[0].link
    for _ in range(10):
        net.run(2)
        d.handle(ms.Heard(link=link, header=Header(from_="p", from_inc=p.incarnation), kind="prefill.progress"))
    assert d.state_of("p") == "up"


def test_silence_before_a_link_came_into_use_does_not_count() -> None:
    net, _, d = pair()
    net.now += 40 * S
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.Tick())
    assert d.state_of("p") == "up"


def test_a_pause_of_our_own_is_not_the_peers_silence() -> None:
    """A frozen process that goes on would otherwise declare everyone dead before it reads what they sent."""
    net, _, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    net.run(2)
    net.now += 60 * S
    d.handle(ms.Tick())
    assert d.state_of("p") == "up"


def test_a_pause_of_our_own_leaves_no_deadline_behind() -> None:
    """A node that was stopped for longer than its links count as in use must not spin when it goes on."""
    net, p, d = pair()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))
    net.run(2)
    net.now += 70 * S
    d.handle(ms.Heard(link="in:9", header=Header(from_="p", from_inc=p.incarnation), kind="prefill.progress"))
    d.handle(ms.Tick())
    due = d.machine.next_deadline()
    assert due is not None and due > net.now


def test_a_peer_that_is_back_after_a_minute_leaves_no_deadline_behind() -> None:
    net, p, d = pair()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))
    p.die()
    net.run(90)
    net.at[p.address] = p
    net.run(11)
    assert d.state_of("p") == "up"
    d.handle(ms.Tick())
    due = d.machine.next_deadline()
    assert due is not None and due > net.now


def test_a_dead_peer_is_called_anew_and_comes_up_again() -> None:
    net, p, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    p.die()
    net.run(20)
    net.at[p.address] = p
    net.run(11)
    assert d.state_of("p") == "up"
    assert len(d.got(ms.PeerUp)) == 2


def test_a_peer_that_calls_us_is_up_again_when_it_is_heard() -> None:
    net, p, d = pair()
    p.handle(ms.BusyChanged(peer="d", busy=True))
    net.drop = lambda node, message: node is d
    net.run(6)
    assert p.state_of("d") == "dead"
    net.drop = lambda node, message: False
    peer = p.machine.peer("d")
    assert peer is not None
    p.handle(ms.Heard(link=peer.link, header=Header(from_="d", from_inc=d.incarnation), kind="lease.renew"))
    assert p.state_of("d") == "up"


def test_a_cut_connection_stops_choosing_the_peer_until_it_is_heard() -> None:
    net, _, d = pair()
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))
    assert d.machine.prefill_peers() == []
    net.run(1)
    assert d.state_of("p") == "up"
    assert d.got(ms.PeerDown) == []


def test_that_a_node_which_left_does_not_answer_is_no_news() -> None:
    """It is called again, to be found when it comes back; who reads the log knows already that it has gone."""
    net, p, d = pair()
    p.handle(ms.Leaving())
    p.die()
    net.run(30)
    assert d.state_of("p") == "left" and d.got(ms.CallFailed) == []


def test_a_name_belongs_to_the_node_that_is_up() -> None:
    """A second node started under the same name would push the first one out, and take its place when it ends."""
    net, p, d = pair()
    second = Node(net, "p", "prefill", life=2, address="tcp://elsewhere:1")
    second.handle(ms.JoinAsked(address=d.address))
    net.run(1)
    assert [peer.incarnation for peer in d.machine.prefill_peers()] == [p.incarnation]
    refused = [e.reason for e in second.got(ms.CallFailed)]
    assert len(refused) == 1 and f"taken by the node at {p.address}" in refused[0] and "--name" in refused[0]


def test_a_name_whose_node_has_vanished_is_free_again() -> None:
    """Its link was idle, so nobody had noticed: being asked for its name is a reason to look."""
    net, p, d = pair()
    p.die()
    second = Node(net, "p", "prefill", life=2, address="tcp://elsewhere:1")
    second.handle(ms.JoinAsked(address=d.address))
    net.run(40)
    assert [peer.incarnation for peer in d.machine.prefill_peers()] == [second.incarnation]


def test_a_called_node_with_the_name_of_another_that_is_up_is_refused() -> None:
    net, p, d = pair()
    second = Node(net, "p", "prefill", life=2, address="tcp://elsewhere:1")
    d.handle(ms.JoinAsked(address=second.address))
    net.run(1)
    assert [peer.incarnation for peer in d.machine.prefill_peers()] == [p.incarnation]
    assert any("--name" in e.reason for e in d.got(ms.CallFailed))
    shown = {(peer.name, peer.called_at or peer.address): peer for peer in d.machine.members()}
    assert shown["p", p.address].state == "up"
    assert shown["p", second.address].state == "refused" and "--name" in shown["p", second.address].reason
    (down,) = second.got(ms.PeerDown)  # it had taken us for a member
    assert down.proven and "--name" in down.reason


def test_a_peer_killed_while_in_use_is_dead_a_second_after_its_connection_broke() -> None:
    """Whoever waits for it shall not wait for five seconds of silence: a refused connection says more."""
    net, p, d = pair()
    link = d.machine.prefill_peers()[0].link
    p.die()
    d.handle(ms.LinkLost(link=link))
    net.run(0.9)
    assert d.state_of("p") == "suspect"
    net.run(0.2)
    assert d.state_of("p") == "dead"
    (down,) = d.got(ms.PeerDown)
    assert not down.proven and "the connection was cut" in down.reason


def test_a_node_that_paused_itself_gives_a_cut_peer_its_second() -> None:
    net, _, d = pair()
    net.drop = lambda node, message: True
    d.handle(ms.LinkLost(link=d.machine.prefill_peers()[0].link))
    net.now += 30 * S
    d.handle(ms.Tick())
    assert d.state_of("p") == "suspect"


def test_a_peer_killed_while_idle_and_back_on_its_port_serves_again_without_touching_us() -> None:
    net, p, d = pair()
    link = d.machine.prefill_peers()[0].link
    p.die()
    d.handle(ms.LinkLost(link=link))
    net.run(1)
    p2 = Node(net, "p", "prefill", life=2)
    net.run(2)
    assert [peer.incarnation for peer in d.machine.prefill_peers()] == [p2.incarnation]


def test_an_idle_peer_that_vanished_is_noticed_in_a_minute() -> None:
    net, p, d = pair()
    p.die()
    net.run(70)
    assert d.state_of("p") == "dead"


# ---------------------------------------------------------------- dialling


def test_an_unreachable_address_is_shown_with_its_reason_and_tried_again() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    net.run(6)
    shown = d.machine.members()[0]
    assert (shown.address, shown.reason) == ("tcp://p:7400", "no answer within 5 s")
    Node(net, "p", "prefill")
    net.run(11)
    assert d.state_of("p") == "up"


def test_why_an_address_cannot_be_joined_is_told_once_until_the_reason_changes() -> None:
    """A log that repeats it at every try hides everything else."""
    net = Net()
    d = Node(net, "d", "decode")
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    net.run(60)
    told = ms.CallFailed(address="tcp://p:7400", name="", reason="no answer within 5 s")
    assert d.got(ms.CallFailed) == [told]
    Node(net, "p", "prefill", model="other", fingerprint="g")
    net.run(60)
    reason = "cannot share KV: the weights differ (fingerprint f against g)"
    assert d.got(ms.CallFailed) == [told, ms.CallFailed(address="tcp://p:7400", name="p", reason=reason)]


def test_who_is_turned_away_is_told_once() -> None:
    net = Net()
    p, d = Node(net, "p", "prefill"), Node(net, "d", "decode", fingerprint="g")
    d.join(p)
    net.run(120)
    [told] = p.got(ms.TurnedAway)
    assert (told.name, told.address) == ("d", d.address)
    assert told.reason == "cannot share KV: the weights differ (fingerprint g against f)"


def test_a_call_to_a_peer_that_left_is_shown_with_the_peer() -> None:
    net, p, d = pair()
    d.handle(ms.RemoveAsked(target="p"))
    net.deliver()
    p.handle(ms.JoinAsked(address=d.address))
    [member] = p.machine.members()
    assert (member.name, member.calling) == ("d", True)
    net.deliver()
    [member] = p.machine.members()
    assert (member.state, member.calling) == (ms.PeerState.REFUSED, False)
    assert member.reason.startswith("removed here by an operator")


def test_a_call_under_way_is_shown_as_one() -> None:
    """Who asked for it waits for its outcome, and does not take the last try's for it."""
    net = Net()
    d = Node(net, "d", "decode")
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    assert d.machine.members()[0].calling
    net.run(5)
    assert not d.machine.members()[0].calling
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    assert d.machine.members()[0].calling


def test_back_off_doubles_to_two_seconds_with_jitter() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    waits: list[float] = []
    for _ in range(10):
        net.run(5.0)
        due = d.machine.next_deadline()
        assert due is not None
        waits.append((due - net.now) / S)
        net.run(waits[-1] + 1e-6)
    for wait, longest in zip(waits, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 2], strict=True):
        assert longest / 2 - 1e-4 <= wait <= longest + 1e-4


def test_at_most_sixteen_handshakes_are_under_way_and_one_for_each_address() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    for i in range(40):
        for _ in range(2):
            d.handle(ms.JoinAsked(address=f"tcp://x{i}:1"))
    assert len(d.got(ms.OpenLink)) == 16
    net.run(5)
    assert len({e.address for e in d.got(ms.OpenLink)}) == 32


def test_two_addresses_of_one_peer_make_one_link() -> None:
    net, p, d = pair()
    first = d.machine.prefill_peers()[0].link
    net.at["tcp://alias:7400"] = p
    d.handle(ms.JoinAsked(address="tcp://alias:7400"))
    net.deliver()
    assert d.machine.prefill_peers()[0].link == first
    [member] = d.machine.members()
    assert member.aliases == ("tcp://alias:7400",)
    opened = len(d.got(ms.OpenLink))
    for address in ("tcp://alias:7400", p.address):
        d.handle(ms.JoinAsked(address=address))
    assert len(d.got(ms.OpenLink)) == opened
    peer = p.machine.peer("d")
    assert peer is not None
    assert net.links[peer.link][1] == first


def test_an_address_that_cannot_be_tried_is_shown_with_the_problem() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    d.machine.handle(ms.JoinAsked(address="tcp://p:7400"), 0)
    d.handle(ms.LinkFailed(address="tcp://p:7400", problem="no such host"))
    assert d.machine.members()[0].reason == "no such host"


def test_an_agent_that_was_lost_with_a_cut_connection_is_found_by_a_heartbeat() -> None:
    """ZeroMQ re-makes the connection by itself, so that no hello follows, and with it no agent."""
    net, p, d = pair()
    net.drop = lambda node, message: isinstance(message, Agent)
    p.handle(ms.OwnAgentChanged(agent=Agent(epoch=2, name="p/2")))
    net.deliver()
    net.drop = lambda node, message: False
    d.handle(ms.LinkLost(link=d.machine.peer("p").link))
    net.run(2)
    assert [e.agent.name for e in d.got(ms.PeerAgent)] == ["p/2"]
    d.forget()
    net.run(30)
    assert d.sent(Hello) == []


# ---------------------------------------------------------------- drain and removal


def test_a_draining_peer_is_not_chosen_but_stays_up() -> None:
    net, p, d = pair()
    p.handle(ms.DrainStarted())
    net.deliver()
    assert d.machine.prefill_peers() == []
    assert d.state_of("p") == "up"
    assert len(d.got(ms.PeerDraining)) == 1


def test_who_says_hello_to_a_draining_node_is_told() -> None:
    net, p, _ = pair()
    p.handle(ms.DrainStarted())
    d2 = Node(net, "d2", "decode")
    d2.join(p)
    assert d2.machine.prefill_peers() == []


def test_drain_from_a_tool_asks_us_to_drain() -> None:
    _, _, d = pair()
    d.hear("in:tool", Header(from_="tool", from_inc=b"t", seq=4), Drain())
    assert d.got(ms.DrainAsked) == [ms.DrainAsked(link="in:tool", cause=4)]


@pytest.mark.parametrize("target", ["p", "tcp://p:7400"])
def test_a_removed_peer_stays_removed_until_asked_to_join_again(target: str) -> None:
    net, p, d = pair()
    d.handle(ms.RemoveAsked(target=target))
    net.deliver()
    assert d.got(ms.PeerRemoved) == [ms.PeerRemoved(name="p", address="tcp://p:7400")]
    p.join(d)
    net.run(60)
    assert d.state_of("p") == "removed"
    assert "removed" in next(peer.reason for peer in p.machine.members() if peer.name == "d")
    d.join(p)
    assert d.state_of("p") == "up"


def test_removal_waits_for_the_last_lease_and_chooses_the_peer_no_more() -> None:
    _, _, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.RemoveAsked(target="p"))
    assert d.got(ms.PeerRemoved) == []
    assert d.machine.prefill_peers() == []
    d.handle(ms.BusyChanged(peer="p", busy=False))
    assert len(d.got(ms.PeerRemoved)) == 1
    assert d.sent(Goodbye) == [Goodbye(reason="removed")]


def test_a_removal_that_waits_is_taken_back_by_join() -> None:
    _, p, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.RemoveAsked(target="p"))
    d.join(p)
    d.handle(ms.BusyChanged(peer="p", busy=False))
    assert d.state_of("p") == "up" and d.got(ms.PeerRemoved) == []


ALIAS = "tcp://alias:7400"


@pytest.mark.parametrize("target", ["p", "tcp://p:7400", ALIAS])
def test_a_removed_peer_joins_again_under_any_of_its_addresses(target: str) -> None:
    net, p, d = pair()
    net.at[ALIAS] = p
    for again in (ALIAS, p.address, ALIAS):
        d.handle(ms.JoinAsked(address=ALIAS))
        net.deliver()
        d.handle(ms.RemoveAsked(target=target))
        net.run(1)
        assert d.state_of("p") == "removed" and p.state_of("d") == "left"
        d.handle(ms.JoinAsked(address=again))
        net.deliver()
        assert [peer.link[:3] for peer in d.machine.prefill_peers()] == ["out"]


def test_an_address_that_is_found_to_be_a_removed_peer_s_was_asked_for_before_or_after_the_removal() -> None:
    """The later command holds, though nobody knew then that both were about one peer."""
    for commands, state in ((("join", "remove"), "removed"), (("remove", "join"), "up")):
        net, p, d = pair()
        for command in commands:
            d.handle(ms.JoinAsked(address=ALIAS) if command == "join" else ms.RemoveAsked(target="p"))
            net.deliver()
        net.at[ALIAS] = p
        net.run(11)
        assert d.state_of("p") == state
        assert p.state_of("d") == {"up": "up", "removed": "left"}[state]


def test_who_is_at_an_address_that_was_removed_before_anyone_answered_is_kept_out_too() -> None:
    net = Net()
    d = Node(net, "d", "decode")
    d.handle(ms.JoinAsked(address="tcp://p:7400"))
    d.handle(ms.RemoveAsked(target="tcp://p:7400"))
    p = Node(net, "p", "prefill")
    p.join(d)
    net.run(1)
    assert d.machine.prefill_peers() == [] and "removed" in p.machine.members()[0].reason
    d.join(p)
    assert d.state_of("p") == "up"


def test_who_was_refused_can_be_removed_and_stays_so_when_it_would_fit() -> None:
    net = Net()
    odd, d = Node(net, "p", "prefill", fingerprint="x"), Node(net, "d", "decode")
    odd.join(d)
    d.handle(ms.RemoveAsked(target="p"))
    assert d.state_of("p") == "removed"
    p = Node(net, "p", "prefill", life=2)
    p.join(d)
    net.run(31)
    assert d.state_of("p") == "removed" and d.machine.prefill_peers() == []
    d.join(p)
    assert d.state_of("p") == "up"


def test_a_removal_that_is_taken_back_calls_the_peer_where_no_link_of_ours_is_left() -> None:
    net = Net()
    p, d = Node(net, "p", "prefill"), Node(net, "d", "decode")
    net.drop = lambda node, message: node is d and isinstance(message, Welcome)
    p.join(d)
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.RemoveAsked(target="p"))
    net.drop = lambda node, message: False
    net.run(10)
    assert d.state_of("p") == "removing" and p.state_of("d") == "up"
    d.join(p)
    assert [peer.link[:3] for peer in d.machine.prefill_peers()] == ["out"]


def test_a_goodbye_that_comes_after_the_next_hello_is_late() -> None:
    """Nothing orders what is said on two connections: who was removed and is asked for again at once has not left."""
    net, p, d = pair()
    net.slow_down()
    d.handle(ms.RemoveAsked(target="p"))
    net.deliver()
    d.join(p)
    net.catch_up()
    assert p.state_of("d") == "up" and p.got(ms.PeerDown) == []


def test_the_life_of_a_removed_peer_is_proven_over_by_the_next_that_joins() -> None:
    """What is kept for the old one, its agent for one, is let go then."""
    _, p, d = pair()
    d.handle(ms.RemoveAsked(target="p"))
    p.die()
    d.join(Node(p.net, "p", "prefill", life=2))
    assert [(e.proven, e.peer.incarnation[:3]) for e in d.got(ms.PeerDown)] == [(False, b"p#1"), (True, b"p#1")]


def test_removal_does_not_wait_for_ever() -> None:
    net, _, d = pair()
    d.handle(ms.BusyChanged(peer="p", busy=True))
    d.handle(ms.RemoveAsked(target="p"))
    net.run(121)
    assert len(d.got(ms.PeerRemoved)) == 1


def test_removing_nobody_we_know_is_rejected() -> None:
    _, _, d = pair()
    d.handle(ms.RemoveAsked(target="nobody"))
    assert d.got(ms.Rejected)[-1].reason == "no member nobody"


def test_whoever_leaves_greets_no_one_any_more() -> None:
    net, _, d = pair()
    d.handle(ms.Leaving())
    d2 = Node(net, "d2", "decode")
    d2.join(d)
    assert "shutting down" in d2.machine.members()[0].reason


def test_messages_that_need_no_membership_pass() -> None:
    _, _, d = pair()
    header = Header(from_="tool", from_inc=b"t")
    assert ms.event_of("in:t", header, Status()) == ms.Heard(link="in:t", header=header, kind="status")
    assert d.handle(ms.Heard(link="in:t", header=header, kind="status")) == []


def test_the_table_reaches_every_state_from_the_first() -> None:
    reached = {ms.PeerState.GREETING}
    for _ in PEERS:
        reached |= {after for (before, _), after in PEERS.items() if before in reached}
    assert reached == {before for before, _ in PEERS}
