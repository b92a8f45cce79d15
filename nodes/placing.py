"""Where a prompt is computed: on this node, or on which prefill node. A pure function of what was measured.

Theory of operation. Each place gets the time until the prompt would be computed there and its KV be here:

    here    computing what waits before it and what is missing of it, and the steps of the answers beside;
            each answer that runs here is held up by what is missing, which counts a part (HELD_UP)
    there   two round trips, computing what waits before it, and then the longer of computing what is missing there and
            of reading what is missing here: the reads go on beside

Computing takes so long for each token, and so long for each chunk.

The least wins; of equals a prefill node. A node that was not measured counts as fast as this one, and this one as the
fastest of the others, so that each is tried. While nothing at all has been measured, a prefill node is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdbus.bus.wire import Declared

POLICIES = ("remote", "auto", "local")  # the first: a prefill node whenever one can be asked
HELD_UP = 0.1  # of an answer's delay: readers hardly notice one token that comes late
ROUND_TRIPS = 2  # prompt and first token, claim and its answer


class Here(Declared):
    """This node. Times of 0.0: not known."""

    missing_tokens: int  # of the prompt, not in the prefix cache
    queued_tokens: int  # of prompts that are computed before it
    running: int  # answers
    token_ns: float  # a token of a prompt
    chunk_ns: float  # a step of such tokens beside
    step_ns: float  # a step of answers alone
    chunk_tokens: int  # of a prompt in one step


class There(Declared):
    """A prefill node that can be asked."""

    node: str
    missing_tokens: int  # of the prompt, as far as is known here
    queued_tokens: int
    token_ns: float  # a token of a prompt
    chunk_ns: float  # a step of such tokens beside
    read_ns: float  # a token's KV
    round_ns: float  # a message there and its answer


class Placed(Declared):
    """`node`: the place, '' for here. Times in the order of the nodes; all 0 while nothing is known."""

    node: str
    here_ns: int = 0
    there_ns: tuple[int, ...] = ()


def place(here: Here, there: Sequence[There]) -> Placed:
    """One place for a prompt. The order of the nodes decides between equals."""
    if not there:
        return Placed(node="")
    fastest = min((node for node in there if node.token_ns), key=_speed, default=None)
    usual = here if here.token_ns else fastest
    if usual is None:
        return Placed(node=there[0].node, there_ns=(0,) * len(there))
    here_ns = _here_ns(here, _Speed(usual.token_ns, usual.chunk_ns, here.chunk_tokens))
    there_ns = tuple(
        _there_ns(node, here.missing_tokens, _Speed(*_speed(node if node.token_ns else usual), here.chunk_tokens))
        for node in there
    )
    best = min(there_ns)
    node = there[there_ns.index(best)].node if best <= here_ns else ""
    return Placed(node=node, here_ns=here_ns, there_ns=there_ns)


class _Speed(NamedTuple):
    token_ns: float
    chunk_ns: float
    chunk_tokens: int

    def ns(self, tokens: int) -> float:
        """So many tokens of prompts, chunk by chunk."""
        return tokens * self.token_ns + self.chunks(tokens) * self.chunk_ns

    def chunks(self, tokens: int) -> int:
        return -(-tokens // self.chunk_tokens)


def _speed(node: Here | There) -> tuple[float, float]:
    return node.token_ns, node.chunk_ns


def _here_ns(here: Here, speed: _Speed) -> int:
    tokens = here.queued_tokens + here.missing_tokens
    answers_ns = speed.chunks(tokens) * here.step_ns if here.running else 0.0
    held_up_ns = HELD_UP * here.running * speed.ns(here.missing_tokens)
    return int(speed.ns(tokens) + answers_ns + held_up_ns)


def _there_ns(node: There, read_tokens: int, speed: _Speed) -> int:
    """Chunks there are taken to be as long as here."""
    longer_ns = max(speed.ns(node.missing_tokens), read_tokens * node.read_ns)
    return int(ROUND_TRIPS * node.round_ns + speed.ns(node.queued_tokens) + longer_ns)
