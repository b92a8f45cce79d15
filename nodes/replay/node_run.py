"""One node's file, from its first record to its last: run again, and checked as it goes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pdbus import __version__
from pdbus.bus.recording import Recording
from pdbus.connector.recording import CoreRaised
from pdbus.connector.timers import Timers
from pdbus.connector.vllm.core import PairCore
from pdbus.connector.vllm.recording import PairBegan

from .. import events as ev
from ..core import NodeCore
from ..report import ledger
from .blocks import Blocks
from .check_circuits import CircuitCheck
from .check_clock import ClockCheck
from .check_copies import CopyCheck
from .check_leases import LeaseCheck
from .check_messages import MessageCheck
from .check_offers import OfferCheck
from .check_prompts import PromptCheck
from .check_reads import ReadCheck
from .check_requests import RequestCheck
from .check_steps import StepCheck
from .check_wants import WantCheck
from .checks import Check, Checks, Report
from .facts import Facts
from .findings import Finding, Kind
from .rerun import Diverged, Rerun, recorded
from .runs import Run
from .turns import Began, Hole, RawTurn, Turn, Unreadable, began, effect_of, turns_of

NOTHING_LEFT = "nothing is left of a node that has drained"
WITHOUT_BEGINNING = (
    "a core runs again only from its beginning. Checked are the requests and leases that begin later, what was said, "
    "and the clock; blocks are not"
)
VIOLATIONS_MAX = 100  # of one node; the first says the most


class Drained(Check):
    """Notices that the node ended in good order."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.turn: Turn | None = None
        self.effects = {ev.Drained: self._drained}

    def _drained(self, turn: Turn, effect: ev.Drained) -> None:
        self.turn = turn


class Runner:
    """Runs one recording. What is found goes to `findings`."""

    def __init__(self, recording: Recording, findings: list[Finding]) -> None:
        header = recording.header
        self.run = Run(recording, Facts((header.node, header.incarnation)))
        self._recording = recording
        self._findings = findings
        self._violations = 0
        self._rerun: Rerun | None = None

    def all(self) -> Run:
        try:
            first, understood = began(self._recording)
        except Unreadable as e:
            self._find(Kind.NOTE, f"{e}; not checked")
            self.run.ended = "unknown"
            return self.run
        self._prepare(first, understood)
        last: RawTurn | None = None
        for raw in turns_of(self._recording):
            if isinstance(raw, Hole):
                self._hole(raw)
                break
            if last is not None:
                self._turn(last, cut=False)
            last = raw
        if last is not None:
            self._turn(last, cut=True)
            self._raised(last)
        self._end()
        return self.run

    # ------------------------------------------------------------ the beginning

    def _prepare(self, first: Began, understood: bool) -> None:
        run, report, whole = self.run, self._violation, not self._recording.gone
        run.version = first.version
        self._blocks = Blocks(first.core.block_size, first.core.handoff.staged)
        self._requests = RequestCheck(report, run.facts, whole=whole)
        self._leases = LeaseCheck(report, first, run.facts, whole=whole)
        self._reads = ReadCheck(report, self._blocks, run.facts)
        self._copies = CopyCheck(report, self._blocks)
        self._drained = Drained(report)
        self._wants = WantCheck(report, first.core.fetch_ns) if isinstance(first, PairBegan) and whole else None
        self._checks = Checks(self._checks_of(first, whole))
        waits: list[Timers[Any]] = [self._requests.deadlines, self._leases.timers]
        waits += [self._wants.deadlines] if self._wants is not None else []
        self._clock = ClockCheck(report, *waits)
        if not whole:
            self._find(Kind.NOTE, f"{_gone(self._recording)} not there: {WITHOUT_BEGINNING}")
        elif understood:
            self._rerun, run.again = Rerun(first), True
            self._clock.core = self._rerun.core
        else:
            text = f"pdbus {first.version} wrote settings that {__version__} does not know: not run again, only checked"
            self._find(Kind.NOTE, text)

    def _checks_of(self, first: Began, whole: bool) -> list[Check]:
        """Of blocks only where nothing of them is missing."""
        report, blocks = self._violation, self._blocks
        checks: list[Check] = [self._leases, MessageCheck(report, self.run.facts), self._drained]
        if isinstance(first, PairBegan):
            return [*checks, *([self._reads, PromptCheck(report), self._wants] if whole and self._wants else [])]
        checks += [self._requests, CircuitCheck(report)]
        of_blocks = [StepCheck(report, blocks), self._reads, OfferCheck(report, blocks), self._copies]
        return [*checks, *(of_blocks if whole else ())]

    # ------------------------------------------------------------ turns

    def _turn(self, raw: RawTurn, *, cut: bool) -> None:
        run = self.run
        run.records += 1 + len(raw.decided)
        run.inputs += 1
        turn = self._run_again(raw, cut)
        if turn is None:
            return
        whole = not cut or any(type(effect) is ev.Drained for effect in turn.effects)
        try:
            self._checks.turn(turn, whole=whole)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as e:
            if self._rerun is not None:
                raise
            self._find(Kind.NOTE, f"what is recorded makes no sense ({e}): not checked", turn.sequence, turn.now_ns)
        if whole:
            self._leases.every_turn(turn)
            self._clock.every_turn(turn)

    def _run_again(self, raw: RawTurn, cut: bool) -> Turn | None:
        """The turn as decided again, or as recorded when that is another or not possible; None: unreadable."""
        heard = raw.heard
        if self._rerun is not None:
            try:
                return self._rerun.turn(raw, cut=cut)
            except Diverged as e:
                self._diverged(str(e), e.sequence, heard.now_ns)
            except Unreadable as e:
                self._diverged(f"this input cannot be read: {e}", heard.sequence, heard.now_ns)
        try:
            return recorded(raw)
        except Unreadable:
            return None

    def _diverged(self, text: str, sequence: int, now_ns: int) -> None:
        if self.run.version != __version__:
            text += f" (recorded by pdbus {self.run.version}, run again by {__version__})"
        self._find(Kind.DIVERGENCE, text, sequence, now_ns)
        self._rerun, self.run.again = None, False
        self._clock.core = None

    def _raised(self, last: RawTurn) -> None:
        if last.decided and last.decided[-1].kind == CoreRaised.__name__:
            effect = effect_of(last.decided[-1])
            assert isinstance(effect, CoreRaised)
            text = f"the core raised {effect.problem}, which ended the node"
            self._find(Kind.VIOLATION, text, last.heard.sequence, last.heard.now_ns)

    def _hole(self, hole: Hole) -> None:
        kind = Kind.NOTE if hole.lost else Kind.DAMAGE
        self._find(kind, f"{hole.problem}; what comes after is not checked", hole.after)
        self.run.ended = f"followed to record {hole.after}"

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        run, recording = self.run, self._recording
        run.requests = self._wants.ended if self._wants is not None else self._requests.ended
        run.leases = self._ended_leases()
        if recording.damaged:
            self._find(Kind.DAMAGE, f"{recording.truncated}: not checked from there on")
        turn = self._drained.turn
        if turn is None or run.ended or recording.truncated:
            run.ended = run.ended or recording.truncated or "not shut down"
            return
        run.ended = "shut down"
        if not recording.gone:
            run.facts.clean = True
            self._nothing_left(turn)

    def _ended_leases(self) -> Counter[str]:
        return Counter(granted.cause or "held at the end" for granted in self.run.facts.leases.values())

    def _nothing_left(self, turn: Turn) -> None:
        """After a node has drained."""
        for request in self._requests.open:
            self._violation(turn, NOTHING_LEFT, f"request {request.hex()} has not ended")
        for key, held in self._leases.held.items():
            self._violation(turn, NOTHING_LEFT, f"lease {held.lease.generation} of request {key[1]} is held")
        for seq, s in self._blocks.sequences.items():
            if s.table:
                self._violation(turn, NOTHING_LEFT, f"sequence {seq} of {s.prompt.name} has blocks")
        at_once = isinstance(turn.event, ev.LeaveAsked | ev.Tick)  # nobody waits for reads then
        for read, found in self._reads.open.items():
            if not at_once:
                self._violation(turn, NOTHING_LEFT, f"read {read} of {found.attempt.name} is open")
        for copy in self._copies.open if not at_once else ():
            self._violation(turn, NOTHING_LEFT, f"copy {copy} goes on")
        if self._rerun is not None:
            self._core_is_empty(turn, self._rerun.core)

    def _core_is_empty(self, turn: Turn, core: NodeCore | PairCore) -> None:
        try:
            core.pool.check()
        except AssertionError as e:
            self._violation(turn, "1: a block is in exactly one state", f"the pool's books disagree: {e}")
        if isinstance(core, PairCore):  # vLLM may end in the middle of its requests
            return
        clean, table = ledger(core)
        if not clean and not core.scheduler.busy and not self._reads.open and not self._copies.open:
            self._violation(turn, NOTHING_LEFT, f"the ledger is not clean: {table}")

    # ------------------------------------------------------------ findings

    def _violation(self, turn: Turn, rule: str, text: str) -> None:
        self._violations += 1
        if self._violations <= VIOLATIONS_MAX:
            self._find(Kind.VIOLATION, text, turn.sequence, turn.now_ns, rule)

    def _find(self, kind: Kind, text: str, sequence: int = 0, at_ns: int = 0, rule: str = "") -> None:
        run = self.run
        self._findings.append(Finding(kind, text, run.facts.life, run.recording.path, sequence, at_ns, rule))


def _gone(recording: Recording) -> str:
    return f"parts 1 to {recording.gone} are" if recording.gone > 1 else "part 1 is"
