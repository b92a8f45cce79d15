"""A list of moves as what its nodes would have recorded, so that `pd-replay verify` and `show` open it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ... import events as ev
from ...recording import NodeRecorder
from .cluster import Cluster, Effect, Move
from .search import Violation
from .shell import Shell
from .things import Outputs, Turn


class Recorded(Cluster):
    """The cluster of `other`, on one path only: nothing is remembered, every turn of a core is recorded."""

    def __init__(self, other: Cluster, folder: Path) -> None:
        super().__init__(other.scenario)
        self._packets, self._reads, self._leases = other._packets, other._reads, other._leases
        self._whats, self._deliver = other._whats, other._deliver  # so that a move means the same here
        self._folder = folder
        self._recorders: dict[tuple[str, int], NodeRecorder] = {}

    def play(self, moves: Sequence[Move]) -> None:
        """Up to the violation that the last move is."""
        try:
            with suppress(Violation):
                state = self.initial()
                for move in moves:
                    state = self.apply(state, move)
        finally:
            for recorder in self._recorders.values():
                recorder.close()

    def _new(self, name: str, life: int) -> Shell:
        shell = super()._new(name, life)
        shell.log = []
        return shell

    def _effect(self, node: int, what: int) -> Effect:
        return self._run(node, what)

    def _do(self, shell: Shell, what: int) -> Outputs:
        try:
            return super()._do(shell, what)
        finally:
            self._write(shell)

    def _is_inert(self, item: int, node: int) -> bool:
        return False  # to look would be to record it

    def _key(self, shell: Shell) -> object:
        """Every state of a node is one of its own, for its clock may be another."""
        self._write(shell)
        return object()

    def _write(self, shell: Shell) -> None:
        key = shell.name, shell.life
        recorder = self._recorders.get(key)
        if recorder is None:
            core, membership = shell.core_config(), shell.membership_config()
            recorder = self._recorders[key] = NodeRecorder(self._folder, core, membership)
        for turn in shell.log or ():
            with suppress(Exception):  # which is recorded, too
                recorder.turn(_Says(turn), turn.event, turn.now)  # type: ignore[arg-type]
        shell.log = []


class _Says:
    """A core as it spoke in one turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def handle(self, event: ev.NodeEvent, now: int) -> list[ev.NodeEffect]:
        if self._turn.raised is not None:
            raise self._turn.raised
        return self._turn.effects
