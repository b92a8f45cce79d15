"""Faults as one writes them: KIND:NODE[-PEER]@TIME[+FOR][=VALUE], as in `kill:p0@12.5s` or `drop:p0-d3@10s+5s=0.1`.

Nodes are p0, p1, ... and d0, d1, ...; `*` is every one of them. Times count from the workload's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from pdbus.bus.errors import ConfigError

from ...values import duration, show_duration

TIME_MAX_NS = 366 * 86_400 * 10**9
EXAMPLES = "as in kill:p0@12.5s, freeze:d1@5s+3s, drop:p0-d3@10s+5s=0.1"

_NODE = r"\*|[pd]\d+"
_FAULT = re.compile(
    rf"(?P<kind>[a-z]+):(?P<node>{_NODE})(-(?P<peer>{_NODE}))?@(?P<at>[^+=]+)(\+(?P<for>[^=]+))?(=(?P<value>.+))?"
)


class Kind(NamedTuple):
    """What a kind of fault takes. `value`: what the number behind `=` is, '' for none."""

    does: str
    lasts: bool = False  # may last
    needs_for: bool = False
    pair: bool = False  # may concern one link
    every: bool = False  # may concern every node
    value: str = ""
    default: float = 0.0


KINDS: dict[str, Kind] = {
    "kill": Kind("the node's processes end; with +FOR it is started again then", lasts=True),
    "freeze": Kind("the node stands still", lasts=True, needs_for=True),
    "worker": Kind("the node's worker ends and is started again"),
    "mover": Kind("the node's mover ends and is started again"),
    "drain": Kind("the node drains, as after SIGTERM"),
    "cut": Kind("connections break and are made again", pair=True, every=True),
    "drop": Kind("messages are lost", lasts=True, pair=True, every=True, value="chance", default=1.0),
    "duplicate": Kind("messages come twice", lasts=True, pair=True, every=True, value="chance", default=1.0),
    "delay": Kind("messages come later", lasts=True, pair=True, every=True, value="time"),
    "slow": Kind("the node's link has only that part of its bandwidth", lasts=True, every=True, value="part"),
}


class Fault(NamedTuple):
    """`for_ns` 0: for good. `value`: a chance, a part, or a time in ns."""

    kind: str
    node: str
    peer: str = ""
    at_ns: int = 0
    for_ns: int = 0
    value: float = 0.0

    def concerns(self, node: str, peer: str) -> bool:
        """Whether messages between these two are this fault's."""
        if not self.peer:
            return self.node in ("*", node, peer)
        return (_is(self.node, node) and _is(self.peer, peer)) or (_is(self.node, peer) and _is(self.peer, node))


def parse_fault(text: str) -> Fault:
    """Raises ConfigError (`--fault`) naming what is wrong and what would be right. Whether there is such a node is not
    known here (`check_nodes`)."""
    found = _FAULT.fullmatch(text.strip())
    if found is None:
        raise _error(text, f"give KIND:NODE@TIME, {EXAMPLES}")
    kind = KINDS.get(found["kind"])
    if kind is None:
        raise _error(text, f"{found['kind']!r} is no fault; give {', '.join(KINDS)}")
    if found["node"] == "*" and not kind.every:
        raise _error(text, "name one node")
    if found["peer"] and not kind.pair:
        raise _error(text, f"{found['kind']} concerns one node, not a link")
    if found["for"] and not kind.lasts:
        raise _error(text, f"{found['kind']} happens once: leave out +{found['for']}")
    if kind.needs_for and not found["for"]:
        raise _error(text, f"say how long: {found['kind']}:{found['node']}@{found['at']}+3s")
    return Fault(
        kind=found["kind"],
        node=found["node"],
        peer=found["peer"] or "",
        at_ns=_time(text, found["at"], 0),
        for_ns=_time(text, found["for"], 1) if found["for"] else 0,
        value=_value(text, found["kind"], kind, found["value"]),
    )


def check_nodes(fault: Fault, prefill: int, decode: int) -> None:
    """Raises ConfigError (`--fault`) for a node that there is not."""
    for name in (fault.node, fault.peer):
        role, count = ("prefill", prefill) if name.startswith("p") else ("decode", decode)
        if name not in ("", "*") and int(name[1:]) >= count:
            nodes = f"{name[0]}0" + (f" to {name[0]}{count - 1}" if count > 1 else " alone")
            raise _error(show_fault(fault), f"there is no {name}; the {role} nodes: {nodes}")


def _time(text: str, written: str, least_ns: int) -> int:
    if least_ns == 0 and re.fullmatch(r"0[a-z]*", written):
        return 0
    try:
        parse: Callable[[str], int] = duration(1, TIME_MAX_NS)
        return parse(written)
    except ValueError as e:
        raise _error(text, str(e)) from None


def _value(text: str, name: str, kind: Kind, written: str | None) -> float:
    if written is None:
        if kind.value and not kind.default:
            raise _error(text, f"say how much: {name}:...=" + ("200ms" if kind.value == "time" else "0.1"))
        return kind.default
    if not kind.value:
        raise _error(text, f"{name} takes no value: leave out ={written}")
    if kind.value == "time":
        return _time(text, written, 1)
    try:
        value = float(written)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise _error(text, f"{written} is no {kind.value}: give a number above 0, at most 1")
    return value


def _error(text: str, problem: str) -> ConfigError:
    return ConfigError("--fault", f"{text!r}: {problem}")


def _is(pattern: str, name: str) -> bool:
    return pattern in ("*", name)


def show_fault(fault: Fault) -> str:
    """As one writes it."""
    words = f"{fault.kind}:{fault.node}"
    words += f"-{fault.peer}" if fault.peer else ""
    words += f"@{show_duration(fault.at_ns)}" if fault.at_ns else "@0s"
    words += f"+{show_duration(fault.for_ns)}" if fault.for_ns else ""
    value = show_duration(int(fault.value)) if fault.kind == "delay" else f"{fault.value:g}"
    return words + (f"={value}" if KINDS[fault.kind].value else "")
