"""One request's way through all nodes, out of their recordings.

A record belongs to a request when its payload names the request, the client's id for it, or a read or lease that
another record ties to it: by naming both, or by being the effect of one that names the request. The meaning of payloads
is not known here, only their field names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import Record

from ..tables import output
from .clocks import aligned
from .files import opened
from .history import Lease
from .tell import Named, complain, tell_block, tell_lease
from .timeline.page import write_page
from .words import colours_of, describe

EXIT_NOT_FOUND = 1

Tie = tuple[Any, ...]


class Moment(NamedTuple):
    """A record on the common clock. `ties` are the names by which it belongs to a request."""

    at_ns: int
    node: str
    record: Record
    ties: tuple[Tie, ...]


def show_request(wanted: str, paths: Sequence[Path], html: Path | None = None) -> int:
    """Prints the table, or writes the page where it is chosen; 0, or 1 with one line on standard error when no or more
    than one request matches. Raises ConfigError when no path is or holds a recording."""
    moments, notes = load(paths)
    found = find(moments, wanted)
    if len(found) != 1:
        complain(_mismatch(wanted, found, moments, paths))
        return EXIT_NOT_FOUND
    if html is not None:
        request = found[0][1]
        return show_all(paths, html, request.hex() if isinstance(request, bytes) else "")
    output().print(render(found[0], belonging(moments, found[0])))
    for note in notes:
        complain(note)
    return 0


def show_all(paths: Sequence[Path], html: Path, request: str = "") -> int:
    """Writes the page of everything, where this request is chosen. Raises ConfigError."""
    files = opened(paths)
    write_page(html, files.recordings, [str(problem) for problem in files.problems], request)
    print(f"{html}: open it in a browser")
    return 0


def show_history(paths: Sequence[Path], lease: Lease | None, block: Named | None) -> int:
    """Prints that of a lease, of a block, or of both; 1 when there is none. Raises ConfigError."""
    recordings, console = opened(paths).recordings, output()
    told = [tell_lease(lease, recordings, console)] if lease else []
    told += [tell_block(block, recordings, console)] if block else []
    return 0 if all(told) else EXIT_NOT_FOUND


def load(paths: Sequence[Path]) -> tuple[list[Moment], list[str]]:
    """All records of all files in the order of the common clock, and what is to be said about the files."""
    files = opened(paths)
    recordings = files.recordings
    offsets = aligned(recordings)
    moments = [moment for r, offset in zip(recordings, offsets, strict=True) for moment in _moments(r, offset)]
    notes = [str(problem) for problem in files.problems]
    notes += [f"{r.path.name}: the {r.gone} parts before it are not there" for r in recordings if r.gone]
    notes += [f"{r.path.name}: {r.truncated}; shown up to there" for r in recordings if r.truncated]
    notes += [f"{r.path.name}: {r.lost} records were lost while recording" for r in recordings if r.lost]
    return sorted(moments, key=lambda m: (m.at_ns, m.node, m.record.sequence)), notes


def _moments(recording: Recording, offset_ns: int) -> Iterator[Moment]:
    header = recording.header
    cause, causing = 0, tuple[Tie, ...]()  # the last input and the requests that it names: its effects follow it
    for record in recording:
        ties = tuple(dict.fromkeys(_ties(record.payload, (header.node, header.incarnation))))
        requests = tuple(tie for tie in ties if tie[0] == "request")
        if not record.cause:
            cause, causing = record.sequence, requests
        elif record.cause == cause and ties and not requests:
            ties += causing
        yield Moment(record.now_ns + offset_ns, header.node, record, ties)


def _ties(value: Any, owner: Tie) -> Iterator[Tie]:
    """Everything in a payload by which a request can be known. Reads are known to their own node alone."""
    if isinstance(value, list):
        for item in value:
            yield from _ties(item, owner)
    if not isinstance(value, dict):
        return
    request, client, key = value.get("request"), value.get("client_id"), value.get("client")
    if isinstance(request, bytes) and request:
        yield ("request", request)
    if isinstance(client, str) and client:  # in a client's own recording
        yield ("client", f"{owner[1].hex()}:{client}")
    if isinstance(key, str) and key:  # as a node calls it
        yield ("client", key)
    if isinstance(value.get("read"), int):
        yield ("read", value["read"], *owner)
    if "generation" in value:
        yield ("lease", *(value.get(key) for key in ("node", "incarnation", "generation")))
    for item in value.values():
        yield from _ties(item, owner)


def find(moments: Sequence[Moment], wanted: str) -> list[Tie]:
    """The requests whose id begins with `wanted` in hex, or whose client's id it is. An exact one beats a beginning."""
    requests = dict.fromkeys(tie for m in moments for tie in m.ties if tie[0] == "request")
    clients = dict.fromkeys(
        tie for m in moments for tie in m.ties if tie[0] == "client" and tie[1].rpartition(":")[2] == wanted
    )
    by_client = dict.fromkeys(
        tie for m in moments if any(tie in clients for tie in m.ties) for tie in m.ties if tie[0] == "request"
    )
    if clients:
        return list(by_client or clients)
    return [tie for tie in requests if tie[1].hex().startswith(wanted.lower())]


def belonging(moments: Sequence[Moment], request: Tie) -> list[Moment]:
    """The moments of one request: those that name it, and those of reads, leases and client ids tied to it."""
    own = {request: None}
    for moment in moments:
        tied = [tie for tie in moment.ties if tie[0] == "request"]
        if tied == [request]:  # a message about several requests ties nothing
            own.update(dict.fromkeys(moment.ties))
    return [moment for moment in moments if any(tie in own for tie in moment.ties)]


def _mismatch(wanted: str, found: Sequence[Tie], moments: Sequence[Moment], paths: Sequence[Path]) -> str:
    if found:
        ids = ", ".join(tie[1].hex() if isinstance(tie[1], bytes) else tie[1] for tie in found[:4])
        return f"{wanted!r} fits {len(found)} requests ({ids}{', ...' if len(found) > 4 else ''}): give more of the id"
    requests = {tie for m in moments for tie in m.ties if tie[0] == "request"}
    return f"no request {wanted!r} among {len(requests)} in {', '.join(map(str, paths))}"


def render(request: Tie, moments: Sequence[Moment]) -> Table:
    """The table: node, milliseconds since the first record, what it was, its details."""
    name = request[1].hex() if isinstance(request[1], bytes) else request[1]
    table = Table(title=f"request {name}", title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("node", no_wrap=True)
    table.add_column("+ms", justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("details", overflow="fold", style="dim")
    colours = colours_of(moment.node for moment in moments)
    for moment in moments:
        milliseconds = f"{(moment.at_ns - moments[0].at_ns) / 1e6:.3f}"
        what, details = describe(moment.record.kind, moment.record.payload)
        table.add_row(f"[{colours[moment.node]}]{moment.node}[/]", milliseconds, what, details)
    return table
