"""Which files are meant, and how their clocks stand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdbus.bus.errors import ConfigError
from pdbus.bus.recorder import SUFFIX, RecordingHeader


def files_of(path: Path) -> list[Path]:
    """The recordings in a folder, or the one file. Raises ConfigError for a folder that holds none."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(str(path), f"holds no recording (*{SUFFIX}); give a folder of --record")
    return files


def clock_offsets(headers: Sequence[RecordingHeader]) -> list[int]:
    """What to add to each file's clock. One offset a boot: wall clocks drift, the shared monotonic clock does not."""
    by_boot: dict[str, int] = {}
    offsets = []
    for header in headers:
        offset = header.wall_ns - header.monotonic_ns
        offsets.append(by_boot.setdefault(header.boot, offset) if header.boot else offset)
    return offsets
