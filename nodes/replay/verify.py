"""`pd-replay verify`: run every recorded core again, check the whole cluster, say what is wrong and what is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import Record

from ..tables import output
from .clocks import aligned
from .cluster_run import ClusterRun, title
from .findings import Finding
from .history import Lease
from .story import Moment, table
from .tell import Named, tell_block, tell_lease, tell_request
from .words import describe

EXIT_FAILED = 1
EXIT_NO_RECORDING = 2
AROUND = 4  # records before and after a finding
SHOWN_MAX = 20  # findings; the first ones say the most
AGAIN = {True: "the same", False: "[red]another[/]", None: "[yellow]not[/]"}
TOLD_AROUND_MAX = 3  # of these the records around are shown


def verify(paths: Sequence[Path], *, lease: Lease | None = None, request: str = "", block: Named | None = None) -> int:
    """Prints the verdict, then the histories that are asked for. 0: every core decided the same again and no invariant
    is broken; 1: not so, or what is asked for is not there; 2: something given is no recording. Raises ConfigError
    when nothing given is one."""
    cluster = ClusterRun(paths)
    console = output()
    console.print(_nodes(cluster))
    _print_findings(cluster, console)
    console.print(_verdict(cluster))
    files = [run.recording for run in cluster.runs]
    told = [tell_lease(lease, files, console)] if lease else []
    told += [tell_request(request, files, console)] if request else []
    told += [tell_block(block, files, console)] if block else []
    if cluster.failures or not all(told):
        return EXIT_FAILED
    return EXIT_NO_RECORDING if cluster.unreadable or not any(run.inputs for run in cluster.runs) else 0


# ---------------------------------------------------------------- the verdict


def _nodes(cluster: ClusterRun) -> Table:
    grid = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("node", "life", "records", "run again", "ended"):
        grid.add_column(column, justify="right" if column == "records" else "left", overflow="fold")
    for run in cluster.runs:
        name, incarnation = run.facts.life
        again = f"a {run.role}" if run.is_client else AGAIN[run.again]
        grid.add_row(escape(name), incarnation.hex()[:12], f"{run.records:,}", again, escape(run.ended))
    return grid


def _verdict(cluster: ClusterRun) -> str:
    nodes = [run for run in cluster.runs if not run.is_client]
    requests: Counter[str] = sum((run.requests or Counter() for run in nodes), Counter())
    leases: Counter[str] = sum((run.leases or Counter() for run in nodes), Counter())
    counted = f"{_counts('requests', requests)}; {_counts('leases', leases)}"
    kinds = Counter(finding.kind.value for finding in cluster.failures)
    if not kinds:
        return f"{counted}\n[green]no divergence, no violation[/]"
    return f"{counted}\n[red]{', '.join(f'{kind}: {count}' for kind, count in kinds.items())}[/]"


def _counts(what: str, counted: Counter[str]) -> str:
    each = ", ".join(f"{count:,} {name}" for name, count in counted.most_common())
    return f"{sum(counted.values()):,} {what}{f' ({each})' if each else ''}"


def _print_findings(cluster: ClusterRun, console: Console) -> None:
    """The failures in the order of the common clock, the first few with what was around them; then the notes."""
    failures = sorted(cluster.failures, key=_order(cluster)) if cluster.failures else []
    for place, finding in enumerate(failures[:SHOWN_MAX]):
        console.print(_line(finding, "red"), soft_wrap=True)
        if place < TOLD_AROUND_MAX and finding.sequence:
            console.print(_around(finding, cluster))
    if len(failures) > SHOWN_MAX:
        console.print(f"[red]and {len(failures) - SHOWN_MAX} more[/]")
    for note in cluster.notes:
        console.print(_line(note, "yellow"), soft_wrap=True)


def _order(cluster: ClusterRun) -> Callable[[Finding], tuple[int, int]]:
    offsets = aligned([run.recording for run in cluster.runs])
    by_life = {run.facts.life: offset for run, offset in zip(cluster.runs, offsets, strict=True)}
    return lambda f: (f.at_ns + by_life[f.life] if f.life else 0, f.sequence)


def _line(finding: Finding, colour: str) -> str:
    where = f" {escape(title(finding.life))}" if finding.life else f" {finding.path.name}" if finding.path else ""
    at = f" record {finding.sequence}" if finding.sequence else ""
    rule = f" (rule {escape(finding.rule)})" if finding.rule else ""
    return f"[{colour}]{finding.kind.value}[/]{where}{at}: {escape(finding.text)}{rule}"


def _around(finding: Finding, cluster: ClusterRun) -> Table:
    """The records before and after the one at fault."""
    moments = []
    for run in cluster.runs:
        for record in _near(run.recording, finding.sequence) if run.facts.life == finding.life else ():
            what, details = describe(record.kind, record.payload)
            mark = "> " if record.sequence == finding.sequence else "  "
            moments.append(Moment(record.now_ns, run.facts.life[0], record.sequence, mark + what, details))
    return table("", moments)


def _near(recording: Recording, sequence: int) -> Iterator[Record]:
    for record in recording:
        if abs(record.sequence - sequence) <= AROUND:
            yield record
        elif record.sequence > sequence:
            return
