"""A node whose KV is read and written in a mirror: what is announced has been copied down, what is computed upon has
been copied up, and nothing is given away under a copy."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.messages import (
    LeaseReleased,
    PrefillAccepted,
    PrefillCancel,
    PrefillDone,
    PrefillProgress,
    PrefillRequest,
    Sampling,
    TransferDone,
    TryId,
)
from pdbus.bus.wire import Header, pack_u32, unpack_u32
from pdbus.connector.handoff import HandoffConfig, Holder
from pdbus.connector.staging import Way
from pdbus.nodes import events as ev
from pdbus.nodes import report
from pdbus.nodes.decode import State
from pdbus.nodes.scheduler import Limits

from .test_core import LEASE, ME, PEER, TRY, Node, S

HASHES = tuple(b"block %d" % n for n in range(8))


class Staged(Node):
    def __init__(self, role: str, **config: Any) -> None:
        fields = {"limits": Limits(prefill_chunk=4), **config}
        super().__init__(role, handoff=HandoffConfig(staged=True), **fields)

    def ask_for(self, tokens: int, *, request: bytes = b"r", have: int = 0) -> list[ev.NodeEffect]:
        """The peer asks for the beginning of one long prompt."""
        try_ = TryId(node="peer", incarnation=PEER, request=request, attempt=1)
        asked = PrefillRequest(
            try_=try_, sampling=Sampling(), have=have, deadline_ms=60_000, prompt_tokens=tokens, prompt_digest=b"d"
        )
        self.seq += 1
        header = Header(from_="peer", from_inc=PEER, to="me", to_inc=ME, seq=self.seq)
        hashes = HASHES[: tokens // 4]
        return self.hear(ev.MessageCame(link="to peer", header=header, message=asked, block_hashes=hashes))

    def copies(self) -> list[tuple[Way, tuple[int, ...]]]:
        return [(e.way, e.blocks) for e in self.got(ev.StartCopy)]

    def copied(self, *copies: int) -> list[ev.NodeEffect]:
        """These copies end, or the first of all."""
        effects: list[ev.NodeEffect] = []
        for copy in copies or (next(iter(self.core.staging._copies)),):
            effects += self.hear(ev.CopyEnded(copy=copy, bytes=64, in_step=self.core.scheduler.busy))
        self.effects = effects
        return effects

    def announced(self) -> list[tuple[str, int, list[int]]]:
        told = (PrefillAccepted, PrefillProgress, PrefillDone)
        return [(m.KIND, m.ready, list(unpack_u32(m.blocks))) for m in self.said() if isinstance(m, told)]


@pytest.fixture
def p() -> Staged:
    node = Staged("prefill")
    node.meet()
    node.up()
    return node


@pytest.fixture
def d() -> Staged:
    node = Staged("decode")
    node.up()
    node.meet_ready()
    return node


def cancelled(request: bytes = b"r") -> PrefillCancel:
    return PrefillCancel(try_=TryId(node="peer", incarnation=PEER, request=request, attempt=1))


# ---------------------------------------------------------------- a prefill node


def test_a_chunk_is_announced_when_it_has_been_copied_down(p: Staged) -> None:
    """The copy is begun before the next step, so that it goes on beside it."""
    p.ask_for(6)
    p.stepped()
    assert [type(e) for e in p.effects if isinstance(e, ev.StartCopy | ev.RunStep)] == [ev.StartCopy, ev.RunStep]
    assert p.copies() == [(Way.DOWN, (0,))] and p.announced() == []
    p.copied()
    assert p.announced() == [("prefill.progress", 4, [0])]


def test_the_partial_last_block_goes_down_with_the_last_chunk(p: Staged) -> None:
    p.ask_for(6)
    p.stepped()
    p.stepped()
    assert p.copies() == [(Way.DOWN, (1,))]
    assert p.copied(1, 2) and p.announced() == [("prefill.progress", 4, [0]), ("prefill.done", 6, [0, 1])]


def test_chunks_that_end_within_a_block_copy_it_once(p: Staged) -> None:
    p.core.scheduler._limits = Limits(prefill_chunk=3)
    p.ask_for(8)
    copies = []
    for _ in range(3):
        p.stepped()
        copies += p.copies()
    assert copies == [(Way.DOWN, (0,)), (Way.DOWN, (1,))]
    p.copied(1, 2)
    assert p.announced()[-1] == ("prefill.done", 8, [0, 1])


def test_what_the_reader_has_is_not_copied(p: Staged) -> None:
    p.ask_for(10, have=4)
    p.stepped()
    assert p.copies() == []
    p.stepped()
    p.stepped()
    assert [blocks for _, blocks in p.copies()] == [(2,)]
    p.copied(1, 2)
    assert p.announced()[-1] == ("prefill.done", 10, [1, 2])


def test_a_cached_block_is_announced_at_once_only_if_it_is_mirrored(p: Staged) -> None:
    """Its reader had the first block, so only the second went down."""
    p.ask_for(10, have=4)
    for _ in range(3):
        p.stepped()
    p.copied(1, 2)
    p.told(cancelled())
    p.ask_for(10, request=b"s")
    assert p.announced() == [("prefill.accepted", 0, [])] and p.copies() == [(Way.DOWN, (0,))]
    p.copied()
    assert p.announced() == [("prefill.progress", 8, [0, 1])]
    p.told(cancelled(b"s"))
    p.ask_for(10, request=b"t")
    assert p.announced() == [("prefill.accepted", 0, []), ("prefill.progress", 8, [0, 1])] and p.copies() == []


def test_a_lease_that_ends_between_two_chunks_leaves_the_blocks_to_their_copy(p: Staged) -> None:
    p.ask_for(6)
    p.stepped()
    p.told(cancelled())
    assert p.core.pool.holders(0) == {Holder.IN_COPY: 1}
    p.stepped()
    clean, table = report.ledger(p.core)
    assert not clean and table["copies"] == 1
    p.copied()
    assert p.announced() == [] and report.ledger(p.core)[0]


def test_a_worker_takes_its_copies_with_it(p: Staged) -> None:
    p.ask_for(6)
    p.stepped()
    p.hear(ev.WorkerLost(problem="killed"))
    assert len(p.core.staging) == 0 and p.core.pool.available() == 16 and report.ledger(p.core)[0]
    p.hear(ev.CopyEnded(copy=1))
    assert p.announced() == []


def test_a_draining_node_waits_for_its_copies(p: Staged) -> None:
    p.ask_for(6)
    p.stepped()
    p.hear(ev.DrainAsked())
    p.told(cancelled())
    p.stepped()
    assert p.got(ev.Drained) == []
    p.copied()
    assert p.got(ev.Drained)


def test_copies_are_counted(p: Staged) -> None:
    p.ask_for(6)
    p.stepped()
    assert report.metrics(p.core, {}, 0)["kv_copies_open"] == 1
    p.copied()
    told = report.metrics(p.core, {}, 0)
    assert [told[f"kv_{n}"] for n in ("copies_open", "copies_total", "copies_in_step_total", "copied_bytes_total")] == [
        0, 1, 1, 64,
    ]  # fmt: skip


# ---------------------------------------------------------------- a decode node


def read(d: Staged, tokens: int = 6, have: int = 0) -> None:
    """All of it has been read, and is claimed."""
    size = -(-tokens // 4) - have // 4
    d.told(PrefillDone(try_=TRY, lease=LEASE, ready=tokens, blocks=pack_u32(range(8, 8 + size)), first_token=b"t"))
    d.hear(ev.FirstTokenTaken(request=b"q", stop=False))
    d.hear(ev.ReadEnded(read=d.core.fetches.transfers.rows()[-1]["read"]))
    assert any(isinstance(m, TransferDone) for m in d.said())


def confirm(d: Staged) -> None:
    d.told(LeaseReleased(try_=TRY, lease=LEASE, valid=True, cause="done"))


def test_confirmed_kv_goes_up_before_a_step_computes_upon_it(d: Staged) -> None:
    d.generate(tokens=6)
    read(d)
    assert d.copies() == []
    confirm(d)
    assert d.copies() == [(Way.UP, (0, 1))] and d.got(ev.RunStep) == []
    d.copied()
    (step,) = d.got(ev.RunStep)
    assert [(row.start, row.count) for row in step.rows] == [(6, 1)]


def test_a_request_that_leaves_in_mid_copy_leaves_its_blocks_to_it(d: Staged) -> None:
    d.generate(tokens=6)
    read(d)
    confirm(d)
    d.hear(ev.CancelAsked(client="c"))
    assert d.core.pool.holders(0) == {Holder.IN_COPY: 1} and d.core.pool.available() == 14
    d.copied()
    assert d.core.pool.available() == 16 and d.got(ev.RunStep) == [] and report.ledger(d.core)[0]


def test_what_was_read_outlives_the_worker_and_goes_up_to_the_next(d: Staged) -> None:
    d.generate(tokens=6)
    read(d)
    confirm(d)
    d.hear(ev.WorkerLost(problem="killed"))
    assert d.core.pool.holders(0) == {Holder.HELD: 1}
    d.hear(ev.WorkerUp())
    assert [type(e) for e in d.effects if isinstance(e, ev.OpenSequence | ev.StartCopy | ev.RunStep)] == [
        ev.StartCopy, ev.OpenSequence,
    ]  # fmt: skip
    d.copied()
    (step,) = d.got(ev.RunStep)
    assert [(row.start, row.count) for row in step.rows] == [(6, 1)]


def test_what_is_confirmed_while_there_is_no_worker_goes_up_to_the_next(d: Staged) -> None:
    d.generate(tokens=6)
    read(d)
    d.hear(ev.WorkerLost(problem="killed"))
    confirm(d)
    assert d.copies() == []
    d.hear(ev.WorkerUp())
    assert d.copies() == [(Way.UP, (0, 1))]


class Warm:
    """A request of 14 tokens whose first 4 are on the device already."""

    def __init__(self) -> None:
        self.node = Staged("decode")
        self.node.up()
        self.ask(b"first", 6)
        while self.node.core.requests.get(b"first"):
            self.node.stepped()
        self.node.meet_ready()
        self.ask(b"q", 14)

    def ask(self, request: bytes, tokens: int) -> None:
        self.node.hear(
            ev.GenerateAsked(
                request=request, link="cl", client="c", prompt_tokens=tokens, prompt_digest=b"d",
                block_hashes=HASHES[: tokens // 4], sampling=Sampling(max_tokens=2), deadline_ns=300 * S, credit=9,
            )
        )  # fmt: skip


def test_an_attempt_whose_beginning_was_on_the_device_fails_with_the_worker() -> None:
    """Its first tokens were in no mirror."""
    d = Warm().node
    (asked,) = [m for m in d.said() if isinstance(m, PrefillRequest)]
    assert asked.have == 4
    d.hear(ev.WorkerLost(problem="killed"))
    assert [m.try_ for m in d.said() if isinstance(m, PrefillCancel)] == [TRY]
    assert [e.data["cause"] for e in d.got(ev.Publish) if e.event == "attempt.failed"] == ["own worker lost"]
    d.hear(ev.WorkerUp())
    (step,) = d.got(ev.RunStep)
    assert step.rows[0].start == 0, "nobody else can be asked: computed here, from the beginning"


def test_so_does_what_was_on_its_way_up() -> None:
    d = Warm().node
    read(d, 14, have=4)
    confirm(d)
    assert len(d.copies()) == 1 and len(d.copies()[0][1]) == 3
    d.hear(ev.WorkerLost(problem="killed"))
    request = d.core.requests.get(b"q")
    assert request is not None and request.state is State.RUNNING
    d.hear(ev.WorkerUp())
    (step,) = d.got(ev.RunStep)
    assert step.rows[0].start == 0 and d.copies() == []


# ---------------------------------------------------------------- both


def test_a_preemption_between_two_chunks_takes_no_block_from_a_copy() -> None:
    """A node that does both: its own answers grow until the youngest has to give way, between the chunks of a prompt
    that is computed for another node and copied down meanwhile."""
    node = Staged("both", blocks=7, limits=Limits(prefill_chunk=4, max_batch_tokens=8))
    node.peer_role = "decode"
    node.meet()
    node.up()
    for number in (1, 2):
        node.generate(tokens=4, request=b"%d" % number, client=f"c{number}", sampling=Sampling(max_tokens=12))
    node.ask_for(12)
    preempted, copying = 0, dict[int, tuple[int, ...]]()
    for _ in range(60):
        running = len(list(node.core.scheduler.sequences()))
        node.stepped()
        copying.update({e.copy: e.blocks for e in node.got(ev.StartCopy)})
        in_copy = [block for blocks in copying.values() for block in blocks]
        given = [b for e in node.got(ev.RunStep) for row in e.rows if row.seq > 0 for b in unpack_u32(row.new_blocks)]
        assert not set(given) & set(in_copy), "given away under its copy"
        waiting = node.core.requests.waiting
        preempted += bool(waiting) and len(list(node.core.scheduler.sequences())) < running
        if waiting and copying:
            first = next(iter(copying))
            del copying[first]
            node.copied(first)
    assert preempted
    while len(node.core.staging):
        node.copied()
    assert node.core.offers.rows()[0]["ready"] == 12 and len(node.core.requests) == 0
