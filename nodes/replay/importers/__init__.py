"""Public traces and our own recordings as workloads, behind one function."""

from __future__ import annotations

from pathlib import Path

from ..workload import Workload
from . import recorded, weka
from .azure import AZURE
from .mooncake import MOONCAKE
from .recorded import RECORDED
from .source import Importer, Source
from .weka import WEKA

FORMATS = {importer.name: importer for importer in (MOONCAKE, AZURE, WEKA, RECORDED)}
AUTO = "auto"
GIVE = (
    f"give {', '.join(importer.what for importer in FORMATS.values() if importer is not RECORDED)} or {RECORDED.what}"
)


def import_workload(path: Path | str, format: str = AUTO) -> Workload:
    """The workload in a file, packed with gzip or not, or in a folder (of recordings, of sessions). `format` is one of
    FORMATS, or `auto`: told by what is in it.

    Raises ConfigError naming file and line, and what would be right. What was left out or changed is in the
    workload's notes.
    """
    source = Source(Path(path))
    return (_importer(source) if format == AUTO else FORMATS[format]).read(source)


def _importer(source: Source) -> Importer:
    if source.path.is_dir():
        return _of_folder(source)
    head = source.head().decode("utf-8-sig", errors="replace")
    source.notes.clear()
    if not head.strip():
        raise source.error(f"is empty; {GIVE}")
    for importer in FORMATS.values():
        if importer.matches(head):
            return importer
    raise source.error(f"is no workload that is known; {GIVE}")


def _of_folder(source: Source) -> Importer:
    for importer, module in ((RECORDED, recorded), (WEKA, weka)):
        if module.files_in(source.path):
            return importer
    patterns = " nor ".join(", ".join(module.PATTERNS) for module in (recorded, weka))
    raise source.error(f"holds neither {patterns}; give a folder of --record or of agent sessions, or a file")
