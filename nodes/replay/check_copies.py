"""Invariants 2 and 4 where KV is staged: a copy between device and mirror has both sides of its blocks to itself, and
only confirmed KV goes up."""

from __future__ import annotations

from pdbus.connector.staging import Way

from .. import events as ev
from .blocks import Blocks, Read, describe
from .checks import Check, Report
from .turns import Turn

NOT_GIVEN = "2: no block that may still be written is given to anyone"
RIGHT_KV = "4: KV counts only when it is valid"


class CopyCheck(Check):
    def __init__(self, report: Report, blocks: Blocks) -> None:
        super().__init__(report)
        self.open: dict[int, ev.StartCopy] = {}
        self._blocks = blocks
        self.events = {ev.CopyEnded: self._ended, ev.WorkerLost: self._worker_lost}
        self.effects = {ev.StartCopy: self._start}

    def _start(self, turn: Turn, copy: ev.StartCopy) -> None:
        self.open[copy.copy] = copy
        for block in copy.blocks:
            if clash := self._clash(copy.way, block):
                self.report(turn, NOT_GIVEN, f"copy {copy.copy} {copy.way} is of block {block}, which {clash}")
            self._blocks.copying[block] = copy.copy
            stands = self._blocks.mirror.get(block)
            if copy.way is Way.UP and (stands is None or isinstance(stands, Read)):
                what = f"copy {copy.copy} brings block {block} up"
                self.report(turn, RIGHT_KV, f"{what}, but in its mirror is {describe(stands)}")

    def _clash(self, way: Way, block: int) -> str:
        blocks = self._blocks
        if block in blocks.copying:
            return f"copy {blocks.copying[block]} may still read or write"
        if block in blocks.writing:
            return "the step that runs writes"
        if block in blocks.reading:
            return f"read {blocks.reading[block]} may still write"
        if way is Way.DOWN and block in blocks.advertised:
            return "a held lease announces"
        return ""

    def _ended(self, turn: Turn, event: ev.CopyEnded) -> None:
        copy, blocks = self.open.pop(event.copy, None), self._blocks
        if copy is None:
            return
        down = copy.way is Way.DOWN
        source, target = (blocks.content, blocks.mirror) if down else (blocks.mirror, blocks.content)
        for block in copy.blocks:
            blocks.copying.pop(block, None)
            target[block] = source.get(block)

    def _worker_lost(self, turn: Turn, event: ev.WorkerLost) -> None:
        """With it the device's memory; what it was copying down is garbage."""
        for copy in self.open.values():
            for block in copy.blocks if copy.way is Way.DOWN else ():
                self._blocks.mirror[block] = None
        self.open.clear()
        self._blocks.copying.clear()
        if self._blocks.staged:
            self._blocks.content.clear()
