"""Public traces and our own recordings as workloads, behind one function."""

from __future__ import annotations

from pathlib import Path

from ..workload import Workload
from .mooncake import MOONCAKE
from .source import Importer, Source

FORMATS = {importer.name: importer for importer in (MOONCAKE,)}
AUTO = "auto"
GIVE = f"give {', '.join(importer.what for importer in FORMATS.values())}"


def import_workload(path: Path | str, format: str = AUTO) -> Workload:
    """The workload in a file, packed with gzip or not. `format` is one of FORMATS, or `auto`: told by what is in it.

    Raises ConfigError naming file and line, and what would be right. What was left out or changed is in the
    workload's notes.
    """
    source = Source(Path(path))
    return (_importer(source) if format == AUTO else FORMATS[format]).read(source)


def _importer(source: Source) -> Importer:
    head = source.head().decode("utf-8-sig", errors="replace")
    source.notes.clear()
    if not head.strip():
        raise source.error(f"is empty; {GIVE}")
    for importer in FORMATS.values():
        if importer.matches(head):
            return importer
    raise source.error(f"is no workload that is known; {GIVE}")
