"""The node's core: what its parts owe each other. Whole clusters of it are in tests/sim."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import (
    Agent,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseId,
    Message,
    Outcome,
    PrefillAccepted,
    PrefillCancel,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillRequest,
    Sampling,
    TransferDone,
    TryId,
    Welcome,
)
from pdbus.bus.wire import Header, pack_u32, replace
from pdbus.connector.handoff import HandoffConfig
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable
from pdbus.nodes import events as ev
from pdbus.nodes import report
from pdbus.nodes.circuits import FAILURES_MAX, LAST_NS, OPEN_NS
from pdbus.nodes.core import CoreConfig, NodeCore
from pdbus.nodes.peers import RELOAD_NS, peer_key
from pdbus.nodes.scheduler import Limits

S = 1_000_000_000
GEOMETRY = geometry_for(1, 1, 4, 4, "float32")
ME, PEER = b"me".ljust(16), b"peer".ljust(16)  # incarnations
E = TypeVar("E", bound=ev.NodeEffect)


class Node:
    """One core and, at the other end of every link, a peer that says what the test says."""

    def __init__(self, role: str, **config: Any) -> None:
        hello = Hello(role=role, address="tcp://me:1", epoch=1, geometry=GEOMETRY)
        membership = Membership(MembershipConfig(name="me", incarnation=ME, hello=hello), unreadable)
        fields = {"blocks": 16, "block_size": 4, "block_bytes": 64, "max_model_len": 64, **config}
        self.core = NodeCore(CoreConfig(name="me", incarnation=ME, decodes=role != "prefill", **fields), membership)
        self.peer_role = "decode" if role == "prefill" else "prefill"
        self.now = 0
        self.seq = 0
        self.effects: list[ev.NodeEffect] = []

    def hear(self, event: ev.NodeEvent) -> list[ev.NodeEffect]:
        self.effects = self.core.handle(event, self.now)
        self.core.pool.check()
        return self.effects

    def told(self, message: Message, by: str = "peer") -> list[ev.NodeEffect]:
        self.seq += 1
        header = Header(from_=by, from_inc=incarnation(by), to="me", to_inc=ME, seq=self.seq)
        hashes = (b"prompt",) if isinstance(message, PrefillRequest) else ()
        return self.hear(ev.MessageCame(link=f"to {by}", header=header, message=message, block_hashes=hashes))

    def tick(self, after_ns: int) -> list[ev.NodeEffect]:
        self.now += after_ns
        return self.hear(ev.Tick())

    def got(self, kind: type[E]) -> list[E]:
        return [e for e in self.effects if isinstance(e, kind)]

    def said(self) -> list[Message]:
        return [e.message for e in self.got(ev.Send)]

    # ------------------------------------------------------------ usual beginnings

    def meet(self, name: str = "peer") -> None:
        """The peer is up, and its agent announced."""
        address = f"tcp://{name}:1"
        hello = Hello(role=self.peer_role, address=address, epoch=1, geometry=GEOMETRY)
        if self.peer_role == "decode":
            self.told(hello, name)
            return
        self.hear(ev.JoinAsked(address=address))
        self.hear(ev.LinkOpened(address=address, link=f"to {name}"))
        self.told(Welcome(hello=hello), name)
        self.told(agent(1, name), name)

    def meet_ready(self, name: str = "peer") -> None:
        self.meet(name)
        self.hear(ev.PeerAddEnded(peer=peer_key(name, incarnation(name), 1)))

    def asks(self, number: int) -> str:
        """Whom request number n is asked of; '' for nobody."""
        self.generate(request=b"%d" % number, client=f"c{number}")
        return next((e.to for e in self.got(ev.Send) if isinstance(e.message, PrefillRequest)), "")

    def up(self) -> None:
        self.hear(ev.WorkerUp())
        self.hear(ev.MoverUp(agents=(agent(self.core.mover.epoch, "me"),)))

    def asked(self, attempt: int = 1, tokens: int = 6) -> list[ev.NodeEffect]:
        """The peer asks for a prompt."""
        return self.told(
            PrefillRequest(
                try_=TryId(node="peer", incarnation=PEER, request=b"r", attempt=attempt), sampling=Sampling(), have=0,
                deadline_ms=60_000, prompt_tokens=tokens, prompt_digest=b"d",
            )
        )  # fmt: skip

    def stepped(self) -> list[ev.NodeEffect]:
        rows = tuple(ev.StepRowEnded(seq=seq, payload=b"t") for seq in self.core.scheduler._rows)
        return self.hear(ev.StepEnded(step=self.core.scheduler.step, rows=rows, compute_ns=1))

    def generate(self, tokens: int = 6, **fields: Any) -> list[ev.NodeEffect]:
        asked = {"request": b"q", "client": "c", "deadline_ns": 300 * S, "sampling": Sampling(max_tokens=4), **fields}
        return self.hear(
            ev.GenerateAsked(link="cl", prompt_tokens=tokens, prompt_digest=b"d", block_hashes=(), credit=99, **asked)
        )


def incarnation(name: str) -> bytes:
    return name.encode().ljust(16)


def agent(epoch: int, name: str) -> Agent:
    return Agent(epoch=epoch, name=f"{name}/{epoch}", blocks=16)


@pytest.fixture
def prefill() -> Node:
    """A prefill node that is up and knows a decode node."""
    node = Node("prefill")
    node.meet()
    node.up()
    return node


@pytest.fixture
def decode() -> Node:
    """A decode node that is up and can read from a prefill node."""
    node = Node("decode")
    node.up()
    node.meet_ready()
    return node


TRY = TryId(node="me", incarnation=ME, request=b"q", attempt=1)
LEASE = LeaseId(node="peer", incarnation=PEER, epoch=1, generation=1)


# ---------------------------------------------------------------- agents and epochs


@pytest.mark.parametrize("first", ["worker", "mover"])
def test_an_agent_is_announced_once_worker_and_mover_are_up(first: str) -> None:
    """Whoever hears of it asks at once."""
    node = Node("prefill")
    node.meet()
    events = [ev.WorkerUp(), ev.MoverUp(agents=(agent(1, "me"),))]
    one, two = events if first == "worker" else reversed(events)
    node.hear(one)
    assert node.said() == []
    node.hear(two)
    assert node.said() == [agent(1, "me")]


def test_after_a_cancel_the_next_prompt_waits_for_the_chunk_that_is_out_and_no_longer() -> None:
    """Of a hundred chunks the first is done and the second is out when the client leaves."""
    limits = Limits(prefill_chunk=8, max_batch_tokens=8)
    node = Node("prefill", blocks=256, max_model_len=1024, limits=limits)
    node.meet()
    node.up()
    node.asked(tokens=800)
    node.stepped()
    (left,) = node.core.scheduler._rows
    node.told(PrefillCancel(try_=TryId(node="peer", incarnation=PEER, request=b"r", attempt=1)))
    node.asked(attempt=2, tokens=800)
    assert node.got(ev.RunStep) == [], "a chunk is out"
    node.stepped()
    (step,) = node.got(ev.RunStep)
    assert [row.seq for row in step.rows] != [left] and len(step.rows) == 1
    assert node.core.offers.held() == 1


def test_until_then_a_prompt_is_refused_at_once() -> None:
    node = Node("prefill")
    node.meet()
    node.asked()
    (failed,) = node.said()
    assert isinstance(failed, PrefillFailed) and failed.cause == "not_ready" and failed.retry_after_ms


def test_without_a_mover_a_prompt_is_refused(prefill: Node) -> None:
    """Nobody could read it."""
    prefill.hear(ev.MoverLost(problem="killed", asked=False))
    prefill.asked()
    assert [m.cause for m in prefill.said() if isinstance(m, PrefillFailed)] == ["not_ready"]


def test_an_agent_of_an_ended_epoch_is_never_announced() -> None:
    """Its mover came up before the worker, which then died: readers would load what is about to go."""
    node = Node("prefill")
    node.meet()
    node.hear(ev.MoverUp(agents=(agent(1, "me"),)))
    node.hear(ev.WorkerLost(problem="killed"))
    assert node.got(ev.RestartMover) == [ev.RestartMover(epoch=2)]
    node.hear(ev.WorkerUp())
    assert node.said() == []
    node.hear(ev.MoverLost(problem="asked to", asked=True))
    assert node.got(ev.RestartMover) == [ev.RestartMover(epoch=2)]
    node.hear(ev.MoverUp(agents=(agent(2, "me"),)))
    assert node.said() == [agent(2, "me")]


def test_a_mover_of_an_older_epoch_is_replaced(prefill: Node) -> None:
    prefill.hear(ev.MoverLost(problem="killed", asked=False))
    prefill.hear(ev.WorkerLost(problem="killed"))
    assert prefill.got(ev.RestartMover) == [], "one is on its way already"
    prefill.hear(ev.MoverUp(agents=(agent(2, "me"),)))
    assert prefill.got(ev.RestartMover) == [ev.RestartMover(epoch=3)] and not prefill.core.mover.up


@pytest.mark.parametrize("lost", [ev.WorkerLost(problem="killed"), ev.MoverLost(problem="killed", asked=False)])
def test_leases_end_before_anything_is_restarted(prefill: Node, lost: ev.NodeEvent) -> None:
    prefill.asked()
    prefill.hear(lost)
    kinds = [type(e) for e in prefill.effects]
    (ended,) = [i for i, e in enumerate(prefill.effects) if isinstance(e, ev.Publish) and e.event == "lease.ended"]
    restart = ev.RestartWorker if isinstance(lost, ev.WorkerLost) else ev.RestartMover
    assert ended < kinds.index(restart) and prefill.core.offers.held() == 0
    assert [m.cause for m in prefill.said() if isinstance(m, PrefillFailed)] == ["worker dead"]


# ---------------------------------------------------------------- peers in the mover


def test_a_new_mover_is_told_of_every_peer(decode: Node) -> None:
    decode.hear(ev.MoverLost(problem="killed", asked=False))
    decode.hear(ev.MoverUp(agents=(agent(2, "me"),)))
    assert [e.peer for e in decode.got(ev.AddPeer)] == [peer_key("peer", PEER, 1)]


def test_a_new_epoch_of_a_peer_replaces_the_last_even_while_that_is_loaded() -> None:
    node = Node("decode")
    node.up()
    node.meet()
    node.told(agent(2, "peer"))
    assert node.got(ev.RemovePeer) == [ev.RemovePeer(peer=peer_key("peer", PEER, 1))]
    assert [e.peer for e in node.got(ev.AddPeer)] == [peer_key("peer", PEER, 2)]


def test_a_peer_that_cannot_be_read_is_not_asked_and_tried_again() -> None:
    """A network may heal; without that the node would compute everything itself for ever."""
    node = Node("decode")
    node.up()
    node.meet()
    key = peer_key("peer", PEER, 1)
    node.hear(ev.PeerAddEnded(peer=key, problem="unreachable"))
    node.generate()
    assert not any(isinstance(m, PrefillRequest) for m in node.said())
    node.tick(RELOAD_NS - 1)
    assert node.got(ev.AddPeer) == []
    node.tick(1)
    assert [e.peer for e in node.got(ev.AddPeer)] == [key]
    node.tick(0)
    assert node.got(ev.AddPeer) == []
    node.hear(ev.PeerAddEnded(peer=key))
    node.generate(request=b"q2", client="c2")
    assert any(isinstance(m, PrefillRequest) for m in node.said())


def test_who_joins_a_peer_hears_which_side_is_still_starting() -> None:
    node, address = Node("decode"), "tcp://peer:1"
    hello = Hello(role="prefill", address=address, epoch=1, geometry=GEOMETRY)
    node.hear(ev.JoinAsked(address=address))
    node.hear(ev.LinkOpened(address=address, link="to peer"))
    node.told(Welcome(hello=hello))
    assert report.joined(node.core, [address]) == [None]
    assert "linked with peer, but this node's own mover is still starting" in report.waiting(node.core, [address])[0]
    node.up()
    assert "peer is still starting: it is used by itself" in report.waiting(node.core, [address])[0]
    node.told(agent(1, "peer"))
    assert "still connecting to the memory of peer" in report.waiting(node.core, [address])[0]
    node.hear(ev.PeerAddEnded(peer=peer_key("peer", PEER, 1)))
    assert report.joined(node.core, [address]) == [Outcome(target=address, ok=True, detail="peer")]


def test_a_peer_that_comes_back_after_its_goodbye_is_served(prefill: Node) -> None:
    """An operator took it out and put it in again: it is the same incarnation."""
    prefill.told(Goodbye(reason="removed"))
    prefill.meet()
    prefill.asked()
    assert any(isinstance(m, PrefillAccepted) for m in prefill.said())


# ---------------------------------------------------------------- choosing


def test_prefill_nodes_are_asked_in_turn() -> None:
    node = Node("decode")
    node.up()
    for name in ("b", "a", "c"):
        node.meet_ready(name)
    assert [node.asks(n) for n in range(4)] == ["a", "b", "c", "a"]


def test_a_node_that_failed_an_attempt_comes_last_for_a_while() -> None:
    node = Node("decode")
    node.up()
    node.meet_ready("a")
    node.meet_ready("b")
    assert node.asks(0) == "a"
    node.tick(S)
    node.tick(S)  # no answer
    assert [e.to for e in node.got(ev.Send) if isinstance(e.message, PrefillRequest)] == ["b"]
    assert [node.asks(n) for n in (1, 2)] == ["b", "b"]
    for name in "ab":
        node.told(Heartbeat(), name)
    node.tick(LAST_NS)
    assert node.asks(3) == "a"


def test_a_node_where_attempts_keep_failing_is_not_asked_until_a_trial_decides(decode: Node) -> None:
    """Each request would lose two seconds there before it is computed here."""
    for number in range(FAILURES_MAX):
        decode.told(Heartbeat())
        assert decode.asks(number) == "peer"
        decode.tick(S)
        decode.tick(S)  # no answer
    assert [e.data for e in decode.got(ev.Publish) if e.event == "circuit.opened"] == [
        {"node": "peer", "for_ms": OPEN_NS // 1_000_000, "cause": "no answer"}
    ]
    decode.told(Heartbeat())
    assert decode.asks(10) == ""
    decode.tick(OPEN_NS)
    assert decode.asks(11) == "peer"
    assert report.peers(decode.core, decode.now)[0]["circuit"] == "half-open"
    assert decode.asks(12) == ""


def test_a_new_life_of_a_node_has_a_closed_circuit() -> None:
    node = Node("decode")
    node.up()
    node.meet_ready()
    for number in range(FAILURES_MAX):
        node.asks(number)
    node.tick(S)
    node.tick(S)
    assert report.peers(node.core, node.now)[0]["circuit"] == "open"
    node.told(agent(2, "peer"))
    node.hear(ev.PeerAddEnded(peer=peer_key("peer", PEER, 2)))
    assert report.peers(node.core, node.now)[0]["circuit"] == ""
    assert node.asks(10) == "peer"


def test_without_a_mover_nobody_is_asked(decode: Node) -> None:
    decode.hear(ev.MoverLost(problem="killed", asked=False))
    assert decode.asks(0) == ""


# ---------------------------------------------------------------- fetching


def test_a_prompt_goes_through_a_prefill_node(decode: Node) -> None:
    decode.generate(tokens=6)
    (asked,) = [m for m in decode.said() if isinstance(m, PrefillRequest)]
    assert asked.try_ == TRY and decode.got(ev.RunStep) == []
    decode.told(PrefillDone(try_=TRY, lease=LEASE, ready=6, blocks=pack_u32([8, 9]), first_token=b"t"))
    (read,) = decode.got(ev.StartRead)
    assert (read.source, read.target) == ((8, 9), (0, 1))
    assert decode.got(ev.TakeFirstToken) == [ev.TakeFirstToken(request=b"q", seq=1, payload=b"t")]
    decode.hear(ev.FirstTokenTaken(request=b"q", stop=False))
    decode.hear(ev.ReadEnded(read=read.read))
    assert decode.said() == [TransferDone(try_=TRY, lease=LEASE)]


def test_a_read_while_no_mover_runs_ends_its_attempt_at_once(decode: Node) -> None:
    """Nobody would ever report it, its blocks would stay quarantined and the peer blocked."""
    decode.generate()
    decode.hear(ev.MoverLost(problem="killed", asked=False))
    decode.told(PrefillProgress(try_=TRY, lease=LEASE, ready=4, blocks=pack_u32([8])))
    assert decode.got(ev.StartRead) == [] and len(decode.core.fetches.transfers) == 0
    assert [m.try_ for m in decode.said() if isinstance(m, PrefillCancel)] == [TRY]
    assert decode.got(ev.RunStep), "with nobody left to ask it is computed here"


def test_a_mover_whose_reads_hold_too_many_blocks_for_good_is_replaced(decode: Node) -> None:
    """Only its end proves that they write no more. The leases of its epoch end with it."""
    decode.generate(tokens=20)
    decode.told(PrefillDone(try_=TRY, lease=LEASE, ready=20, blocks=pack_u32(range(5)), first_token=b"t"))
    while not decode.got(ev.RestartMover):
        assert decode.core.pool.counts().quarantined == 0, "a quarter of 16 blocks is 4"
        decode.tick(S // 10)
    assert decode.got(ev.RestartMover) == [ev.RestartMover(epoch=2)] and decode.core.mover.healing
    decode.tick(decode.now + 1)
    assert decode.got(ev.RestartMover) == [], "once is enough"
    decode.hear(ev.MoverLost(problem="asked to", asked=True))
    assert decode.core.pool.counts().quarantined == 0 and not decode.core.mover.healing
    assert decode.got(ev.RestartMover) == [ev.RestartMover(epoch=2)]


def test_reads_that_are_given_up_in_time_cost_nobody_the_mover(decode: Node) -> None:
    """A client that leaves while its long prompt is read would otherwise fail everyone's reads."""
    decode.generate(tokens=20)
    decode.told(PrefillDone(try_=TRY, lease=LEASE, ready=20, blocks=pack_u32(range(5)), first_token=b"t"))
    (read,) = decode.got(ev.StartRead)
    decode.hear(ev.CancelAsked(client="c"))
    assert decode.core.pool.counts().quarantined == 5 and decode.got(ev.RestartMover) == []
    decode.hear(ev.ReadEnded(read=read.read))
    assert decode.core.pool.counts().quarantined == 0 and decode.core.mover.epoch == 1


def test_nothing_is_fetched_by_a_mover_that_is_being_replaced(decode: Node) -> None:
    decode.generate(tokens=20)
    decode.told(PrefillDone(try_=TRY, lease=LEASE, ready=20, blocks=pack_u32(range(5)), first_token=b"t"))
    while not decode.core.mover.healing:
        decode.tick(S // 10)
    decode.meet_ready("other")
    assert decode.asks(1) == ""


def test_a_first_token_that_comes_as_its_attempt_fails_is_not_sampled_again(decode: Node) -> None:
    decode.generate(tokens=8)
    decode.hear(ev.MoverLost(problem="killed", asked=False))
    decode.told(PrefillDone(try_=TRY, lease=LEASE, ready=8, blocks=pack_u32([8, 9]), first_token=b"t"))
    kinds = [type(e) for e in decode.effects]
    assert kinds.index(ev.TakeFirstToken) < kinds.index(ev.RunStep)
    (step,) = decode.got(ev.RunStep)
    assert [(row.start, row.count, row.sample) for row in step.rows] == [(0, 9, True)]


def test_an_end_while_fetching_is_told_to_the_prefill_node(decode: Node) -> None:
    decode.generate()
    decode.hear(ev.CancelAsked(client="c"))
    assert decode.said() == [PrefillCancel(try_=TRY)]
    assert [e.reason for e in decode.got(ev.EndRequest)] == ["cancelled"]


def test_a_deadline_ends_a_request_wherever_it_stands(decode: Node) -> None:
    decode.generate(deadline_ns=5 * S)
    decode.tick(5 * S)
    assert [(e.reason, e.code) for e in decode.got(ev.EndRequest)] == [("error", "deadline")]
    assert decode.core.pool.available() == 16 and decode.core.fetches.rows() == []


# ---------------------------------------------------------------- the worker


def test_a_new_worker_is_told_of_every_request_before_its_first_step() -> None:
    node = Node("decode")
    node.generate()
    node.hear(ev.WorkerUp())
    assert [type(e) for e in node.effects] == [ev.OpenSequence, ev.RunStep]


def test_a_request_whose_row_failed_ends_alone() -> None:
    node = Node("decode")
    node.up()
    node.generate()
    node.generate(request=b"q2", client="c2")
    node.hear(ev.StepEnded(step=1, rows=(ev.StepRowEnded(seq=1, problem="NaN"),), compute_ns=1))
    assert [(e.request, e.code, e.problem) for e in node.got(ev.EndRequest)] == [(b"q", "engine", "NaN")]
    assert [row.seq for e in node.got(ev.RunStep) for row in e.rows] == [2]


def test_a_prompt_whose_row_failed_is_told_to_its_reader(prefill: Node) -> None:
    prefill.asked()
    prefill.hear(ev.StepEnded(step=1, rows=(ev.StepRowEnded(seq=-1, problem="NaN"),), compute_ns=1))
    assert [m.cause for m in prefill.said() if isinstance(m, PrefillFailed)] == ["failed: NaN"]
    assert prefill.got(ev.CloseSequence) == [ev.CloseSequence(seq=-1)] and prefill.core.offers.rows() == []


def test_without_a_worker_a_prompt_is_refused_and_nothing_is_cached(prefill: Node) -> None:
    """What it computed is worth nothing to the next one."""
    prefill.asked()
    prefill.stepped()
    assert prefill.core.pool.match([b"prompt"]) == 1
    prefill.hear(ev.WorkerLost(problem="killed"))
    assert prefill.core.pool.match([b"prompt"]) == 0
    prefill.asked(attempt=2)
    assert [m.cause for m in prefill.said() if isinstance(m, PrefillFailed)] == ["not_ready"]


def test_the_mover_hears_how_many_leases_are_held(prefill: Node) -> None:
    """It polls fast while any is."""
    prefill.asked()
    assert prefill.got(ev.AdvertiseLeases) == [ev.AdvertiseLeases(leases=1)]
    prefill.stepped()
    assert prefill.got(ev.AdvertiseLeases) == []
    prefill.told(PrefillCancel(try_=TryId(node="peer", incarnation=PEER, request=b"r", attempt=1)))
    assert prefill.got(ev.AdvertiseLeases) == [ev.AdvertiseLeases(leases=0)] and prefill.core.prefills.readers() == {}


# ---------------------------------------------------------------- drain


def test_a_draining_node_ends_when_its_last_lease_has_been_read(prefill: Node) -> None:
    prefill.asked(tokens=6)
    prefill.hear(ev.DrainAsked())
    assert prefill.said() == [Drain()] and prefill.got(ev.Drained) == []
    prefill.stepped()
    (done,) = prefill.said()
    assert isinstance(done, PrefillDone) and prefill.got(ev.Drained) == []
    prefill.told(TransferDone(try_=done.try_, lease=done.lease))
    assert any(isinstance(m, Goodbye) for m in prefill.said()) and len(prefill.got(ev.Drained)) == 1


def test_one_that_finds_no_place_is_told_when_to_come_back() -> None:
    node = Node("decode", running_max=1, waiting_max=1, prefill_policy="local")
    node.up()
    for number in range(3):
        assert node.got(ev.EndRequest) == []
        node.asks(number)
    (end,) = node.got(ev.EndRequest)
    assert end.code == "overloaded" and end.retry_after_ms > 0


def test_a_draining_node_ends_when_its_last_request_has(decode: Node) -> None:
    decode.generate()
    decode.hear(ev.DrainAsked())
    assert decode.got(ev.Drained) == []
    decode.generate(request=b"q2", client="c2")
    assert [e.code for e in decode.got(ev.EndRequest)] == ["draining"]
    decode.hear(ev.CancelAsked(client="c"))
    assert len(decode.got(ev.Drained)) == 1


def test_a_drain_has_an_end(prefill: Node) -> None:
    prefill.asked()
    prefill.hear(ev.DrainAsked())
    while not prefill.got(ev.Drained) and prefill.now < 1000 * S:
        prefill.told(Drain())  # it lives
        prefill.tick(5 * S)
    assert prefill.now <= 125 * S and prefill.core.offers.held() == 0


def test_leaving_ends_everything_at_once(decode: Node) -> None:
    decode.generate()
    decode.hear(ev.LeaveAsked())
    assert [e.code for e in decode.got(ev.EndRequest)] == ["shutdown"] and len(decode.got(ev.Drained)) == 1
    decode.hear(ev.LeaveAsked())
    assert decode.got(ev.Drained) == []


# ---------------------------------------------------------------- digests


def test_a_check_that_a_worker_took_with_it_is_asked_of_the_next() -> None:
    node = Node("decode", handoff=HandoffConfig(digest_layers=1))
    node.up()
    node.meet_ready()
    node.generate(tokens=6)
    done = PrefillDone(try_=TRY, lease=LEASE, ready=6, blocks=pack_u32([8, 9]), first_token=b"t")
    node.told(replace(done, block_digests=bytes(16)))
    node.hear(ev.FirstTokenTaken(request=b"q", stop=False))
    node.hear(ev.ReadEnded(read=1))
    (check,) = node.got(ev.CheckKv)
    assert (check.node, check.blocks, check.begin, check.end) == ("peer", (0, 1), 0, 6)
    node.hear(ev.WorkerLost(problem="killed"))
    node.hear(ev.WorkerUp())
    assert node.got(ev.CheckKv) == [check]
    node.hear(ev.KvChecked(request=b"q", attempt=1))
    assert node.said() == [TransferDone(try_=TRY, lease=LEASE)]


# ---------------------------------------------------------------- where prompts are computed


def measured(node: Node, name: str, tokens_per_s: int, queued: int = 0) -> None:
    node.told(Heartbeat(prefill_tokens_per_s=tokens_per_s, waiting_prefill_tokens=queued), name)


@pytest.fixture
def auto() -> Node:
    """A decode node that may choose between two prefill nodes and itself."""
    node = Node("decode", prefill_policy="auto")
    node.up()
    for name in ("p1", "p2"):
        node.meet_ready(name)
    return node


def test_auto_asks_the_prefill_node_that_is_sooner_and_says_why(auto: Node) -> None:
    measured(auto, "p1", 1000, queued=500)
    measured(auto, "p2", 1000)
    auto.core.places.steps.stepped(100, False, 1, 10 * S, auto.now)
    assert auto.asks(1) == "p2"
    (placed,) = (e for e in auto.got(ev.Publish) if e.event == "prefill.placed")
    assert placed.data["node"] == "p2" and placed.data["request"] == b"1".hex()
    there: Any = placed.data["there"]
    assert {node["node"]: node["queued_tokens"] for node in there} == {"p1": 500, "p2": 0}
    assert all(node["estimate_ns"] for node in there)


def test_auto_computes_here_what_is_sooner_here(auto: Node) -> None:
    for name in ("p1", "p2"):
        measured(auto, name, 1000, queued=500)
    auto.core.places.steps.stepped(100, False, 1, S // 100, auto.now)
    assert auto.asks(1) == ""
    assert auto.got(ev.RunStep)


def test_a_queue_is_worked_off_between_heartbeats(auto: Node) -> None:
    measured(auto, "p1", 1000, queued=400)
    measured(auto, "p2", 1000, queued=0)
    auto.core.places.steps.stepped(100, False, 1, 10 * S, auto.now)
    assert auto.asks(1) == "p2"
    auto.now += S // 2
    assert auto.asks(2) == "p1"


def test_a_node_tells_how_fast_it_computes_prompts_when_it_is_asked(prefill: Node) -> None:
    prefill.asked()
    step = prefill.core.scheduler.step
    rows = tuple(ev.StepRowEnded(seq=seq, payload=b"t") for seq in prefill.core.scheduler._rows)
    prefill.hear(ev.StepEnded(step=step, rows=rows, compute_ns=6 * S // 1000))
    prefill.told(Heartbeat(reply=True))
    (answer,) = (m for m in prefill.said() if isinstance(m, Heartbeat))
    assert answer.prefill_tokens_per_s == 1000


def test_a_node_tells_how_fast_it_read_from_each_peer_in_the_last_minute(auto: Node) -> None:
    core = auto.core
    assert [row["read_bytes_per_s"] for row in report.peers(core, auto.now)] == [0, 0]
    p1 = next(p for p in core.peers.members() if p.name == "p1")
    core.places.read_ended(peer_key(p1.name, p1.incarnation, p1.epoch), 1000, S // 10, auto.now)
    assert {row["name"]: row["read_bytes_per_s"] for row in report.peers(core, auto.now)} == {"p1": 10_000, "p2": 0}
    assert {row["read_bytes_per_s"] for row in report.peers(core, auto.now + 61 * S)} == {0}


def test_local_asks_nobody() -> None:
    node = Node("decode", prefill_policy="local")
    node.up()
    node.meet_ready("p1")
    assert node.asks(1) == ""
    assert node.got(ev.RunStep)
