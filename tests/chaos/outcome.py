"""What became of each fault and of the requests around it: counted, printed as one table, kept as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from .plan import Fault

PROOF_S = 1.0  # for leases to end after proof of their reader's end, or after their time
HEALED_MAX_S = 8.0  # after a return
COUNTS = ("right", "cancelled", "failed", "unfair", "hung", "wrong", "leaked", "lost")
BAD = ("unfair", "hung", "wrong", "leaked", "lost", "late", "slow")


@dataclass(slots=True)
class Outcome:
    """Requests `right`; `cancelled` by their client, right as far as they went; `failed` with an error that the client
    heard, its own node having died; `unfair`: with an error though its node had not; `hung`; `wrong` tokens.
    `leaked`: blocks of a node that are neither free nor cached though nobody has a request. `lost`: processes of nodes
    that were not hurt (control, worker) and are gone."""

    fault: Fault
    victim: str = ""
    reached: bool = False  # the step; else the fault came when it came
    right: int = 0
    cancelled: int = 0
    failed: int = 0
    unfair: int = 0
    hung: int = 0
    wrong: int = 0
    leaked: int = 0
    lost: int = 0
    reclaimed_s: float | None = None  # from a reader's death to the end of its last lease
    reclaimed_late_s: float | None = (
        None  # beyond 1 s after proof of that death or after the lease's time; below 0: in time
    )
    started_s: float | None = None  # from the start of what had ended to the node's word that it is ready
    healed_s: float | None = None  # from that word, a thaw or a mended link to a prompt handed over there again
    problems: list[str] = field(default_factory=list)

    @property
    def late(self) -> int:
        return int((self.reclaimed_late_s or 0.0) > 0)

    @property
    def slow(self) -> int:
        return int((self.healed_s or 0.0) > HEALED_MAX_S)

    @property
    def good(self) -> bool:
        return not self.problems and not any(getattr(self, name) for name in BAD)

    @property
    def told(self) -> str:
        """What was not right."""
        told = list(self.problems)
        if self.late:
            told.append(f"a dead reader's leases ended {self.reclaimed_late_s:.1f} s late")
        if self.slow:
            told.append(f"handed over again only {self.healed_s:.1f} s after the return")
        return "; ".join(told) or "see the table"


@dataclass(slots=True)
class Report:
    """Of a whole run. `unverified`: what `pd-replay verify` found in recordings."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    verified: int = 0  # clusters whose recordings have been run again, all decisions the same, no invariant broken
    unverified: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.unverified and all(outcome.good for outcome in self.outcomes)

    @property
    def problems(self) -> list[str]:
        told = [
            f"fault {o.fault.number} (seed {o.fault.seed}): {o.fault.kind} of {o.victim or o.fault.role} at "
            f"{o.fault.step}: {o.told}"
            for o in self.outcomes
            if not o.good
        ]
        return told + self.unverified

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        said = {
            "seed": self.seed, "faults": len(self.outcomes), "verified": self.verified, "unverified": self.unverified,
            "outcomes": [{**dataclasses.asdict(o), "fault": o.fault._asdict()} for o in self.outcomes],
        }  # fmt: skip
        (folder / "chaos.json").write_text(json.dumps(said, indent=1) + "\n")
        with (folder / "chaos.txt").open("w") as file:
            self.print(Console(file=file, width=180))

    def print(self, console: Console) -> None:
        for by in ("kind", "step"):
            console.print(self._table(by))
        console.print(
            f"seed {self.seed}: {len(self.outcomes)} faults, {sum(o.reached for o in self.outcomes)} at their step; "
            f"recordings of {self.verified} clusters verified, {len(self.unverified)} not"
        )
        for problem in self.problems:
            console.print(problem, style="red", markup=False, highlight=False)

    def _table(self, by: str) -> Table:
        table = Table(box=None, header_style="dim", pad_edge=False)
        for column in (
            by,
            "role",
            "faults",
            "at step",
            *COUNTS,
            "reclaimed",
            "late",
            "start",
            "healed",
            "slowest",
            "slow",
        ):
            table.add_column(column, justify="left" if column in (by, "role") else "right")
        groups: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault((getattr(outcome.fault, by), outcome.fault.role), []).append(outcome)
        for (name, role), some in groups.items():
            table.add_row(name, role, *_cells(some))
        table.add_row("all", "", *_cells(self.outcomes), style="bold")
        return table


def _cells(some: Sequence[Outcome]) -> list[str]:
    """`late`: readers whose leases ended after they were due; `slow`: healings of more than 8 s."""
    counts = [str(sum(getattr(o, name) for o in some)) for name in COUNTS]
    reclaimed = [o.reclaimed_s for o in some if o.reclaimed_s is not None]
    started = [o.started_s for o in some if o.started_s is not None]
    healed = [o.healed_s for o in some if o.healed_s is not None]
    return [
        str(len(some)), str(sum(o.reached for o in some)), *counts,
        _seconds(reclaimed), str(sum(o.late for o in some)) if reclaimed else "",
        _seconds(started), _seconds(healed), f"{max(healed):.1f} s" if healed else "", str(sum(o.slow for o in some)),
    ]  # fmt: skip


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s" if values else ""
