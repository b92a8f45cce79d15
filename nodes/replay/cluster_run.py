"""All nodes' recordings together: what one says is confirmed or denied by the others, and what cannot be is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import Part
from pdbus.connector.handoff import Cause

from .check_leases import key_of
from .client_run import RULE as CLIENT_LEARNS
from .client_run import ClientRunner, is_client
from .facts import Answered, Confirmed, Facts, Life
from .files import opened
from .findings import Finding, Kind
from .node_run import Runner
from .runs import Run

BY_CLAIM = "R1: valid only by claim"
WAS_SAID = "nobody hears what was not said"


class ClusterRun:
    """Everything that a verification has found. Findings are in the order of the files, then of the records."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ConfigError when none of the paths is or holds a recording."""
        files = opened(paths)
        self.findings = [Finding(Kind.NOTE, str(problem)) for problem in files.problems]
        self.findings += [_left_out(part, known) for part, known in files.doubled]
        self.unreadable = bool(files.problems)  # a path that is or holds no recording
        self.runs = [self._run(recording) for recording in files.recordings]
        self._lives = {run.facts.life: run for run in self.runs}
        self._unconfirmed: Counter[Life] = Counter()
        self._unanswered: Counter[Life] = Counter()
        for run in self.runs:
            self._check_confirmed(run)
            self._check_heard(run)
            self._check_answered(run)
        self._tell_missing()
        self._tell_strangers()

    def _run(self, recording: Recording) -> Run:
        runner = ClientRunner if is_client(recording) else Runner
        return runner(recording, self.findings).all()

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.kind is not Kind.NOTE]

    @property
    def notes(self) -> list[Finding]:
        return [f for f in self.findings if f.kind is Kind.NOTE]

    # ------------------------------------------------------------ what others say

    def _check_confirmed(self, run: Run) -> None:
        for confirmed in run.facts.confirmed:
            owner = self._lives.get((confirmed.lease.node, confirmed.lease.incarnation))
            if owner is None:
                self._unconfirmed[confirmed.lease.node, confirmed.lease.incarnation] += 1
            elif problem := _denied(confirmed, owner.facts):
                where = confirmed.sequence, confirmed.now_ns
                name = f"lease {confirmed.lease.generation} of {confirmed.lease.node}"
                text = f"KV under {name} was taken as valid, but {problem}"
                self.findings.append(
                    Finding(Kind.VIOLATION, text, run.facts.life, run.recording.path, *where, BY_CLAIM)
                )

    def _check_heard(self, run: Run) -> None:
        for life, heard in run.facts.heard.items():
            sender = self._lives.get(life)
            if sender is None:
                continue
            unsaid = [sequence for name, sequence in heard.items() if name not in sender.facts.sent]
            if not unsaid:
                continue
            where = run.facts.life, run.recording.path, min(unsaid)
            what = f"{len(unsaid)} messages came from {life[0]} that its recording does not hold"
            if sender.facts.clean:
                self.findings.append(Finding(Kind.VIOLATION, what, *where, rule=WAS_SAID))
            else:
                why = "it begins later" if sender.recording.gone else "it ends before"
                self.findings.append(Finding(Kind.NOTE, f"{what}: {why}", *where))

    def _check_answered(self, run: Run) -> None:
        for request, answered in run.facts.answered.items():
            node = self._lives.get(answered.by)
            if node is None:
                self._unanswered[answered.by] += 1
            elif problem := _otherwise(request, answered, node.facts):
                text = f"the client was told that request {request.hex()} {_told(answered)}, but {problem}"
                where = run.facts.life, run.recording.path, answered.sequence, answered.now_ns
                self.findings.append(Finding(Kind.VIOLATION, text, *where, CLIENT_LEARNS))

    # ------------------------------------------------------------ what cannot be checked

    def _tell_missing(self) -> None:
        met = [life for run in self.runs for life in (*run.facts.heard, *run.facts.met)]
        for life in dict.fromkeys(life for life in met if life not in self._lives):
            counts = {"hand-offs": self._unconfirmed[life], "answers": self._unanswered[life]}
            unseen = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
            side = f"; its side of {unseen} was not checked" if unseen else ""
            self.findings.append(Finding(Kind.NOTE, f"{title(life)} is not among the recordings{side}"))

    def _tell_strangers(self) -> None:
        """Recordings of nodes that never spoke to each other are no one cluster's."""
        groups = self._groups()
        if len(groups) > 1:
            names = "; ".join(", ".join(life[0] for life in group) for group in groups)
            text = f"these are recordings of {len(groups)} clusters that know nothing of each other: {names}"
            self.findings.append(Finding(Kind.NOTE, text))

    def _groups(self) -> list[list[Life]]:
        groups: list[list[Life]] = []
        for life, run in self._lives.items():
            near = {life, *run.facts.heard, *run.facts.met}
            joined = [g for g in groups if any(other in near or self._has_met(other, life) for other in g)]
            groups = [g for g in groups if g not in joined]
            groups.append([*(member for g in joined for member in g), life])
        return groups

    def _has_met(self, one: Life, other: Life) -> bool:
        facts = self._lives[one].facts
        return other in facts.heard or other in facts.met


def title(life: Life) -> str:
    """A life in words."""
    return f"{life[0]} ({life[1].hex()[:12]})"


def _denied(confirmed: Confirmed, owner: Facts) -> str:
    """How the lease's own node denies it; '' when it does not."""
    granted = owner.leases.get(confirmed.lease.generation)
    if granted is None:
        return f"{owner.life[0]} never granted it" if owner.clean else ""
    if granted.try_ != key_of(confirmed.try_):
        return f"{owner.life[0]} granted it to another try"
    if granted.cause == Cause.DONE or (not granted.cause and not owner.clean):
        return ""
    return f"it ended as {granted.cause!r} there" if granted.cause else "it was never released there"


def _otherwise(request: bytes, answered: Answered, node: Facts) -> str:
    """How the node's recording tells it otherwise; '' when it does not. What ended before it reached the core, and what
    a node that failed said at its end, is in no recording."""
    ended = node.ended.get(request)
    if ended is None:
        known = answered.reason in ("stop", "length") and node.clean
        return f"{node.life[0]} did not end it" if known else ""
    if (ended.reason, ended.tokens) == (answered.reason, answered.tokens):
        return ""
    return f"{node.life[0]} ended it as {ended.reason!r} after {ended.tokens} tokens"


def _told(answered: Answered) -> str:
    return f"ended as {answered.reason!r} after {answered.tokens} tokens"


def _left_out(part: Part, known: Part) -> Finding:
    life = part.header.node, part.header.incarnation
    return Finding(Kind.NOTE, f"records the same part of the same life as {known.path}: left out", life, part.path)
