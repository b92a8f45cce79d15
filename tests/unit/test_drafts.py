"""Prompt lookup, and speculation with it: more tokens a step, and the same ones."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.messages import Sampling
from pdbus.connector.ipc import StepRow
from pdbus.nodes.engines.drafts import lookup
from pdbus.nodes.models.random_llama import write_random_llama

from tests.torch_models import Loaded, load

SIZE = 16


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3], 1, [9]),
        ([5, 2, 3, 7, 6, 2, 3, 8, 2, 3], 2, [8, 2]),  # what came last holds
        ([4, 1, 2, 3, 7, 4, 1, 2, 3, 8, 9, 1, 2, 3], 1, [8]),  # of the longest that came before
        ([5, 5, 5, 5], 4, [5]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([1, 2, 1, 2], 0, []),
        ([7, 1, 8, 1], 3, []),  # one token alone guesses badly
    ],
)
def test_what_followed_the_last_time_is_guessed(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert lookup(array("q", tokens), most) == drafts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


def answer(loaded: Loaded, prompt: list[int], sampling: Sampling) -> tuple[list[int], int]:
    """All tokens, as a scheduler would have them computed, and how many steps that took."""
    loaded.engine.open(1, prompt, sampling)
    tokens: list[int] = []
    steps, computed, known, blocks = 0, 0, len(prompt), 0
    while len(tokens) < sampling.max_tokens:
        needed = -(-known // SIZE)
        new = array("I", range(blocks, needed)).tobytes()
        step = StepRow(seq=1, start=computed, count=known - computed, new_blocks=new, sample=True)
        [row] = loaded.engine.step([step])
        drawn = [row.token, *(more.token for more in row.more)]
        assert known + len(drawn) - 1 <= needed * SIZE, "a draft was computed into a block that is not held"
        tokens += drawn
        computed, known, blocks, steps = known + len(drawn) - 1, known + len(drawn), needed, steps + 1
    loaded.engine.close(1)
    assert len(tokens) == sampling.max_tokens, "no more than asked for"
    return tokens, steps


REPEATING = [11, 12, 13, 14, 15, 16] * 6
SAMPLINGS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7, "seed": 3, "top_k": 5}, {"frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"logprobs": 2},
]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_without_drafts(folder: Path, sampling: dict[str, Any]) -> None:
    asked = Sampling(max_tokens=60, **sampling)
    for prompt in (REPEATING, [9], list(range(20, 70))):
        plain, steps = answer(load(folder, deterministic=True), prompt, asked)
        speculated, fewer = answer(load(folder, deterministic=True, speculate=4), prompt, asked)
        assert speculated == plain
        assert fewer <= steps == 60


def test_an_answer_that_repeats_itself_takes_fewer_steps(folder: Path) -> None:
    """A bias makes the model say one token for ever."""
    asked = Sampling(max_tokens=40, logit_bias=((77, 100.0),))
    tokens, steps = answer(load(folder, speculate=4), [1, 2, 3], asked)
    assert tokens == [77] * 40 and steps < 25


def test_no_draft_goes_beyond_the_context(folder: Path) -> None:
    """Of 27 tokens: 21 are given, and 6 come, though more were asked for."""
    loaded = load(folder, speculate=4, max_model_len=27)
    loaded.engine.open(1, [77] * 21, Sampling(max_tokens=40, logit_bias=((77, 100.0),)))
    new = array("I", [0, 1]).tobytes()
    loaded.engine.step([StepRow(seq=1, start=0, count=21, new_blocks=new, sample=True)])
    known = 22
    while known < 27:
        [row] = loaded.engine.step([StepRow(seq=1, start=known - 1, count=1, sample=True)])
        known += 1 + len(row.more)
    assert known == 27


def test_each_token_has_its_logprobs(folder: Path) -> None:
    asked = Sampling(max_tokens=12, logprobs=2, logit_bias=((77, 100.0),))
    loaded = load(folder, speculate=4)
    loaded.engine.open(1, [1, 2, 3, 77, 77, 77], asked)
    loaded.engine.step([StepRow(seq=1, start=0, count=6, new_blocks=array("I", [0]).tobytes(), sample=True)])
    [row] = loaded.engine.step([StepRow(seq=1, start=6, count=1, sample=True)])
    assert (len(row.more), row.drafted) == (1, 1)
    assert all(more.token == 77 and more.logprob is not None and len(more.logprob.top) == 2 for more in row.more)
