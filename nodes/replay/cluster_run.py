"""All nodes' recordings together: what one says is confirmed or denied by the others, and what cannot be is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdbus.bus.errors import ConfigError
from pdbus.bus.recorder import Recording, read
from pdbus.connector.handoff import Cause

from .check_leases import key_of
from .facts import Confirmed, Facts, Life
from .files import files_of
from .findings import Finding, Kind
from .node_run import NodeRun, Runner

BY_CLAIM = "R1: valid only by claim"
WAS_SAID = "nobody hears what was not said"


class ClusterRun:
    """Everything that a verification has found. Findings are in the order of the files, then of the records."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ConfigError when none of the paths is or holds a recording."""
        self.runs: list[NodeRun] = []
        self.findings: list[Finding] = []
        self.unreadable = False  # a path that is or holds no recording
        for recording in self._open(paths):
            self.runs.append(Runner(recording, self.findings).all())
        self._lives = {run.facts.life: run for run in self.runs}
        self._unconfirmed: Counter[Life] = Counter()
        for run in self.runs:
            self._check_confirmed(run)
            self._check_heard(run)
        self._tell_missing()
        self._tell_strangers()

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.kind is not Kind.NOTE]

    @property
    def notes(self) -> list[Finding]:
        return [f for f in self.findings if f.kind is Kind.NOTE]

    # ------------------------------------------------------------ files

    def _open(self, paths: Sequence[Path]) -> list[Recording]:
        recordings: dict[Life, Recording] = {}
        problems: list[ConfigError] = []
        for path in paths:
            try:
                files = files_of(path)
            except ConfigError as e:
                problems.append(e)
                continue
            for file in files:
                try:
                    self._add(recordings, read(file))
                except ConfigError as e:
                    problems.append(e)
        if not recordings:
            raise problems[0]
        for problem in problems:
            self.unreadable = True
            self.findings.append(Finding(Kind.NOTE, str(problem)))
        return list(recordings.values())

    def _add(self, recordings: dict[Life, Recording], recording: Recording) -> None:
        life = recording.header.node, recording.header.incarnation
        if life in recordings:
            text = f"records the same life as {recordings[life].path}: left out"
            self.findings.append(Finding(Kind.NOTE, text, life, recording.path))
        else:
            recordings[life] = recording

    # ------------------------------------------------------------ what others say

    def _check_confirmed(self, run: NodeRun) -> None:
        for confirmed in run.facts.confirmed:
            owner = self._lives.get((confirmed.lease.node, confirmed.lease.incarnation))
            if owner is None:
                self._unconfirmed[confirmed.lease.node, confirmed.lease.incarnation] += 1
            elif problem := _denied(confirmed, owner.facts):
                where = confirmed.sequence, confirmed.now_ns
                name = f"lease {confirmed.lease.generation} of {confirmed.lease.node}"
                text = f"KV under {name} was taken as valid, but {problem}"
                self.findings.append(Finding(Kind.VIOLATION, text, run.facts.life, run.path, *where, BY_CLAIM))

    def _check_heard(self, run: NodeRun) -> None:
        for life, heard in run.facts.heard.items():
            sender = self._lives.get(life)
            if sender is None:
                continue
            unsaid = [sequence for name, sequence in heard.items() if name not in sender.facts.sent]
            if not unsaid:
                continue
            where = run.facts.life, run.path, min(unsaid)
            what = f"{len(unsaid)} messages came from {life[0]} that its recording does not hold"
            if sender.facts.clean:
                self.findings.append(Finding(Kind.VIOLATION, what, *where, rule=WAS_SAID))
            else:
                self.findings.append(Finding(Kind.NOTE, f"{what}: it ends before", *where))

    # ------------------------------------------------------------ what cannot be checked

    def _tell_missing(self) -> None:
        missing = dict.fromkeys(life for run in self.runs for life in run.facts.heard if life not in self._lives)
        for life in missing:
            count = self._unconfirmed[life]
            side = f"; its side of {count} hand-offs was not checked" if count else ""
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
            near = {life, *run.facts.heard}
            joined = [g for g in groups if any(other in near or life in self._lives[other].facts.heard for other in g)]
            groups = [g for g in groups if g not in joined]
            groups.append([*(member for g in joined for member in g), life])
        return groups


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
