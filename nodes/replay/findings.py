"""What a verification says: where in which file, how grave, in one line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from .facts import Life


class Kind(StrEnum):
    """The first three are failures; a note says what could not be checked, or why something ends early."""

    DIVERGENCE = "divergence"
    VIOLATION = "violation"
    DAMAGE = "damage"
    NOTE = "note"


class Finding(NamedTuple):
    """`sequence` is the record it shows at, 0 for the whole file. `rule` is that of the hand-off or the invariant."""

    kind: Kind
    text: str
    life: Life | None = None
    path: Path | None = None
    sequence: int = 0
    at_ns: int = 0  # the node's own clock
    rule: str = ""
