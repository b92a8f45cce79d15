"""Any life of a scheduler over a pool that is too small: requests and prompts for others come, grow, share prefixes,
are preempted, cancelled, lose their worker. Requests are the real ones, the worker keeps tokens and tables as ipc says.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdbus.bus.messages import Sampling
from pdbus.connector.handoff import Holder
from pdbus.connector.pool import BlockPool, BlockState
from pdbus.nodes.decode import Requests
from pdbus.nodes.events import EmitToken, EndRequest, GenerateAsked, NodeEffect
from pdbus.nodes.scheduler import Limits, Scheduler, Sequence

from tests.model_worker import ModelWorker

SIZE = 2
BLOCKS = 6  # any one request fits, two long ones do not
TOKENS_MAX = SIZE * BLOCKS
DAY_NS = 86_400_000_000_000


def hashes(text: int, tokens: int) -> tuple[bytes, ...]:
    """Prompts of one text share their beginning."""
    return tuple(b"%d/%d" % (text, n) for n in range(tokens // SIZE))


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.scheduler = Scheduler(self.pool, Limits(max_batch_tokens=5, prefill_chunk=3))
        self.requests = Requests(
            self.pool, self.scheduler, max_model_len=TOKENS_MAX, running_max=4, choose=lambda r, cached, now: None
        )
        self.worker = ModelWorker(SIZE)
        self.sampled: list[int] = []  # in the step that is out
        self.written: list[int] = []  # blocks that it writes
        self.offers: dict[int, tuple[int, ...]] = {}  # prompts for others, and their blocks
        self.count = 0

    # ------------------------------------------------------------ what happens

    @rule(text=st.integers(1, 2), prompt=st.integers(1, TOKENS_MAX - 1), answer=st.integers(1, TOKENS_MAX))
    def a_request_comes(self, text: int, prompt: int, answer: int) -> None:
        self.count += 1
        asked = GenerateAsked(
            request=b"%d" % self.count,
            link="l",
            client=f"c{self.count}",
            prompt_tokens=prompt,
            prompt_digest=b"",
            block_hashes=hashes(text, prompt),
            sampling=Sampling(max_tokens=min(answer, TOKENS_MAX - prompt)),
            deadline_ns=DAY_NS,
            credit=100,
        )
        r = self.requests.arrive(asked, self.count, 0)
        self.worker.open(r.seq, prompt)
        assert self.requests.admit(0) == []

    @rule(text=st.integers(1, 2), prompt=st.integers(1, TOKENS_MAX))
    def a_prompt_for_another_node_comes(self, text: int, prompt: int) -> None:
        reserved = self.pool.reserve(prompt, hashes(text, prompt), Holder.ADVERTISED)
        if reserved is None:
            return
        self.count += 1
        seq = -self.count
        self.offers[seq] = reserved.blocks
        self.worker.open(seq, prompt)
        self.scheduler.add(
            Sequence(
                seq=seq, order=1000 + self.count, prompt_tokens=prompt, blocks=list(reserved.blocks),
                block_hashes=hashes(text, prompt), computed=reserved.cached_tokens, known=prompt, growing=False,
                sample_prompt=True,
            )
        )  # fmt: skip

    @precondition(lambda self: not self.scheduler.busy)
    @rule()
    def a_step_begins(self) -> None:
        self.requests.admit(0)
        oldest = min((s.order for s in self.scheduler.sequences() if s.growing), default=0)
        plan = self.scheduler.plan()
        assert all(s.growing and s.order != oldest for s in plan.preempted), "the oldest was preempted"
        for sequence in plan.preempted:
            self.requests.preempted(sequence)
        assert sum(row.count for row in plan.rows) <= 5 and all(1 <= row.count <= 3 for row in plan.rows)
        assert len({row.seq for row in plan.rows}) == len(plan.rows)
        self.sampled, self.written = self.worker.step(plan.rows), []
        for row in plan.rows:
            sequence = self.scheduler.get(row.seq)
            assert sequence is not None and self.worker.table(row.seq) == sequence.blocks
            self.written += sequence.blocks[row.start // SIZE : (row.start + row.count - 1) // SIZE + 1]

    @precondition(lambda self: self.scheduler.busy)
    @rule()
    def it_ends(self) -> None:
        for p in self.scheduler.end_step(self.scheduler.step):
            assert p.sampled == (p.seq in self.sampled)
            if p.seq in self.offers:
                if p.prompt_done:
                    self.scheduler.remove(p.seq)  # its blocks stay advertised until it has been read
            elif p.sampled:
                self._ended(self.requests.sampled(p.seq, False, 0))
        self.requests.admit(0)

    @precondition(lambda self: len(self.requests))
    @rule(data=st.data())
    def a_request_is_cancelled(self, data: Any) -> None:
        r = data.draw(st.sampled_from(self.requests.all()))
        self._ended(self.requests.end(r, "cancelled", 0))

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def a_lease_ends(self, data: Any) -> None:
        self._forget_offer(data.draw(st.sampled_from(list(self.offers))))

    @rule()
    def the_worker_is_lost(self) -> None:
        in_step = self.scheduler.abandon_step()
        for seq in list(self.offers):
            self._forget_offer(seq)
        self.pool.reset()
        self._ended(self.requests.worker_lost(in_step, 0))
        assert list(self.scheduler.sequences()) == []
        self.worker = ModelWorker(SIZE)
        for r in self.requests.all():
            self.worker.open(r.seq, r.prompt_tokens + r.generated)

    # ------------------------------------------------------------ what is always so

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check()

    @invariant()
    def a_block_is_shared_only_as_a_prefix(self) -> None:
        users: dict[int, tuple[int, bytes]] = {}
        for s in self.scheduler.sequences():
            for place, block in enumerate(s.blocks):
                use = (place, s.block_hashes[place]) if place < len(s.block_hashes) else (place, b"own %d" % s.seq)
                assert users.setdefault(block, use) == use, f"block {block} is in two sequences"

    @invariant()
    def nobody_is_given_what_a_step_writes(self) -> None:
        if self.scheduler.busy:
            assert all(self.pool.state(block) is BlockState.IN_USE for block in self.written)

    def teardown(self) -> None:
        """Left alone, all of it ends: nothing waits for ever, nothing goes round in circles."""
        left = sum(r.prompt_tokens + r.sampling.max_tokens for r in self.requests.all())
        steps_max = 20 + len(self.offers) * TOKENS_MAX + left * len(self.requests)
        for _ in range(steps_max):
            if not len(self.requests) and not self.offers and not self.scheduler.busy:
                break
            self.it_ends() if self.scheduler.busy else self.a_step_begins()
            if not self.scheduler.busy and self.offers:
                self._forget_offer(next(iter(self.offers)))  # some reader is done
        assert not len(self.requests) and not self.offers, f"not over after {steps_max} steps"
        self.pool.check()
        assert self.pool.available() == BLOCKS

    # ------------------------------------------------------------ helpers

    def _forget_offer(self, seq: int) -> None:
        self.scheduler.remove(seq)
        self.worker.close(seq)
        self.pool.drop(self.offers.pop(seq), Holder.ADVERTISED)

    def _ended(self, effects: list[NodeEffect]) -> None:
        for effect in effects:
            assert isinstance(effect, EmitToken | EndRequest)
            if isinstance(effect, EndRequest):
                self.worker.close(effect.seq)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=250, stateful_step_count=60, suppress_health_check=[HealthCheck.filter_too_much]
)
