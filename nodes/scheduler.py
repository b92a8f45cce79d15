"""Which tokens are computed in the next step. Pure: it knows sequences as lengths and blocks, never as token ids.

Theory of operation. A sequence has `known` tokens (prompt, then sampled or forced ones) and `computed` tokens
whose KV stands in its blocks; what lies between is work. A step takes one token of every sequence that has just
one left (decode), then chunks of the others, oldest first, within one budget of tokens. The blocks a step writes
are held IN_STEP until it has ended, so that whoever lets go of them meanwhile cannot free them under it.

Growth takes one block at a time. When there is none, the youngest growing sequence gives up its blocks and is
computed again later; the oldest is never preempted, so it always ends, and so does everything behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter

from pdbus.bus.errors import LocalProtocolError
from pdbus.bus.wire import Declared, pack_u32
from pdbus.connector.handoff import Holder
from pdbus.connector.ipc import StepRow
from pdbus.connector.pool import BlockPool

BY_AGE = attrgetter("order")


class Limits(Declared):
    max_batch_tokens: int = 512  # tokens a step computes at most
    prefill_chunk: int = 256  # tokens of one prompt a step computes at most


@dataclass(slots=True)
class Sequence:
    """One prompt being prefilled or one answer being decoded. `order` is its age: lower is older."""

    seq: int
    order: int
    prompt_tokens: int
    blocks: list[int]
    block_hashes: tuple[bytes, ...]
    computed: int
    known: int
    growing: bool  # decodes, and so needs more blocks; a prefill for another node never does
    sample_prompt: bool  # sample after the prompt's last position
    sent_blocks: int = 0  # how much of `blocks` the worker's table has
    reset: bool = False  # the worker's table may be of blocks that were given up
    published: int = 0  # full prompt blocks offered to the prefix cache

    @property
    def remaining(self) -> int:
        return self.known - self.computed


class Progress(Declared):
    """What a step did for one sequence that is still there. `sampled`: so many more tokens are known."""

    seq: int
    computed: int
    prompt_done: bool
    sampled: int


@dataclass(slots=True)
class Plan:
    rows: list[StepRow] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Plans steps over the sequences it has been given. One step is out at a time."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self.changes = 0  # how often a sequence came or went
        self._sequences: dict[int, Sequence] = {}
        self._step = 0
        self._rows: dict[int, StepRow] = {}
        self._held: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    @property
    def step(self) -> int:
        """The number of the step that is out, or of the last one."""
        return self._step

    def sequences(self) -> Iterable[Sequence]:
        return self._sequences.values()

    def get(self, seq: int) -> Sequence | None:
        return self._sequences.get(seq)

    def in_step(self, seq: int) -> bool:
        return seq in self._rows

    def waiting_tokens(self, before: int | None = None) -> int:
        """Tokens of prompts still to be computed: the load that a new prompt would queue behind. `before`: only those
        of an age that comes before this one."""
        return sum(
            s.remaining
            for s in self._sequences.values()
            if s.computed < s.prompt_tokens and (before is None or s.order < before)
        )

    def work(self) -> tuple[int, bool]:
        """Of the step that is out: how many tokens of prompts it computes, and whether answers beside."""
        prompt_tokens, decodes = 0, False
        for row in self._rows.values():
            if row.count == 1 and row.sample:
                decodes = True
            else:
                prompt_tokens += row.count
        return prompt_tokens, decodes

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq] = sequence
        self.changes += 1

    def remove(self, seq: int) -> Sequence | None:
        """Forget a sequence. Its blocks stay with whoever holds them; those in the step stay held IN_STEP."""
        self.changes += 1
        return self._sequences.pop(seq, None)

    def plan(self) -> Plan:
        """The next step, or an empty plan. Must not be called while a step is out."""
        plan = Plan()
        if not self._sequences:
            return plan
        budget, chunk, size = self._limits.max_batch_tokens, self._limits.prefill_chunk, self._pool.block_size
        for s in self._in_turn():
            if budget <= 0:
                break
            if plan.preempted and s.seq not in self._sequences:  # by this very step
                continue
            count = min(s.known - s.computed, chunk, budget)
            if s.computed + count <= len(s.blocks) * size or self._ensure_blocks(s, s.computed + count, plan):
                plan.rows.append(self._row(s, count))
                budget -= count
        if plan.preempted:
            plan.rows = [r for r in plan.rows if r.seq in self._sequences]
        if plan.rows:
            self._begin(plan.rows)
        return plan

    def end_step(
        self, step: int, failed: Collection[int] = (), sampled: Mapping[int, int] | None = None
    ) -> list[Progress]:
        """The step is over: what it computed counts for the sequences that are still there. Nothing of the `failed`
        ones is shared from now on. `sampled`: how many tokens a row sampled, by sequence, where it was not one.
        Raises LocalProtocolError, and changes nothing, for more than the row's last block holds."""
        if step != self._step or not self._rows:
            return []
        sampled = sampled or {}
        self._check_sampled(sampled)
        rows, self._rows = self._rows, {}
        self._pool.drop(self._held, Holder.IN_STEP)
        self._held = []
        for seq in failed:
            if seq in self._sequences:
                self._sequences[seq].block_hashes = ()
        return [
            self._advance(self._sequences[seq], row, sampled.get(seq, 1))
            for seq, row in rows.items()
            if seq in self._sequences
        ]

    def _check_sampled(self, sampled: Mapping[int, int]) -> None:
        """All but the last sampled token were computed, too, in the blocks that are held for the step."""
        for seq, tokens in sampled.items():
            row = self._rows.get(seq)
            room = -(row.start + row.count) % self._pool.block_size if row is not None and row.sample else 0
            if not 1 <= tokens <= 1 + room:
                raise LocalProtocolError(f"sequence {seq}: {tokens} tokens of a step that holds blocks for {1 + room}")

    def abandon_step(self) -> list[int]:
        """The worker is gone and wrote its last: nothing of the step counts. Returns whose step it was."""
        abandoned, self._rows = list(self._rows), {}
        self._pool.drop(self._held, Holder.IN_STEP)
        self._held = []
        return abandoned

    def _in_turn(self) -> list[Sequence]:
        """Those with work, in the order of their claim to a step: who decodes, then who has more to compute; the
        oldest first."""
        decoding, prefilling = [], []
        for s in sorted(self._sequences.values(), key=BY_AGE):
            remaining = s.known - s.computed
            if remaining == 1:
                decoding.append(s)
            elif remaining > 1:
                prefilling.append(s)
        return decoding + prefilling

    def _begin(self, rows: Seq[StepRow]) -> None:
        self._step += 1
        self._rows = {r.seq: r for r in rows}
        size = self._pool.block_size
        for r in rows:
            blocks = self._sequences[r.seq].blocks
            self._held += blocks[r.start // size : (r.start + r.count - 1) // size + 1]
        self._pool.hold(self._held, Holder.IN_STEP)

    def _row(self, s: Sequence, count: int) -> StepRow:
        ends, new = s.computed + count == s.known, s.blocks[s.sent_blocks :]
        row = StepRow(
            seq=s.seq,
            start=s.computed,
            count=count,
            new_blocks=pack_u32(new) if new else b"",
            reset=s.reset,
            sample=ends and (s.sample_prompt or s.known > s.prompt_tokens),
        )
        s.sent_blocks, s.reset = len(s.blocks), False
        return row

    def _advance(self, s: Sequence, row: StepRow, tokens: int) -> Progress:
        sampled = tokens if row.sample else 0
        s.computed += row.count + (sampled - 1 if sampled else 0)
        s.known += sampled
        if s.published < len(s.block_hashes):
            self._publish(s)
        return Progress(seq=s.seq, computed=s.computed, prompt_done=s.computed >= s.prompt_tokens, sampled=sampled)

    def _publish(self, s: Sequence) -> None:
        """Offer what is full of the prompt to the prefix cache."""
        full = min(s.computed // self._pool.block_size, len(s.block_hashes))
        for i in range(s.published, full):
            self._pool.publish(s.blocks[i], s.block_hashes[i], s.block_hashes[i - 1] if i else b"")
        s.published = max(s.published, full)

    def _ensure_blocks(self, s: Sequence, tokens: int, plan: Plan) -> bool:
        size = self._pool.block_size
        while len(s.blocks) * size < tokens:
            taken = self._pool.take(1, Holder.HELD)
            if taken is not None:
                s.blocks += taken
            elif not self._preempt_one_younger(s, plan):
                return False
        return True

    def _preempt_one_younger(self, than: Sequence, plan: Plan) -> bool:
        younger = [s for s in self._sequences.values() if s.growing and s.order > than.order and s.blocks]
        if not younger:
            return False
        victim = max(younger, key=lambda s: s.order)
        del self._sequences[victim.seq]
        self._pool.drop(victim.blocks, Holder.HELD)
        plan.preempted.append(victim)
        return True
