"""How a token is chosen: reproducibly, from whom it may be chosen, about as often as it should be."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pdbus.bus.messages import Sampling
from pdbus.nodes.engines.sampling import Draw, sample, uniform

VOCAB = 2000


def logits(rows: int = 1, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(row: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    """What is drawn from one distribution at `count` positions."""
    drawn = sample(row.expand(count, -1), [Draw(sampling, position, position) for position in range(count)], ())
    return [each.token for each in drawn]


def test_greedy_takes_the_likeliest() -> None:
    rows = logits(5)
    drawn = sample(rows, [Draw(Sampling(), 9, 0)] * 5, ())
    assert [each.token for each in drawn] == rows.argmax(-1).tolist()


def test_a_token_depends_on_seed_and_position_alone() -> None:
    """The prefill node draws the first token in another batch than the decode node would."""
    rows = logits(4)
    draws = [Draw(Sampling(temperature=1.0, seed=seed), 10 + seed, 0) for seed in range(4)]
    together = [each.token for each in sample(rows, draws, ())]
    alone = [sample(rows[i : i + 1], [draws[i]], ())[0].token for i in (3, 0, 2, 1)]
    assert [alone[1], alone[3], alone[2], alone[0]] == together


def test_seeds_and_positions_give_other_tokens() -> None:
    row = logits(spread=0.5)
    first, second = (tokens(row, Sampling(temperature=1.0, seed=seed), 50) for seed in (1, 2))
    assert len(set(first)) > 40
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 5


@pytest.mark.parametrize(("seeds", "positions"), [(10, 3000), (3000, 10)])
def test_random_numbers_are_uniform_and_unrelated(seeds: int, positions: int) -> None:
    """Over seeds and over positions; bounds are five standard deviations."""
    numbers = torch.tensor([[uniform(seed, position) for position in range(positions)] for seed in range(seeds)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert torch.histc(numbers, 10, 0, 1).sub(3000).abs().max() < 5 * (30_000 * 0.1 * 0.9) ** 0.5
    few = numbers if seeds == 10 else numbers.T
    assert torch.corrcoef(few).fill_diagonal_(0).abs().max() < 5 * 3000**-0.5


def test_a_negative_or_huge_seed_is_a_seed() -> None:
    assert 0 <= uniform(-5, 3) < 1
    assert 0 <= uniform(1 << 80, 3) < 1


@pytest.mark.parametrize("top_k", [1, 3, 40, 5000])
def test_top_k_leaves_the_k_best(top_k: int) -> None:
    row = logits(spread=0.3)
    allowed = set(row[0].topk(min(top_k, VOCAB)).indices.tolist())
    assert set(tokens(row, Sampling(temperature=5.0, top_k=top_k), 300)) <= allowed


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_top_p_leaves_the_fewest_that_hold_p(top_p: int) -> None:
    """Wide distributions too, where the nucleus reaches beyond the candidates that are looked at first."""
    row = logits(spread=1.0)
    order = row[0].double().softmax(0).sort(descending=True)
    nucleus = int((order.values.cumsum(0) < top_p).sum()) + 1
    drawn = set(tokens(row, Sampling(temperature=1.0, top_p=top_p), 400))
    assert drawn <= set(order.indices[:nucleus].tolist())
    assert len(drawn) > min(nucleus, 400) / 3


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(temperature=1.0, top_k=3, seed=5)])
def test_tokens_come_as_often_as_they_should(sampling: Sampling) -> None:
    row = torch.full((1, VOCAB), -50.0)
    row[0, [7, 8, 9, 10]] = torch.tensor([2.0, 1.0, 0.5, 0.0])
    scaled = (row[0] / sampling.temperature).softmax(0)
    if sampling.top_k:
        scaled[10] = 0
        scaled /= scaled.sum()
    counts = Counter(tokens(row, sampling, 4000))
    for token in (7, 8, 9, 10):
        assert abs(counts[token] / 4000 - float(scaled[token])) < 0.03


def test_top_p_stretches_what_is_left() -> None:
    row = torch.full((1, VOCAB), -50.0)
    row[0, [7, 8, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = Counter(tokens(row, Sampling(temperature=1.0, top_p=0.7), 4000))
    assert set(counts) == {7, 8}
    assert abs(counts[7] / 4000 - 0.625) < 0.03


def test_a_tiny_temperature_is_greedy() -> None:
    row = logits()
    assert set(tokens(row, Sampling(temperature=1e-40), 20)) == {int(row.argmax())}


def test_logprobs_are_the_models_own() -> None:
    """Neither temperature nor top-k changes what is reported."""
    row = logits()
    [drawn] = sample(row, [Draw(Sampling(temperature=3.0, top_k=50, logprobs=4), 1, 0)], ())
    wanted = row[0].log_softmax(0)
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(wanted[drawn.token]), abs=1e-4)
    assert [token for token, _ in drawn.logprob.top] == wanted.topk(4).indices.tolist()
    assert [value for _, value in drawn.logprob.top] == pytest.approx(wanted.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("asked", "found"), [(None, None), (0, ())])
def test_alternatives_only_when_asked_for(asked: int | None, found: tuple[()] | None) -> None:
    [drawn] = sample(logits(), [Draw(Sampling(logprobs=asked), 1, 0)], ())
    assert (drawn.logprob.top if drawn.logprob else None) == found


def test_ends_wait_for_min_tokens() -> None:
    row = logits()
    best, second, third = row[0].topk(3).indices.tolist()
    sampling = Sampling(min_tokens=2, stop_token_ids=(second, 10**6))
    early, late = (sample(row, [Draw(sampling, 9, sampled)], (best,))[0].token for sampled in (1, 2))
    assert (early, late) == (third, best)


def shaped(row: torch.Tensor, sampling: Sampling, known: list[int], sampled: int) -> int:
    """The greedy token after `known`, of which the last `sampled` are the answer's."""
    [drawn] = sample(row, [Draw(sampling, len(known), sampled, known)], ())
    return drawn.token


def test_presence_counts_once_and_frequency_each_time() -> None:
    row = torch.tensor([[5.0, 4.5, 4.0, 0.0]])
    assert shaped(row, Sampling(presence_penalty=0.6), [0, 0], 2) == 1
    assert shaped(row, Sampling(presence_penalty=0.4), [0, 0, 0], 3) == 0
    assert shaped(row, Sampling(frequency_penalty=0.4), [0, 0], 2) == 1
    assert shaped(row, Sampling(presence_penalty=-0.6), [1], 1) == 1


def test_the_prompt_counts_for_repetition_alone() -> None:
    row = torch.tensor([[5.0, 4.5, -1.0, 0.0]])
    assert shaped(row, Sampling(presence_penalty=2.0, frequency_penalty=2.0), [0, 3], 1) == 0
    assert shaped(row, Sampling(repetition_penalty=1.2), [0, 3], 1) == 1
    assert shaped(-row, Sampling(repetition_penalty=3.0), [2], 1) == 2 and (-row)[0, 2] == 1.0


def test_repetition_makes_negative_logits_more_negative() -> None:
    row = torch.tensor([[-1.0, -1.1]])
    assert shaped(row, Sampling(repetition_penalty=1.5), [0], 0) == 1


def test_a_bias_is_added_and_logprobs_stay_the_model_s() -> None:
    row = torch.tensor([[5.0, 4.5]])
    [drawn] = sample(row, [Draw(Sampling(logit_bias=((1, 100.0), (0, -100.0)), logprobs=0), 1, 0)], ())
    assert drawn.token == 1 and drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(row.log_softmax(-1)[0, 1]))
    assert row.tolist() == [[5.0, 4.5]]


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9, 1.0])
def test_min_p_leaves_what_has_that_share_of_the_likeliest(min_p: float) -> None:
    row = logits(spread=1.0)
    shares = row[0].double().softmax(0) / row[0].double().softmax(0).max()
    drawn = set(tokens(row, Sampling(temperature=1.0, min_p=min_p), 400))
    assert drawn <= set((shares >= min_p * 0.9999).nonzero().flatten().tolist())
    assert min_p < 1 or len(drawn) == 1
