"""From logits to a token. The random number of a token is a pure function of (seed, position).

So a prefill node and a decode node, any batch and any retry draw the same. No sort and no random draw over the
vocabulary: one number picks from the best candidates, in order of their probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdbus.bus.messages import Sampling, TokenLogprob

CANDIDATES = 256  # best tokens looked at first; more only if they do not hold enough probability
GROWTH = 16
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them would overflow
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen. `position` is the token's own; `sampled` how many tokens came before it."""

    sampling: Sampling
    position: int
    sampled: int


@dataclass(frozen=True)
class Drawn:
    token: int
    logprob: TokenLogprob | None


def sample(logits: Tensor, draws: Sequence[Draw], eos_ids: Sequence[int]) -> list[Drawn]:
    """One token for each row of logits [N, vocab]. Log-probabilities are of the model's own distribution.

    `eos_ids` cannot be drawn, nor can the request's stop tokens, while fewer than `min_tokens` were sampled.
    """
    allowed = _suppress(logits, draws, eos_ids)
    best = allowed.argmax(-1).tolist()
    drawn = []
    for row, draw in enumerate(draws):
        token = best[row] if draw.sampling.temperature < GREEDY_BELOW else _choose(allowed[row], draw)
        drawn.append(Drawn(token, _logprob(logits[row], token, draw.sampling.logprobs)))
    return drawn


def _suppress(logits: Tensor, draws: Sequence[Draw], eos_ids: Sequence[int]) -> Tensor:
    early = [row for row, draw in enumerate(draws) if draw.sampled < draw.sampling.min_tokens]
    if not early:
        return logits
    allowed = logits.clone()
    for row in early:
        ends = {*eos_ids, *draws[row].sampling.stop_token_ids}
        allowed[row, [i for i in sorted(ends) if 0 <= i < logits.shape[1]]] = -torch.inf
    return allowed


def _choose(logits: Tensor, draw: Draw) -> int:
    """The first candidate, best first, at which the summed probability passes this token's random number."""
    sampling, number = draw.sampling, uniform(draw.sampling.seed, draw.position)
    scaled = logits.float() / sampling.temperature
    size, width = len(scaled), sampling.top_k or CANDIDATES
    needed = sampling.top_p if sampling.top_p < 1 else number
    while True:
        values, ids = torch.topk(scaled, min(width, size))
        total = torch.logsumexp(values if sampling.top_k else scaled, 0)
        summed = torch.exp(values.double() - total.double()).cumsum(0)
        if sampling.top_k or width >= size or summed[-1] > needed:
            break
        width *= GROWTH
    return int(ids[_pick(summed, sampling.top_p, number)])


def _pick(summed: Tensor, top_p: float, number: float) -> int:
    """Which candidate: the nucleus is the fewest that hold `top_p`, and the number is stretched over it."""
    last = len(summed) - 1
    mass = 1.0
    if top_p < 1:
        last = min(last, int(torch.searchsorted(summed, top_p)))
        mass = float(summed[last])
    return min(last, int(torch.searchsorted(summed, number * mass, right=True)))


def _logprob(logits: Tensor, token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    wide = logits.float()
    total = torch.logsumexp(wide, 0)
    values, ids = torch.topk(wide, min(top, len(wide)))
    best = tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
    return TokenLogprob(logprob=float(wide[token] - total), top=best)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position`: splitmix64's finalizer over both."""
    mixed = _mix(_mix(seed & _MASK) + position)
    return (mixed >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
