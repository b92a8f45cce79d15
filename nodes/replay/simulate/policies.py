"""Which decode node a request is sent to, since no gateway stands before them yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pdbus.bus.errors import ConfigError

from .asks import Ask

if TYPE_CHECKING:
    from .node import SimNode

BUSY = 1.5  # a node with more than so many times the mean of open requests, and one, is not chosen for its cache


class Policy(Protocol):
    def choose(self, nodes: Sequence[SimNode], ask: Ask) -> SimNode:
        """One of these, which are those that live."""
        ...


class RoundRobin:
    """One after the other; a session's requests all to one."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, nodes: Sequence[SimNode], ask: Ask) -> SimNode:
        if ask.asked.session:
            return nodes[ask.asked.session % len(nodes)]
        self._next += 1
        return nodes[(self._next - 1) % len(nodes)]


class LeastLoaded:
    """The one with the fewest open requests; of equals the first."""

    def choose(self, nodes: Sequence[SimNode], ask: Ask) -> SimNode:
        return min(nodes, key=lambda node: len(node.sent))


class LongestPrefix:
    """The one with the longest cached prefix among those that are not much busier than the mean; of equals the one
    with the fewest open requests."""

    def choose(self, nodes: Sequence[SimNode], ask: Ask) -> SimNode:
        most = BUSY * sum(len(node.sent) for node in nodes) / len(nodes) + 1
        free = [node for node in nodes if len(node.sent) <= most]
        return max(free, key=lambda node: (node.core.pool.match(ask.block_hashes), -len(node.sent)))


POLICIES: dict[str, type[Policy]] = {"round-robin": RoundRobin, "least-loaded": LeastLoaded, "prefix": LongestPrefix}


def policy_of(name: str) -> Policy:
    """Raises ConfigError (`--policy`)."""
    if name not in POLICIES:
        raise ConfigError("--policy", f"there is no {name!r}; give {', '.join(POLICIES)}")
    return POLICIES[name]()
