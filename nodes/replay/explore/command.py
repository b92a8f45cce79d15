"""`pd-replay explore`: go through a scenario, say how much of it there is, and keep a violation as a recording."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from pdbus.bus.errors import ConfigError

from ...tables import output
from ...tables import table as rows_table
from .cluster import Cluster, Move
from .record import Recorded
from .scenario import FAULTS, Scenario
from .search import Explored, Found, explore, shortened, told, walk

EXIT_FOUND = 1
MOVES_MAX = 600  # of a random run


class Extent(NamedTuple):
    """How much of it. `runs`: so many random runs, from this seed on, instead of every state; 0: every state."""

    states_max: int
    runs: int = 0
    seed: int = 1


def run_explore(scenario: Scenario, extent: Extent, folder: Path) -> int:
    """Prints what was explored; 1 when a violation was found, which is then in `folder`. Raises ConfigError
    (`--record`) when that folder holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--record", f"{folder} is there already, and not empty; give another folder")
    console, cluster = output(), Cluster(scenario)
    console.print(escape(in_words(scenario, extent)))
    found = _random(cluster, extent, console) if extent.runs else _every(cluster, extent, console)
    if found is None:
        return 0
    problem, *moves = told(cluster, found).splitlines()
    console.print(f"[red]violation[/]: {escape(problem)}", soft_wrap=True)
    for move in moves:
        console.print(escape(move), highlight=False, soft_wrap=True)
    Recorded(cluster, folder).play(found.moves)
    console.print(f"saved in {folder}: `pd-replay verify {folder}` and `show` open it", soft_wrap=True)
    return EXIT_FOUND


def in_words(scenario: Scenario, extent: Extent) -> str:
    """The scenario, in one line."""
    some = f" ({', '.join(scenario.kinds)})" if scenario.kinds != tuple(FAULTS) else ""
    parts = (
        _count(scenario.requests, "request"),
        f"each prompt {_count(scenario.blocks, 'block')}",
        f"{_count(scenario.prefill, 'prefill node')}, {_count(scenario.decode, 'decode node')}",
        f"at most {_count(scenario.faults, 'fault')}{some}",
        "the first one is cancelled at any moment, or not" if scenario.cancel else "",
        "staged" if scenario.staged else "",
        f"{_count(extent.runs, 'random run')} from seed {extent.seed}" if extent.runs else "",
    )
    return "; ".join(part for part in parts if part)


def _every(cluster: Cluster, extent: Extent, console: Console) -> Found[Move] | None:
    with _progress("states") as tell:
        began = time.perf_counter()
        explored = explore(cluster, extent.states_max, lambda states, depth: tell(states))
        seconds = time.perf_counter() - began
    console.print(
        f"{explored.states:,} states, {explored.transitions:,} transitions, depth {explored.depth}, {seconds:.1f} s"
    )
    if explored.found is None:
        console.print(_verdict(explored))
        ends = sorted(explored.outcomes.items())
        console.print(rows_table([{"ended as": how, "states": n} for how, n in ends], ("ended as", "states")))
    return explored.found


def _verdict(explored: Explored[Move]) -> str:
    if explored.whole:
        return "[green]no violation; from every state all can end with every block and lease back[/]"
    return "[yellow]no violation so far: not all states were seen[/] (--states-max)"


def _random(cluster: Cluster, extent: Extent, console: Console) -> Found[Move] | None:
    began = time.perf_counter()
    with _progress("runs") as tell:
        for run in range(extent.runs):
            tell(run)
            found = walk(cluster, extent.seed + run, MOVES_MAX)
            if found is not None:
                console.print(f"seed {extent.seed + run}, {len(found.moves)} moves, shortened:")
                return shortened(cluster, found)
    console.print(f"[green]no violation[/] in {_count(extent.runs, 'run')}, {time.perf_counter() - began:.1f} s")
    return None


class _progress:
    """A line on standard error that says how far it is, where someone looks on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._status = Console(stderr=True).status("")

    def __enter__(self) -> Callable[[int], None]:
        self._status.__enter__()
        return lambda count: self._status.update(f"{count:,} {self._what}")

    def __exit__(self, *error: object) -> None:
        self._status.stop()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
