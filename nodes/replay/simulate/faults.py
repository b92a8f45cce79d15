"""Faults as one writes them: `kill:p0@12.5s`."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    kind: str
    node: str
    peer: str = ""
    at_ns: int = 0
    for_ns: int = 0
    value: float = 0.0
