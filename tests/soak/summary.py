"""What a soak has come to: one table for people, the same as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .sizes import Sample, leaks, series, settled, trend
from tests.chaos.outcome import Outcome

COUNTS = ("right", "cancelled", "failed", "unfair", "hung", "wrong", "leaked", "lost")
WIDTH = 140  # of what is no terminal
BAD = ("unfair", "hung", "wrong", "leaked", "lost")


@dataclass(slots=True)
class Summary:
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        return {name: sum(getattr(outcome, name) for outcome in self.outcomes) for name in COUNTS}

    @property
    def problems(self) -> list[str]:
        told = [
            f"turn {outcome.fault.number}, {outcome.fault.kind} of {outcome.victim}: {problem}"
            for outcome in self.outcomes
            for problem in outcome.problems
        ]
        return told + leaks(self.samples)

    @property
    def good(self) -> bool:
        return not self.problems and not any(self.counts[name] for name in BAD)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed, "good": self.good, "problems": self.problems, "restarts": len(self.outcomes),
            "requests": self.counts,
            "samples": [
                {**s._asdict(), "sizes": {name: size._asdict() for name, size in s.sizes.items()}} for s in self.samples
            ],
            "restart": [
                {"kind": o.fault.kind, "node": o.victim, "healed_s": o.healed_s, **{n: getattr(o, n) for n in COUNTS}}
                for o in self.outcomes
            ],
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "soak.json").write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        with (folder / "soak.txt").open("w") as file:
            self.print(Console(file=file, width=WIDTH))

    def print(self, console: Console) -> None:
        if self.samples:
            console.print(self._table())
            latency = trend([sample.latency_ms for sample in settled(self.samples)])
            console.print(
                f"a request when nobody else asks: {latency.first:.1f} ms in the first third of the time, "
                f"{latency.last:.1f} ms in the last"
            )
        said = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        minutes = self.samples[-1].at_s / 60 if self.samples else 0
        console.print(f"seed {self.seed}, {minutes:.1f} minutes, {len(self.outcomes)} restarts; requests: {said}")
        for problem in self.problems:
            console.print(problem, style="red", markup=False, highlight=False)

    def _table(self) -> Table:
        """Of the processes that nothing was done to, medians of the first and the last third of the time."""
        table = Table(box=None, header_style="dim", pad_edge=False)
        for column in ("process", "KiB", "then", "descriptors", "then", "threads", "then"):
            table.add_column(column, justify="left" if column == "process" else "right")
        for process in self.samples[-1].sizes:
            sizes = series(settled(self.samples), process)
            trends = [trend([getattr(s, what) for s in sizes]) for what in ("rss_kib", "descriptors", "threads")]
            table.add_row(process, *(f"{value:,.0f}" for t in trends for value in (t.first, t.last)))
        return table
