"""What a node's future depends on, as a hashable key: equal for nodes that will behave alike."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pdbus.bus.wire import Declared
from pdbus.connector.pool import BlockPool
from pdbus.connector.timers import Timers

# What is counted, measured or configured; what a fault-free membership never looks at; what stands elsewhere as well.
LEFT_OUT = frozenset((
    "counters", "_config", "config", "_events", "_handlers", "_choose", "marks", "granted_ns", "order", "_orders",
    "deadline_ns", "last_heard_ns", "use_until_ns", "use_since_ns", "ping_ns", "remove_ns", "due_ns", "open_ns",
    "_load", "load", "load_ns", "_owner", "_pool", "_scheduler", "_offers", "_stage", "places",
    "_peer_agents", "_transfers", "_liveness",
))  # fmt: skip
SINCE = frozenset(("_started_ns",))  # times by key that were
UNTIL = frozenset(("_until", "_reload_ns"))  # times by key
NAMES_ONLY = frozenset(("_retired",))  # times by key that are hours away


class Keys:
    """Makes the keys of one node at one time of its clock."""

    def __init__(self, now: int) -> None:
        self._now = now

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (int, str, bytes, Enum, Declared, frozenset)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple([self.of(item) for item in value])
        if isinstance(value, dict):
            return frozenset([(key, self.of(item)) for key, item in value.items()])
        if isinstance(value, Timers):
            return frozenset([(key, max(0, at - self._now)) for key, (at, _) in value._at.items()])
        if isinstance(value, BlockPool):
            held = tuple([tuple(counts) for counts in value._held.values()])
            return held, tuple(value._hash), tuple(value._cached), frozenset(value._mirrored)
        named = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else vars(value)
        return tuple([self._named(name, item) for name, item in named.items() if name not in LEFT_OUT])

    def _named(self, name: str, value: Any) -> Any:
        if name in SINCE:
            return frozenset([(key, self._now - at) for key, at in value.items()])
        if name in UNTIL:
            return frozenset([(key, at - self._now) for key, at in value.items() if at > self._now])
        if name in NAMES_ONLY:
            return frozenset(value)
        return self.of(value)
