"""A request's life on the decode node: waiting, fetching, running, and its one end."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.messages import Sampling
from pdbus.connector.handoff import AttemptFailed, FetchAsked, Holder
from pdbus.connector.pool import BlockPool
from pdbus.nodes.decode import Request, Requests, Source, State
from pdbus.nodes.events import EmitToken, EndRequest, GenerateAsked, NodeEffect, TakeFirstToken
from pdbus.nodes.scheduler import Limits, Scheduler

SIZE = 4
S = 1_000_000_000


class Node:
    """Requests over a real pool and scheduler; `sources` are the prefill nodes left to choose from, in order."""

    def __init__(self, blocks: int = 16, *sources: str, max_model_len: int = 64, running_max: int = 8) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = Scheduler(self.pool, Limits())
        self.sources = list(sources)
        self.requests = Requests(
            self.pool, self.scheduler, max_model_len=max_model_len, running_max=running_max, choose=self._choose
        )
        self.arrived = 0

    def _choose(self, r: Request, cached: int, now: int) -> Source | None:
        free = [name for name in self.sources if name not in r.tried]
        return Source(node=free[0], incarnation=b"i", epoch=3, link=f"to {free[0]}", block_size=8) if free else None

    def arrive(self, prompt: int = 6, *, text: str = "", now: int = 0, **fields: Any) -> Request:
        self.arrived += 1
        sampling = fields.pop("sampling", None) or Sampling(max_tokens=fields.pop("max_tokens", 8))
        text = text or str(self.arrived)
        asked = GenerateAsked(
            request=b"r%d" % self.arrived, link=fields.pop("link", "l"), client=f"c{self.arrived}",
            prompt_tokens=prompt, prompt_digest=b"d", sampling=sampling, credit=fields.pop("credit", 100),
            block_hashes=tuple(f"{text}/{n}".encode() for n in range(prompt // SIZE)),
            deadline_ns=fields.pop("deadline_ns", 300 * S), whole=fields.pop("whole", False),
        )  # fmt: skip
        return self.requests.arrive(asked, self.arrived, now)

    def admit(self, now: int = 0) -> list[FetchAsked]:
        return self.requests.admit(now)

    def running(self, **fields: Any) -> Request:
        """A request whose prompt is computed here."""
        r = self.arrive(**fields)
        self.admit()
        assert r.state is State.RUNNING
        return r

    def fetching(self, **fields: Any) -> Request:
        r = self.arrive(**fields)
        self.admit()
        assert r.state is State.FETCHING
        return r

    def step(self, stop: bool = False) -> list[NodeEffect]:
        """One step, and what it sampled."""
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self.requests.preempted(sequence)
        progress = self.scheduler.end_step(self.scheduler.step)
        return [e for p in progress if p.sampled for e in self.requests.sampled(p.seq, stop, 0)]

    def first_token(self, r: Request, stop: bool = False) -> list[NodeEffect]:
        """The hand-off knows it, the shell takes it."""
        (taken,) = self.requests.first_token_known(r.request, b"t", 0)
        assert taken == TakeFirstToken(request=r.request, seq=r.seq, payload=b"t")
        return self.requests.first_token_taken(r.request, stop, 0)

    def fail(self, r: Request, attempt: int = 0) -> None:
        failed = AttemptFailed(request=r.request, attempt=attempt or r.attempts, cause="some", node=r.node)
        self.requests.attempt_failed(failed)

    def clean(self) -> bool:
        counts = self.pool.counts()
        self.pool.check()
        return counts.free + counts.cached == counts.total and not list(self.scheduler.sequences())


def ends(effects: list[NodeEffect]) -> list[tuple[str, str]]:
    return [(e.reason, e.code) for e in effects if isinstance(e, EndRequest)]


# ---------------------------------------------------------------- admission


def test_without_a_prefill_node_it_is_computed_here() -> None:
    node = Node()
    r = node.arrive(prompt=6)
    assert r.state is State.WAITING and node.admit() == []
    sequence = node.scheduler.get(r.seq)
    assert r.state is State.RUNNING and sequence is not None
    assert (sequence.computed, sequence.known, len(sequence.blocks)) == (0, 6, 2)


def test_a_prefill_node_is_asked_for_the_prompt() -> None:
    node = Node(16, "p")
    r = node.arrive(prompt=6, deadline_ns=10 * S, now=5)
    (asked,) = node.admit(now=7)
    assert asked == FetchAsked(
        request=r.request, attempt=1, node="p", incarnation=b"i", epoch=3, link="to p", source_size=8,
        prompt_tokens=6, have=0, prompt_digest=b"d", sampling=r.sampling, blocks=(0, 1), deadline_ns=10 * S + 5,
    )  # fmt: skip
    assert r.state is State.FETCHING and r.node == "p" and node.requests.fetching_from() == {"p": 1}


def test_the_waiting_are_served_by_age_and_nobody_overtakes() -> None:
    """A long prompt would else wait for as long as short ones keep coming."""
    node = Node(blocks=4)
    first = node.running(prompt=8)
    long, short = node.arrive(prompt=12), node.arrive(prompt=1)
    assert node.admit() == [] and [long.state, short.state] == [State.WAITING, State.WAITING]
    node.requests.end(first, "cancelled", 0)
    node.admit()
    assert [long.state, short.state] == [State.RUNNING, State.RUNNING]


def test_who_found_no_room_is_not_looked_at_again_before_the_pool_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt has thousands of blocks to look up, and a busy node hundreds of events a second."""
    node = Node(blocks=4)
    first = node.running(prompt=12)
    waiting = node.arrive(prompt=8)
    asked: list[int] = []
    reserve = node.pool.reserve
    monkeypatch.setattr(node.pool, "reserve", lambda *args: asked.append(args[0]) or reserve(*args))
    for _ in range(3):
        node.admit()
    assert asked == [8] and waiting.state is State.WAITING
    node.requests.end(first, "cancelled", 0)
    node.admit()
    assert asked == [8, 8] and waiting.state is State.RUNNING


def test_no_more_than_running_max_are_under_way() -> None:
    node = Node(16, "p", running_max=2)
    rs = [node.arrive(prompt=1) for _ in range(3)]
    assert len(node.admit()) == 2 and node.requests.waiting == 1
    node.requests.end(rs[0], "cancelled", 0)
    assert len(node.admit()) == 1


def test_what_is_here_already_is_not_fetched() -> None:
    node = Node(16)
    node.running(prompt=12, text="a")
    node.step()
    node.sources = ["p"]
    node.arrive(prompt=20, text="a")
    (asked,) = node.admit()
    assert asked.have == 12 and asked.blocks == (0, 1, 2, 3, 4)


def test_a_prompt_that_is_computed_whole_takes_nothing_from_the_cache_and_asks_nobody() -> None:
    """Log-probabilities of its tokens come of computing it, and do not cross from a prefill node."""
    node = Node(16)
    node.running(prompt=8, text="a")
    node.step()
    node.sources = ["p"]
    r = node.arrive(prompt=30, text="a", whole=True)
    assert node.admit() == [] and r.state is State.RUNNING and r.cached_tokens == 0 and r.attempts == 0
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and sequence.computed == 0


def test_what_comes_before_the_tokens_that_are_scored_may_be_read() -> None:
    """The position before the first of them is computed here, and none before that; the prefill node scores nothing."""
    node = Node(16, "p")
    sampling = Sampling(prompt_logprobs=2, prompt_logprobs_from=11)
    r = node.arrive(prompt=14, sampling=sampling)
    [asked] = node.admit()
    assert (asked.have, asked.sampling) == (0, Sampling())
    assert node.requests.first_token_known(r.request, b"t", 0) == []
    node.requests.fetched(r.request, 0)
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and (sequence.computed, sequence.known) == (10, 14)
    node.step()
    assert r.generated == 1


def test_of_the_cache_only_what_comes_before_the_tokens_that_are_scored_is_taken() -> None:
    """A block that others share must not be written again."""
    node = Node(16)
    node.running(prompt=16, text="a")
    node.step()
    node.sources = ["p"]
    r = node.arrive(prompt=16, text="a", sampling=Sampling(prompt_logprobs=0, prompt_logprobs_from=11))
    assert node.admit() == [] and r.state is State.RUNNING and r.cached_tokens == 8 and r.attempts == 0
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and sequence.computed == 8


def test_a_warm_prompt_stays_here() -> None:
    """What is left fits into one block: a step of that is sooner than any transfer."""
    node = Node(16)
    node.running(prompt=8, text="a")
    node.step()
    node.sources = ["p"]
    r = node.arrive(prompt=12, text="a")
    assert node.admit() == [] and r.state is State.RUNNING and r.cached_tokens == 8 and r.attempts == 0
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and sequence.computed == 8


# ---------------------------------------------------------------- fetching


def test_fetched_it_decodes_from_the_prompts_end() -> None:
    node = Node(16, "p")
    r = node.fetching(prompt=6)
    node.first_token(r)
    node.requests.fetched(r.request, 0)
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and (sequence.computed, sequence.known) == (6, 7)
    assert node.requests.fetching_from() == {} and r.node == "p"


def test_fetched_without_a_first_token_the_last_position_is_computed_again() -> None:
    """The prefill node skips sampling."""
    node = Node(16, "p")
    r = node.fetching(prompt=8)
    node.requests.fetched(r.request, 0)
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and (sequence.computed, sequence.known) == (7, 8)
    assert ends(node.step()) == [] and r.generated == 1


def test_after_a_failed_attempt_another_node_is_asked_with_other_blocks() -> None:
    """The old ones may still be written to by reads in flight."""
    node = Node(16, "p", "q")
    r = node.fetching(prompt=6)
    node.pool.hold(r.blocks, Holder.IN_FLIGHT)
    node.fail(r)
    assert r.state is State.WAITING and node.pool.counts().quarantined == 2
    (asked,) = node.admit()
    assert (asked.node, asked.attempt, asked.blocks) == ("q", 2, (2, 3)) and r.tried == ("p", "q")


def test_when_nobody_is_left_to_ask_it_is_computed_here() -> None:
    node = Node(16, "p")
    r = node.fetching()
    node.fail(r)
    assert node.admit() == [] and r.state is State.RUNNING and r.node == "" and r.attempts == 1


def test_a_retry_after_the_first_token_asks_with_the_prompts_blocks_alone() -> None:
    """The token makes the sequence longer than the prompt, here by a block; the hand-off pairs by the prompt."""
    node = Node(16, "p", "q")
    r = node.fetching(prompt=8)
    node.first_token(r)
    node.fail(r)
    (asked,) = node.admit()
    assert len(asked.blocks) == 2 and len(r.blocks) == 3
    node.requests.end(r, "cancelled", 0)
    assert node.clean()


def test_computed_here_after_the_first_token_that_token_is_kept() -> None:
    node = Node(16, "p")
    r = node.fetching(prompt=6)
    node.first_token(r)
    node.fail(r)
    node.admit()
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and (sequence.computed, sequence.known) == (0, 7)


def test_a_first_token_counts_before_the_shell_has_taken_it() -> None:
    """Its attempt may fail in the same breath, and be computed here from what is known."""
    node = Node(16, "p")
    r = node.fetching(prompt=6)
    node.requests.first_token_known(r.request, b"t", 0)
    node.fail(r)
    node.admit()
    sequence = node.scheduler.get(r.seq)
    assert sequence is not None and sequence.known == 7
    assert node.requests.first_token_taken(r.request, False, 0) == [] and r.generated == 1


@pytest.mark.parametrize("attempt", [1, 3])
def test_the_failure_of_another_attempt_changes_nothing(attempt: int) -> None:
    node = Node(16, "p", "q")
    r = node.fetching()
    node.fail(r)
    node.admit()
    node.fail(r, attempt)
    assert r.state is State.FETCHING and r.attempts == 2


def test_a_late_word_for_a_request_that_is_over_changes_nothing() -> None:
    node = Node(16, "p")
    r = node.fetching()
    node.requests.end(r, "cancelled", 0)
    node.fail(r, 1)
    assert node.requests.first_token_known(r.request, b"t", 0) == []
    assert node.requests.first_token_taken(r.request, True, 0) == []
    assert node.requests.sampled(r.seq, True, 0) == []
    node.requests.read_ended(r.request, 1, 10, 10, 0)
    node.requests.acknowledged(r.client, 5)
    assert node.clean()


# ---------------------------------------------------------------- the last token


def test_every_sampled_token_is_sent_and_the_last_ends_it() -> None:
    node = Node()
    r = node.running(max_tokens=2)
    assert node.step() == [EmitToken(request=r.request, seq=r.seq)]
    emit, end = node.step()
    assert isinstance(emit, EmitToken) and ends([end]) == [("length", "")]
    assert isinstance(end, EndRequest) and end.completion_tokens == 2 and node.clean()


def test_a_stop_ends_it_with_the_token_sent() -> None:
    node = Node()
    node.running()
    assert ends(node.step(stop=True)) == [("stop", "")]


def test_stop_counts_before_length() -> None:
    node = Node()
    node.running(max_tokens=1)
    assert ends(node.step(stop=True)) == [("stop", "")]


def test_the_context_ends_it() -> None:
    node = Node(max_model_len=7)
    node.running(prompt=6, max_tokens=8)
    assert ends(node.step()) == [("length", "")]


@pytest.mark.parametrize(("stop", "reason"), [(True, "stop"), (False, "length")])
def test_a_first_token_that_is_the_last_ends_it_while_fetching(stop: bool, reason: str) -> None:
    node = Node(16, "p")
    r = node.fetching(max_tokens=1)
    assert ends(node.first_token(r, stop)) == [(reason, "")]
    assert node.requests.fetching_from() == {} and node.clean()


# ---------------------------------------------------------------- credit, deadline


def test_a_client_that_does_not_read_ends_its_request() -> None:
    node = Node()
    node.running(credit=2)
    assert ends(node.step()) == ends(node.step()) == []
    assert ends(node.step()) == [("error", "slow_client")]


def test_what_the_client_has_read_is_no_longer_counted() -> None:
    node = Node()
    r = node.running(credit=2)
    node.step(), node.step()
    node.requests.acknowledged(r.client, 2)
    assert ends(node.step()) == ends(node.step()) == []
    assert ends(node.step()) == [("error", "slow_client")]


def test_credit_is_never_given_in_advance_nor_taken_back() -> None:
    node = Node()
    r = node.running(credit=1)
    node.step()
    node.requests.acknowledged(r.client, 1000)
    node.requests.acknowledged(r.client, 0)
    assert r.acknowledged == 1
    assert ends(node.step()) == [] and ends(node.step()) == [("error", "slow_client")]


def test_deadlines_come_due_in_order_once() -> None:
    node = Node(blocks=2)
    late, soon = node.arrive(deadline_ns=9), node.arrive(deadline_ns=5)
    gone = node.arrive(deadline_ns=4)
    node.requests.end(gone, "cancelled", 0)
    assert node.requests.next_deadline() == 5 and node.requests.overdue(4) is None
    assert node.requests.overdue(9) is soon and node.requests.overdue(9) is late
    assert node.requests.overdue(9) is None and node.requests.next_deadline() is None


# ---------------------------------------------------------------- preempted, worker lost


def test_the_preempted_waits_at_its_age_and_is_computed_again_here() -> None:
    """Its KV is gone, its tokens are not; and it asks no prefill node a second time."""
    node = Node(blocks=4)
    old, young, newer = node.running(prompt=7), node.running(prompt=7), node.arrive(prompt=8)
    for _ in range(3):
        node.step()
    assert [old.state, young.state, newer.state] == [State.RUNNING, State.WAITING, State.WAITING]
    node.sources = ["p"]
    node.requests.end(old, "cancelled", 0)
    node.pool.reset()
    assert node.admit() == [] and newer.state is State.WAITING
    sequence = node.scheduler.get(young.seq)
    assert sequence is not None and sequence.reset and sequence.known == 9
    assert young.generated == 2 and young.attempts == 0


def test_a_lost_worker_sends_the_running_back_in_order() -> None:
    node = Node()
    first, second = node.running(), node.running()
    node.step()
    node.pool.reset()
    assert node.requests.worker_lost([], 0) == []
    assert [first.state, second.state] == [State.WAITING, State.WAITING] and node.clean()
    node.admit()
    assert [s.seq for s in node.scheduler.sequences()] == [first.seq, second.seq]
    assert all(s.known == 7 and s.computed == 0 and s.reset for s in node.scheduler.sequences())


def test_what_is_being_fetched_survives_the_worker() -> None:
    node = Node(16, "p")
    r = node.fetching()
    node.requests.worker_lost([], 0)
    assert r.state is State.FETCHING and r.blocks


def test_a_request_in_the_step_of_two_lost_workers_is_ended() -> None:
    """It may be what ends them, and would end every worker to come."""
    node = Node()
    bad, good = node.running(), node.running()
    assert node.requests.worker_lost([bad.seq], 0) == []
    node.admit()
    assert node.requests.worker_lost([good.seq], 0) == []
    node.admit()
    (end,) = node.requests.worker_lost([bad.seq], 0)
    assert ends([end]) == [("error", "engine")] and isinstance(end, EndRequest) and end.request == bad.request
    assert good.state is State.WAITING


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("state", ["waiting", "fetching", "running"])
def test_an_end_leaves_nothing_whatever_the_state(state: str) -> None:
    node = Node(16, *(["p"] if state == "fetching" else []))
    r = node.arrive()
    if state != "waiting":
        node.admit()
    assert r.state == state
    (end,) = node.requests.end(r, "error", 9, code="some", problem="why", retry_after_ms=5)
    assert isinstance(end, EndRequest) and (end.reason, end.code, end.problem, end.retry_after_ms) == (
        "error", "some", "why", 5,
    )  # fmt: skip
    assert r.state is State.ENDED and len(node.requests) == node.requests.waiting == 0
    assert node.requests.get(r.request) is node.requests.of_client(r.client) is node.requests.of_seq(r.seq) is None
    assert node.requests.of_link("l") == [] and node.requests.next_deadline() is None
    assert node.clean()


def test_all_requests_of_a_link_are_known_by_it() -> None:
    node = Node()
    ours = [node.arrive(link="a"), node.arrive(link="a")]
    node.arrive(link="b")
    assert node.requests.of_link("a") == ours


def test_the_end_tells_where_the_time_went() -> None:
    node = Node(16, "p")
    r = node.arrive(prompt=6, max_tokens=2, now=10)
    node.admit(now=20)
    node.requests.read_posted(r.request, 30)
    node.requests.first_token_known(r.request, b"t", 40)
    node.requests.prefill_finished(r.request, 40)
    node.requests.read_ended(r.request, 1, size=64, transfer_ns=15, now=50)
    node.requests.claimed(r.request, 50)
    node.requests.fetched(r.request, 55)
    node.scheduler.plan(), node.scheduler.end_step(1)
    end = node.requests.sampled(r.seq, False, 70)[-1]
    assert isinstance(end, EndRequest)
    t = end.timeline
    assert (t.remote, t.prefill_node, t.attempts, t.queue_ns, t.prefill_ns, t.ttft_ns) == (True, "p", 1, 10, 20, 30)
    assert (t.read_ns, t.confirm_ns, t.handover_ns, t.itl_ns, t.total_ns) == (20, 5, 30, 30, 60)
    assert t.first_step_ns == 15
    assert (t.read_bytes, t.mover_ns) == (64, 15)


def test_a_failed_attempt_leaves_no_mark_on_the_next() -> None:
    """Its reads may end during the next one."""
    node = Node(16, "p", "q")
    r = node.arrive(now=1)
    node.admit(now=4)
    node.requests.read_posted(r.request, 5)
    node.fail(r)
    node.admit(now=9)
    node.requests.read_posted(r.request, 20)
    node.requests.read_ended(r.request, 1, size=99, transfer_ns=9, now=30)
    node.requests.read_ended(r.request, 2, size=64, transfer_ns=4, now=40)
    (end,) = node.requests.end(r, "cancelled", 50)
    assert isinstance(end, EndRequest)
    assert (end.timeline.read_ns, end.timeline.read_bytes, end.timeline.mover_ns) == (20, 64, 4)
    assert end.timeline.queue_ns == 3, "it has waited only until it was first admitted"
