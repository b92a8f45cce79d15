"""What came of going through one recording."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdbus.bus.recording import Recording

from .facts import Facts


@dataclass
class Run:
    """One life of a node or client. `again`: run again to its end with the same decisions; None: not run again."""

    recording: Recording
    facts: Facts
    is_client: bool = False
    role: str = ""  # of a client: client, gateway
    version: str = ""
    records: int = 0
    inputs: int = 0
    ended: str = ""
    again: bool | None = None
    requests: Counter[str] | None = None
    leases: Counter[str] | None = None
