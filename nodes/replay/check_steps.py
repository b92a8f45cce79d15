"""Invariants 1, 2 and 4 where KV is computed: a step writes only blocks that are its sequences' own, computes only on
blocks that hold the right KV, and only such are offered to the prefix cache."""

from __future__ import annotations

from typing import Any

from pdbus.bus.wire import unpack_u32
from pdbus.connector.ipc import StepRow

from .. import events as ev
from .blocks import Blocks, Content, Own, Prompt, Sequence, describe
from .checks import Check, Report
from .turns import Turn

NOT_GIVEN = "2: no block that may still be written is given to anyone"
RIGHT_KV = "4: KV counts only when it is valid"


class StepCheck(Check):
    def __init__(self, report: Report, blocks: Blocks) -> None:
        super().__init__(report)
        self._blocks = blocks
        self._prompts: dict[bytes, Prompt] = {}  # of requests that have not ended
        self._out: ev.RunStep | None = None
        self.events = {
            ev.GenerateAsked: self._asked,
            ev.StepEnded: self._step_ended,
            ev.WorkerLost: self._worker_lost,
        }
        self.effects = {
            ev.OpenSequence: self._open,
            ev.CloseSequence: self._closes,
            ev.EndRequest: self._ends,
            ev.RunStep: self._run_step,
        }

    # ------------------------------------------------------------ sequences

    def _asked(self, turn: Turn, event: ev.GenerateAsked) -> None:
        name = f"request {event.request.hex()}"
        self._prompts[event.request] = Prompt(name, event.prompt_tokens, event.block_hashes, event.request)

    def _open(self, turn: Turn, effect: ev.OpenSequence) -> None:
        """Again for every one when a worker comes; none has blocks then."""
        prompt = self._prompts.get(effect.request)
        if effect.try_ is not None:
            event: Any = turn.event
            name = f"request {effect.try_.request.hex()} attempt {effect.try_.attempt} of {effect.try_.node}"
            prompt = Prompt(name, event.message.prompt_tokens, event.block_hashes)
        if prompt is None:
            self.report(turn, "7", f"sequence {effect.seq} opens for request {effect.request.hex()}, which is over")
            return
        self._close(effect.seq)
        self._blocks.sequences[effect.seq] = Sequence(prompt)

    def _closes(self, turn: Turn, effect: ev.CloseSequence) -> None:
        self._close(effect.seq)

    def _ends(self, turn: Turn, effect: ev.EndRequest) -> None:
        self._prompts.pop(effect.request, None)
        self._close(effect.seq)

    def _close(self, seq: int) -> None:
        s = self._blocks.sequences.pop(seq, None)
        if s is not None:
            self._blocks.detach(seq, s)

    # ------------------------------------------------------------ a step begins

    def _run_step(self, turn: Turn, effect: ev.RunStep) -> None:
        if self._out is not None:
            self.report(turn, NOT_GIVEN, f"step {effect.step} begins while step {self._out.step} runs")
        self._out = effect
        self._blocks.writing.clear()
        for row in effect.rows:
            s = self._blocks.sequences.get(row.seq)
            if s is None:
                self.report(turn, NOT_GIVEN, f"step {effect.step} computes sequence {row.seq}, which is not open")
                continue
            if row.new_blocks or row.reset or s.lost:
                self._give_blocks(turn, row, s)
            self._write(turn, row, s)

    def _give_blocks(self, turn: Turn, row: StepRow, s: Sequence) -> None:
        """The table as the worker knows it from now on; what the row computes upon must be right."""
        blocks = self._blocks
        if row.reset:
            blocks.detach(row.seq, s)
            s.lost = ""
        if s.lost:
            self.report(turn, NOT_GIVEN, f"{s.prompt.name} goes on with a block that {s.lost}")
            s.lost = ""
        if not row.new_blocks:
            return
        first, new = len(s.table), list(unpack_u32(row.new_blocks))
        for index, block in enumerate(new, first):
            if block in blocks.reading:
                read = blocks.reading[block]
                self.report(turn, NOT_GIVEN, f"{s.prompt.name} is given block {block}, which read {read} may write")
            if index * blocks.size < row.start:
                self._rely(turn, s, index, block)
        blocks.attach(row.seq, s, new)

    def _rely(self, turn: Turn, s: Sequence, index: int, block: int) -> None:
        stands = self._blocks.content.get(block)
        if stands != s.prompt.right(index, self._blocks.size):
            what = f"{s.prompt.name} computes on block {block} as block {index} of its prompt"
            self.report(turn, RIGHT_KV, f"{what}, but there is {describe(stands)}")

    def _write(self, turn: Turn, row: StepRow, s: Sequence) -> None:
        blocks = self._blocks
        first, last = row.start // blocks.size, (row.start + row.count - 1) // blocks.size
        if last >= len(s.table):
            self.report(turn, NOT_GIVEN, f"{s.prompt.name} computes position {row.start + row.count - 1} into no block")
            return
        for block in s.table[first : last + 1]:
            if len(blocks.users[block]) > 1:
                blocks.taken(block, row.seq, f"step {self._step()} writes for {s.prompt.name}")
            if block in blocks.reading and not row.new_blocks:
                read = blocks.reading[block]
                self.report(turn, NOT_GIVEN, f"{s.prompt.name} writes block {block}, which read {read} may write")
            if block in blocks.advertised:
                self.report(turn, NOT_GIVEN, f"{s.prompt.name} writes block {block}, which a held lease announces")
            if block in blocks.copying:
                copy = blocks.copying[block]
                self.report(turn, NOT_GIVEN, f"{s.prompt.name} writes block {block}, which copy {copy} reads or writes")
            blocks.writing[block] = row.seq
            blocks.mirror[block] = None
            blocks.content[block] = Own(row.seq)

    def _step(self) -> int:
        return self._out.step if self._out else 0

    # ------------------------------------------------------------ a step ends

    def _step_ended(self, turn: Turn, event: ev.StepEnded) -> None:
        out = self._out
        if out is None or event.step != out.step:
            return
        self._out = None
        self._blocks.writing.clear()
        failed = [row.seq for row in event.rows if row.problem]
        for row in out.rows:
            s = self._blocks.sequences.get(row.seq)
            if s is not None:
                self._filled(row, s, row.seq in failed)
        self._published(turn)

    def _filled(self, row: StepRow, s: Sequence, failed: bool) -> None:
        if row.start >= s.prompt.tokens:  # an answer's blocks are nobody's prompt
            return
        blocks, size = self._blocks, self._blocks.size
        end = min(row.start + row.count, s.prompt.tokens)
        for index in range(row.start // size, end // size):
            if blocks.content.get(s.table[index]) == Own(row.seq):
                blocks.content[s.table[index]] = None if failed else s.prompt.hashes[index]

    def _worker_lost(self, turn: Turn, event: ev.WorkerLost) -> None:
        """What it was writing is garbage. The rest lies in memory that outlives it, though no sequence goes on."""
        blocks = self._blocks
        self._out = None
        for block in blocks.writing:
            blocks.content[block] = None
        blocks.writing.clear()
        for seq, s in blocks.sequences.items():
            blocks.detach(seq, s)
            s.lost = ""

    # ------------------------------------------------------------ the prefix cache

    def _published(self, turn: Turn) -> None:
        """What the step's end made shareable. It is told at the end of the turn, after the next step has begun, which
        may have evicted it already."""
        for effect in turn.effects:
            if isinstance(effect, ev.Publish) and effect.topic == "kv":
                events: Any = effect.data["events"]
                for event in events:
                    if event["t"] == "BlockStored":
                        self._stored(turn, event["block"], event["block_hash"])

    def _stored(self, turn: Turn, block: int, block_hash: bytes) -> None:
        stands: Content = self._blocks.content.get(block)
        if stands != block_hash:
            wrong = f"block {block} is offered as prompt block {block_hash.hex()[:12]}, but there is {describe(stands)}"
            self.report(turn, RIGHT_KV, wrong)
