"""From logits to a token. The random number of a token is a pure function of (seed, position).

So a prefill node and a decode node, any batch and any retry draw the same. No sort and no random draw over the
vocabulary: one number picks from the best candidates, in order of their probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdbus.bus.messages import Sampling, TokenLogprob

CANDIDATES = 256  # best tokens looked at first; more only if they do not hold enough probability
GROWTH = 16
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them would overflow
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen. `position` is the token's own; `sampled` how many tokens came before it; `tokens`
    all that are known, int64, the sampled ones last."""

    sampling: Sampling
    position: int
    sampled: int
    tokens: Sequence[int] = ()
    allowed: Tensor | None = None  # [vocab] bool: nothing else may come, whatever else is asked for


@dataclass(frozen=True)
class Drawn:
    token: int
    logprob: TokenLogprob | None


def sample(logits: Tensor, draws: Sequence[Draw], eos_ids: Sequence[int]) -> list[Drawn]:
    """One token for each row of logits [N, vocab]. Log-probabilities are of the model's own distribution.

    `eos_ids` cannot be drawn, nor can the request's stop tokens, while fewer than `min_tokens` were sampled.
    """
    allowed = _adjusted(logits, draws, eos_ids)
    best = allowed.argmax(-1).tolist()
    drawn = []
    for row, draw in enumerate(draws):
        token = best[row] if draw.sampling.temperature < GREEDY_BELOW else _choose(allowed[row], draw)
        drawn.append(Drawn(token, _logprob(logits[row], token, draw.sampling.logprobs)))
    return drawn


def scored(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens that are there already, [N] with logits [N, vocab], each with the `top` likeliest."""
    found = (_logprob(row, token, top) for row, token in zip(logits, tokens, strict=True))
    return tuple(one for one in found if one is not None)


def _adjusted(logits: Tensor, draws: Sequence[Draw], eos_ids: Sequence[int]) -> Tensor:
    """The logits after what each request forbids, favours and penalizes; the same tensor when none does."""
    rows = [row for row, draw in enumerate(draws) if _is_shaped(draw)]
    if not rows:
        return logits
    adjusted = logits.clone()
    for row in rows:
        _penalize(adjusted[row], draws[row])
        for token, bias in draws[row].sampling.logit_bias:
            adjusted[row, token] += bias
        if draws[row].sampled < draws[row].sampling.min_tokens:
            ends = {*eos_ids, *draws[row].sampling.stop_token_ids}
            adjusted[row, [i for i in sorted(ends) if 0 <= i < logits.shape[1]]] = -torch.inf
        if (allowed := draws[row].allowed) is not None:
            adjusted[row].masked_fill_(~allowed, -torch.inf)
            if adjusted[row].max() == -torch.inf:  # an answer that is complete ends, min_tokens or not
                adjusted[row] = logits[row].masked_fill(~allowed, -torch.inf)
    return adjusted


def _is_shaped(draw: Draw) -> bool:
    s = draw.sampling
    penalizes = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1
    return bool(draw.sampled < s.min_tokens or s.logit_bias or penalizes or draw.allowed is not None)


def _penalize(logits: Tensor, draw: Draw) -> None:
    """In place: repetition as in CTRL (Keskar et al., 2019, arXiv:1909.05858), then OpenAI's two."""
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = _counts(draw.tokens, logits) > 0
        worse = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits.copy_(torch.where(seen, worse, logits))
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = _counts(draw.tokens[len(draw.tokens) - draw.sampled :], logits)
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _counts(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """How often each token of the vocabulary is there, [vocab]."""
    counted = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=len(logits))
    return torch.from_numpy(counted).to(logits.device)


def _choose(logits: Tensor, draw: Draw) -> int:
    """The first candidate, best first, at which the summed probability passes this token's random number."""
    sampling, number = draw.sampling, uniform(draw.sampling.seed, draw.position)
    scaled = logits.float() / sampling.temperature
    if sampling.min_p:
        scaled = scaled.masked_fill(scaled < scaled.max() + math.log(sampling.min_p), -torch.inf)
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
