"""Which decode node a request is sent to, since no gateway stands before them yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pdbus.bus.errors import ConfigError

from .asks import Ask

if TYPE_CHECKING:
    from .node import SimNode

LOADED = 1.5  # a node with so many times the mean of open requests, and more, is not chosen for its cache


class Policy(Protocol):
    def choose(self, ask: Ask) -> SimNode: ...


class RoundRobin:
    """One after the other."""

    def __init__(self, nodes: Sequence[SimNode]) -> None:
        self._nodes = nodes
        self._next = 0

    def choose(self, ask: Ask) -> SimNode:
        node = self._nodes[self._next % len(self._nodes)]
        self._next += 1
        return node


class LeastLoaded:
    """The one with the fewest open requests; of equals the first."""

    def __init__(self, nodes: Sequence[SimNode]) -> None:
        self._nodes = nodes

    def choose(self, ask: Ask) -> SimNode:
        return min(self._nodes, key=lambda n: n.open_asks)


class LongestPrefix:
    """The one with the longest cached prefix among those that are not much busier than the mean; of equals the one
    with the fewest open requests."""

    def __init__(self, nodes: Sequence[SimNode]) -> None:
        self._nodes = nodes

    def choose(self, ask: Ask) -> SimNode:
        mean = sum(n.open_asks for n in self._nodes) / len(self._nodes)
        free = [n for n in self._nodes if n.open_asks <= LOADED * mean + 1]
        return max(free, key=lambda n: (n.core.pool.match(ask.block_hashes), -n.open_asks))


_POLICIES = {"round-robin": RoundRobin, "least-loaded": LeastLoaded, "prefix": LongestPrefix}
POLICIES = tuple(_POLICIES)


def policy_of(name: str, nodes: Sequence[SimNode]) -> Policy:
    """Raises ConfigError (`--policy`)."""
    if name not in _POLICIES:
        raise ConfigError("--policy", f"there is no {name!r}: give {', '.join(POLICIES)}")
    policy: Policy = _POLICIES[name](nodes)
    return policy
