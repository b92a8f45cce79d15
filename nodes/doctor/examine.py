"""All checks together, shown as a table or as JSON."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from pdbus import __version__

from ..tables import output, print_json
from . import machine, self_read, software
from .finding import Finding, State

COLOURS = {State.OK: "green", State.WARNING: "yellow", State.PROBLEM: "red"}


def examine(*, as_json: bool) -> int:
    """Prints what was found; 0, or 1 when a node could not work here."""
    findings = [*software.look(), *machine.look()]
    nixl: dict[str, Any] = {"version": software.version("nixl")}
    if not any(f.what.startswith(("nixl", "NIXL")) and f.state is State.PROBLEM for f in findings):
        read, ucx = self_read.look()
        findings += read
        nixl |= {"ucx": ucx.version, "transports": list(ucx.transports)}
    well = all(f.state is not State.PROBLEM for f in findings)
    if as_json:
        print_json({"ok": well, "findings": [f._asdict() for f in findings], "nixl": nixl, "pdbus": __version__})
    else:
        _show(findings, well)
    return int(not well)


def _show(findings: list[Finding], well: bool) -> None:
    console = output()
    width = max(len(f.what) for f in findings)
    for f in findings:
        mark = f"[{COLOURS[f.state]}]{f.state.value:8}[/]"
        console.print(f"{mark} {escape(f.what):{width}}  {escape(f.found)}", soft_wrap=True)
        if f.setting:
            console.print(f"{'':9}{'':{width}}  [dim]{escape(f.setting)}[/]", soft_wrap=True)
    console.print("[green]a node can work here[/]" if well else "[red]a node cannot work here[/]")
