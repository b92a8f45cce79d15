"""Which decode node a request goes to: pure functions from what is known of the nodes to a choice with its scores.

Nothing here knows time, sockets or tokens. The same views and the same turn give the same choice, so that a recorded
choice can be made again. A policy gives each node a score; the highest wins; equals take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pdbus.bus.compatibility import PREFILL_ROLES
from pdbus.bus.wire import Declared

BUSY = 1.5  # a node with more than so many times the mean of running requests, and one, is not chosen for its prefix
RUNNING_TOKENS = 8  # what one more running request costs, in prompt tokens: each slows the steps of all others
ALIKE = 1.25  # speeds nearer to each other count as the same: measurements differ by so much by themselves
SHORT_FACTOR = 2  # tokens that have no room wait for others to end, which takes longer than to compute them


class NodeView(Declared):
    """A decode node as one choice sees it."""

    name: str
    incarnation: bytes = b""
    running: int = 0  # requests there, those that wait included
    queued: int = 0  # of these, not admitted yet
    queued_tokens: int = 0  # of prompts, waiting to be computed there
    free_blocks: int = 0  # that could be given out: free and cached ones
    block_size: int = 16  # tokens
    matched_tokens: int = 0  # of the prompt's beginning that are in its prefix cache
    prefill_tokens_per_s: int = 0  # where its prompts are computed, as measured lately; 0: not known
    read_tokens_per_s: int = 0  # whose KV cache comes over the link from there, as measured lately; 0: not known


class Ask(Declared):
    """`turn` counts choices. `prompt_tokens` is 0 where the prompt's length is not known."""

    turn: int
    prompt_tokens: int = 0


class Choice(Declared):
    node: str
    scores: tuple[float, ...]  # in the order of the views


Policy = Callable[[Ask, Sequence[NodeView]], list[float]]


def round_robin(ask: Ask, nodes: Sequence[NodeView]) -> list[float]:
    """All are equal: they take turns."""
    return [0.0] * len(nodes)


def least_loaded(ask: Ask, nodes: Sequence[NodeView]) -> list[float]:
    """The fewest requests."""
    return [-float(node.running) for node in nodes]


def prefix(ask: Ask, nodes: Sequence[NodeView]) -> list[float]:
    """The longest beginning in its prefix cache, among nodes that are not much busier than the mean; then the fewest
    requests."""
    most = BUSY * sum(node.running for node in nodes) / max(1, len(nodes)) + 1
    return [
        node.matched_tokens + 1 / (1 + node.running) if node.running <= most else -float(node.running) for node in nodes
    ]


def cost(ask: Ask, nodes: Sequence[NodeView]) -> list[float]:
    """The least work before and beside the answer, in prompt tokens at the fastest node's speed: what is missing of the
    prompt, what waits before it, who runs beside it, and what has no room. A node is as fast as the slower of computing
    and reading; one whose speed is not known counts as fast, so that it is tried."""
    speeds = [Rates(node.prefill_tokens_per_s, node.read_tokens_per_s).speed for node in nodes]
    fastest = max(speeds, default=0)
    return [-_cost(ask, node, _slower(speed, fastest)) for node, speed in zip(nodes, speeds, strict=True)]


def _slower(rate: int, fastest: int) -> float:
    """How many times as long a token takes there."""
    return fastest / rate if 0 < rate * ALIKE < fastest else 1.0


def _cost(ask: Ask, node: NodeView, slower: float) -> float:
    missing = max(0, ask.prompt_tokens - node.matched_tokens)
    short = max(0, missing - node.free_blocks * node.block_size)
    prompts = missing + node.queued_tokens + SHORT_FACTOR * short
    return slower * prompts + RUNNING_TOKENS * (node.running + node.queued)


class Rates(NamedTuple):
    """Prompt tokens a second: computed, and read from where they were. 0: not known, or nothing to read."""

    prefill: int = 0
    read: int = 0

    @property
    def speed(self) -> int:
        """Reads go on beside the computing, so the slower of the two counts."""
        return min(self.prefill, self.read) if self.read else self.prefill


def prompt_rates(status: Mapping[str, Any]) -> Rates:
    """Where a decode node's prompts are computed, from its status: of the best prefill node that it can ask, or its own
    where it computes them itself."""
    own = Rates(_count(status.get("metrics", {}).get("prefill_tokens_per_s")))
    policy = status.get("prefill_policy", "remote")
    there = [] if policy == "local" else [_rates(peer, status) for peer in status.get("peers", ()) if _is_asked(peer)]
    if policy == "auto" or not there:
        there.append(own)
    return max(there, key=lambda rates: rates.speed)


def _rates(peer: Mapping[str, Any], status: Mapping[str, Any]) -> Rates:
    """Of a prefill node, and of the link to it."""
    block_bytes, block_size = _count(status.get("block_bytes")), _count(status.get("block_size"))
    read = _count(peer.get("read_bytes_per_s")) * block_size // block_bytes if block_bytes else 0
    return Rates(_count(peer.get("prefill_tokens_per_s")), read)


def _count(said: Any) -> int:
    return max(0, int(said or 0))


def _is_asked(peer: Mapping[str, Any]) -> bool:
    up = peer.get("state") == "up" and not peer.get("draining") and not peer.get("detail") and not peer.get("circuit")
    return up and peer.get("role") in PREFILL_ROLES


POLICIES: dict[str, Policy] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix": prefix,
    "cost": cost,
}
DEFAULT_POLICY = "prefix"
KNOWS_PREFIXES = ("prefix", "cost")  # these need the prompt's tokens and what is cached where


def choose(policy: str, ask: Ask, nodes: Sequence[NodeView]) -> Choice:
    """One of the nodes, of which there is at least one. Their order does not matter: equals take turns by name."""
    scores = POLICIES[policy](ask, nodes)
    best = max(scores)
    equals = sorted(node.name for node, score in zip(nodes, scores, strict=True) if score == best)
    return Choice(node=equals[ask.turn % len(equals)], scores=tuple(scores))
