"""What the next step computes: decodes, then chunks of prompts, oldest first, with blocks for all of it."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.wire import pack_u32, unpack_u32
from pdbus.connector.handoff import Holder
from pdbus.connector.ipc import StepRow
from pdbus.connector.pool import BlockPool
from pdbus.nodes.scheduler import Limits, Plan, Progress, Scheduler, Sequence

from tests.model_worker import ModelWorker

SIZE = 4


class Bench:
    """A scheduler over a pool, and a worker that is told what a real one would be told."""

    def __init__(self, blocks: int = 16, **limits: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = Scheduler(self.pool, Limits(**limits))
        self.worker = ModelWorker(SIZE)

    def prompt(self, seq: int, tokens: int, **fields: Any) -> Sequence:
        """A request of this node's own, not yet computed."""
        fields = {"order": seq, "known": tokens, "growing": True, "sample_prompt": True, "hashes": True, **fields}
        reservation = self.pool.reserve(tokens, (), Holder.HELD)
        assert reservation is not None
        hashes = tuple(b"%d/%d" % (seq, n) for n in range(tokens // SIZE)) if fields.pop("hashes") else ()
        sequence = Sequence(
            seq=seq, prompt_tokens=tokens, blocks=list(reservation.blocks), block_hashes=hashes,
            **{"computed": 0, **fields},
        )  # fmt: skip
        self.scheduler.add(sequence)
        if seq not in self.worker:
            self.worker.open(seq, sequence.known)
        return sequence

    def offer(self, seq: int, tokens: int, **fields: Any) -> Sequence:
        """A prompt for another node, younger than any request."""
        return self.prompt(seq, tokens, **{"order": 1000 + seq, "growing": False, **fields})

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        self.worker.step(plan.rows)
        return plan

    def step(self) -> list[Progress]:
        self.plan()
        return self.scheduler.end_step(self.scheduler.step)

    def rows(self) -> list[tuple[int, int, int, bool]]:
        """(sequence, start, count, sample) of the next step."""
        return [(r.seq, r.start, r.count, r.sample) for r in self.plan().rows]

    def steps(self, count: int) -> list[list[tuple[int, int, int, bool]]]:
        out = []
        for _ in range(count):
            out.append(self.rows())
            self.scheduler.end_step(self.scheduler.step)
        return out

    def decoding(self, seq: int, tokens: int) -> Sequence:
        """A request whose prompt stands in its blocks, and whose first token is known."""
        return self.prompt(seq, tokens, computed=tokens, known=tokens + 1, hashes=False)


# ---------------------------------------------------------------- what, in which order


def test_a_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    bench = Bench(prefill_chunk=6)
    bench.prompt(1, 14)
    assert bench.steps(4) == [[(1, 0, 6, False)], [(1, 6, 6, False)], [(1, 12, 2, True)], [(1, 14, 1, True)]]


def test_decodes_come_before_prompts_however_old() -> None:
    """An answer under way never waits for a prompt: that gap would be somebody's ITL."""
    bench = Bench(max_batch_tokens=8, prefill_chunk=8)
    bench.decoding(5, 3)
    bench.prompt(1, 20)
    assert bench.rows() == [(5, 3, 1, True), (1, 0, 7, False)]


def test_prompts_share_what_is_left_oldest_first() -> None:
    bench = Bench(max_batch_tokens=10, prefill_chunk=6)
    bench.prompt(3, 12)
    bench.prompt(2, 12)
    bench.prompt(1, 3)
    assert bench.steps(2) == [
        [(1, 0, 3, True), (2, 0, 6, False), (3, 0, 1, False)],
        [(1, 3, 1, True), (2, 6, 6, True), (3, 1, 3, False)],
    ]


def test_own_requests_come_before_prompts_for_others() -> None:
    bench = Bench(max_batch_tokens=6, prefill_chunk=6)
    bench.offer(-1, 8)
    bench.prompt(7, 8)
    assert bench.rows() == [(7, 0, 6, False)]


def test_more_decodes_than_the_budget_take_the_oldest() -> None:
    bench = Bench(max_batch_tokens=16)
    for seq in (3, 1, 2):
        bench.decoding(seq, 2)
    bench.scheduler._limits = Limits(max_batch_tokens=2)
    assert [row[0] for row in bench.rows()] == [1, 2]


def test_nothing_to_do_is_no_step() -> None:
    bench = Bench()
    assert bench.plan().rows == [] and not bench.scheduler.busy
    bench.offer(-1, 4, sample_prompt=False)
    bench.step()
    assert bench.plan().rows == [] and bench.scheduler.step == 1


def test_without_sampling_a_prompt_ends_without_a_token() -> None:
    bench = Bench()
    bench.offer(-1, 5, sample_prompt=False)
    assert bench.step() == [Progress(seq=-1, computed=5, prompt_done=True, sampled=False)]


def test_a_forced_token_is_computed_and_sampled_after() -> None:
    """The first token came from the prefill node; here it is one more known token."""
    bench = Bench()
    bench.prompt(1, 5, known=6, computed=5)
    assert bench.scheduler.plan().rows[0] == StepRow(
        seq=1, start=5, count=1, new_blocks=b"\0\0\0\0\1\0\0\0", sample=True
    )


def test_a_step_says_how_far_each_sequence_came() -> None:
    bench = Bench(prefill_chunk=3)
    bench.prompt(1, 3)
    bench.offer(-1, 4)
    assert bench.step() == [
        Progress(seq=1, computed=3, prompt_done=True, sampled=True),
        Progress(seq=-1, computed=3, prompt_done=False, sampled=False),
    ]


def test_the_load_is_what_is_left_of_prompts() -> None:
    bench = Bench(prefill_chunk=3)
    bench.decoding(1, 3)
    bench.offer(-1, 8)
    assert bench.scheduler.waiting_tokens() == 8
    bench.step()
    assert bench.scheduler.waiting_tokens() == 5


# ---------------------------------------------------------------- one step is out


def test_blocks_are_held_until_the_step_has_ended() -> None:
    """Whoever lets go of them meanwhile must not get them given to another under the writing step."""
    bench = Bench(blocks=3)
    sequence = bench.prompt(1, 12, hashes=False)
    bench.plan()
    bench.scheduler.remove(1)
    bench.pool.drop(sequence.blocks, Holder.HELD)
    assert bench.pool.available() == 0 and bench.pool.holders(0) == {Holder.IN_STEP: 1}
    assert bench.scheduler.end_step(1) == []
    assert bench.pool.available() == 3


def test_a_step_holds_only_what_it_writes() -> None:
    bench = Bench(prefill_chunk=4)
    bench.prompt(1, 12)
    bench.step()
    bench.plan()
    assert [Holder.IN_STEP in bench.pool.holders(block) for block in range(3)] == [False, True, False]


def test_a_step_that_is_not_the_one_out_ends_nothing() -> None:
    bench = Bench(prefill_chunk=4)
    sequence = bench.prompt(1, 8)
    bench.step()
    bench.plan()
    assert bench.scheduler.end_step(1) == [] and bench.scheduler.busy
    bench.scheduler.end_step(2)
    assert bench.scheduler.end_step(2) == [] and sequence.computed == 8


def test_an_abandoned_step_counts_for_nothing() -> None:
    bench = Bench()
    sequence = bench.prompt(1, 6)
    bench.plan()
    assert bench.scheduler.in_step(1)
    assert bench.scheduler.abandon_step() == [1]
    assert not bench.scheduler.busy and sequence.computed == 0 and bench.scheduler.end_step(1) == []
    assert bench.pool.holders(0) == {Holder.HELD: 1}


# ---------------------------------------------------------------- blocks


def test_an_answer_grows_one_block_at_a_time() -> None:
    bench = Bench()
    sequence = bench.decoding(1, 4)
    bench.step()
    assert sequence.blocks == [0, 1]
    bench.steps(3)
    assert sequence.blocks == [0, 1]
    bench.step()
    assert sequence.blocks == [0, 1, 2]


def test_without_room_the_youngest_gives_up_its_blocks() -> None:
    bench = Bench(blocks=3)
    old, middle, young = (bench.decoding(seq, 4) for seq in (1, 2, 3))
    plan = bench.plan()
    assert plan.preempted == [young]
    assert [row.seq for row in plan.rows] == [1] and old.blocks == [0, 2] and middle.blocks == [1]
    bench.pool.check()


def test_what_was_planned_for_the_preempted_is_taken_back() -> None:
    """Its decode came first in the plan, then an older sequence needed its block."""
    bench = Bench(blocks=3)
    young = bench.decoding(2, 3)
    bench.prompt(1, 8, computed=8, known=10)
    plan = bench.plan()
    assert plan.preempted == [young] and [(row.seq, row.start, row.count) for row in plan.rows] == [(1, 8, 2)]
    assert bench.pool.holders(0) == {Holder.HELD: 1, Holder.IN_STEP: 1}


def test_the_oldest_is_never_preempted_and_waits_for_what_is_not_its_to_take() -> None:
    """Prompts for others hold their blocks until they have been read: nobody may take them."""
    bench = Bench(blocks=2)
    oldest = bench.decoding(1, 4)
    bench.offer(-1, 4, computed=4)
    plan = bench.plan()
    assert plan.rows == [] and plan.preempted == [] and not bench.scheduler.busy
    assert bench.scheduler.get(1) is oldest
    bench.scheduler.remove(-1)
    bench.pool.drop([1], Holder.HELD)
    assert bench.rows() == [(1, 4, 1, True)]


def test_a_younger_one_takes_nothing_from_an_older() -> None:
    bench = Bench(blocks=2)
    bench.decoding(1, 3)
    bench.decoding(2, 4)
    plan = bench.plan()
    assert [row.seq for row in plan.rows] == [1] and plan.preempted == []


# ---------------------------------------------------------------- prefix cache


def test_full_blocks_of_a_prompt_are_published_once_computed() -> None:
    bench = Bench(prefill_chunk=7)
    bench.prompt(1, 10)
    hashes = [b"1/0", b"1/1"]
    assert bench.pool.match(hashes) == 0
    bench.step()
    assert bench.pool.match(hashes) == 1
    bench.step()
    assert bench.pool.match(hashes) == 2
    stored = [(e.block_hash, e.parent, e.block) for e in bench.pool.take_events()]  # type: ignore[attr-defined]
    assert stored == [(b"1/0", b"", 0), (b"1/1", b"1/0", 1)]


def test_blocks_of_the_answer_are_not_published() -> None:
    bench = Bench()
    bench.decoding(1, 3)
    bench.steps(6)
    assert bench.pool.take_events() == []


def test_what_was_read_from_elsewhere_is_published_with_the_first_step() -> None:
    bench = Bench()
    bench.prompt(1, 8, computed=8, known=9)
    bench.step()
    assert bench.pool.match([b"1/0", b"1/1"]) == 2


# ---------------------------------------------------------------- the worker's table


def test_a_block_is_told_once() -> None:
    bench = Bench(prefill_chunk=4)
    sequence = bench.prompt(1, 8)
    told = []
    for _ in range(4):
        told += [list(unpack_u32(row.new_blocks)) for row in bench.plan().rows]
        bench.scheduler.end_step(bench.scheduler.step)
    assert told == [[0, 1], [], [2], []] and bench.worker.table(1) == sequence.blocks


@pytest.mark.parametrize("reset", [True, False])
def test_a_table_is_emptied_once(reset: bool) -> None:
    """After a preemption the worker still has the table of before."""
    bench = Bench(prefill_chunk=4)
    bench.prompt(1, 8, reset=reset)
    assert [row.reset for row in bench.plan().rows] == [reset]
    bench.scheduler.end_step(1)
    assert [row.reset for row in bench.plan().rows] == [False]


def test_the_table_is_the_schedulers_after_a_preemption() -> None:
    bench = Bench(blocks=4)
    old, young = bench.decoding(1, 8), bench.decoding(2, 6)
    bench.worker.step([StepRow(seq=2, start=6, count=1, new_blocks=pack_u32(young.blocks))])
    assert bench.plan().preempted == [young]
    bench.scheduler.remove(1)
    bench.scheduler.end_step(1)
    bench.pool.drop(old.blocks, Holder.HELD)
    bench.pool.take(1, Holder.HELD)
    again = bench.prompt(2, 6, known=7, reset=True)
    bench.step()
    assert bench.worker.table(2) == again.blocks != young.blocks


# ---------------------------------------------------------------- several tokens of one step


def test_a_row_may_have_sampled_several_tokens() -> None:
    """As many as its last block has room for; the next step goes on behind them."""
    bench = Bench()
    bench.prompt(1, 5)
    bench.step()
    plan = bench.scheduler.plan()
    assert [(r.start, r.count) for r in plan.rows] == [(5, 1)]
    (progress,) = bench.scheduler.end_step(2, sampled={1: 3})
    assert (progress.computed, progress.sampled) == (8, 3)
    assert [(r.start, r.count, r.sample) for r in bench.scheduler.plan().rows] == [(8, 1, True)]


@pytest.mark.parametrize("sampled", [{1: 4}, {1: 0}, {7: 2}])
def test_more_tokens_than_the_step_holds_blocks_for_change_nothing(sampled: dict[int, int]) -> None:
    bench = Bench()
    sequence = bench.prompt(1, 5)
    bench.step()
    bench.scheduler.plan()
    with pytest.raises(LocalProtocolError, match="tokens of a step that holds blocks for"):
        bench.scheduler.end_step(2, sampled=sampled)
    assert bench.scheduler.busy and sequence.computed == 5
