"""Which files are meant, whose they are, and how their clocks stand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.bus.recording import Recording
from pdbus.bus.recording_part import SUFFIX, Part, RecordingHeader


class Opened(NamedTuple):
    """The recordings, one of each life, in the order of their files; what is none; and files that are there twice."""

    recordings: list[Recording]
    problems: list[ConfigError]
    doubled: list[tuple[Part, Part]]  # left out, in favour of


def files_of(path: Path) -> list[Path]:
    """The recordings in a folder, or the one file. Raises ConfigError for a folder that holds none."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(str(path), f"holds no recording (*{SUFFIX}); give a folder of --record")
    return files


def opened(paths: Sequence[Path]) -> Opened:
    """All that is in these files and folders. Raises ConfigError when none is or holds a recording."""
    lives: dict[tuple[str, bytes], dict[int, Part]] = {}
    problems: list[ConfigError] = []
    doubled: list[tuple[Part, Part]] = []
    for path in paths:
        try:
            files = files_of(path)
        except ConfigError as e:
            problems.append(e)
            continue
        for file in files:
            try:
                part = Part(file)
            except ConfigError as e:
                problems.append(e)
                continue
            parts = lives.setdefault((part.header.node, part.header.incarnation), {})
            known = parts.setdefault(part.header.part, part)
            if known is not part:
                doubled.append((part, known))
    if not lives:
        raise problems[0]
    return Opened([Recording(list(parts.values())) for parts in lives.values()], problems, doubled)


def clock_offsets(headers: Sequence[RecordingHeader]) -> list[int]:
    """What to add to each file's clock. One offset a boot: wall clocks drift, the shared monotonic clock does not."""
    by_boot: dict[str, int] = {}
    offsets = []
    for header in headers:
        offset = header.wall_ns - header.monotonic_ns
        offsets.append(by_boot.setdefault(header.boot, offset) if header.boot else offset)
    return offsets
