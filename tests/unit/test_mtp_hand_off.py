"""A prompt prefilled on one node and decoded on another, with a draft layer: tokens and drafts are those of one node.

The draft layer's KV is read with that of the others; the draft for the first step comes beside the first token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdbus.bus.messages import Sampling
from pdbus.connector.ipc import RowResult

from tests.deepseek_models import V3, write_drafting
from tests.torch_models import cut, load, prompt_of
from tests.unit.test_latent_hand_off import HERE, LENGTH, THERE, VOCAB, Node, read
from tests.unit.test_layout_grid import BLOCKS

TOKENS = 20
MTP: dict[str, Any] = {"speculate": 1, "speculate_method": "mtp"}


@pytest.fixture(scope="module", params=[True, False], ids=["guessing", "wrong"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, bool]:
    """Guesses of one are often right; those of the other hang on all KV."""
    folder = tmp_path_factory.mktemp("models") / "made"
    return write_drafting(folder, V3, guessing=request.param), request.param


class Said(NamedTuple):
    tokens: list[int]
    drafts: list[tuple[int, int, int]]  # of each step: tried, right, and what is expected after it


def decoded(node: Node, said: Said) -> Said:
    """Goes on until there are TOKENS."""
    while len(said.tokens) < TOKENS:
        take(said, node.step(LENGTH + len(said.tokens) - 1, 1, []))
    return said


def take(said: Said, result: RowResult) -> None:
    said.tokens.extend([result.token, *(more.token for more in result.more)])
    said.drafts.append((result.drafted, len(result.more), result.draft))


def prefilled(node: Node, chunk: int, blocks: list[int], sampling: Sampling) -> Said:
    prompt, at, said = prompt_of(LENGTH, VOCAB, seed=3), 0, Said([], [])
    node.open(prompt, sampling=sampling)
    for count in cut(LENGTH, chunk):
        result = node.step(at, count, [] if at else blocks, sample=at + count == LENGTH)
        at += count
    take(said, result)
    return said


LONG = pytest.mark.long
SEEDED = Sampling(max_tokens=TOKENS, temperature=0.4, seed=5)


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=TOKENS), pytest.param(SEEDED, marks=LONG)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize(("there", "here"), [(1, 1), pytest.param(1, 2, marks=LONG), pytest.param(2, 1, marks=LONG)])
def test_tokens_and_drafts_are_those_of_one_node(
    model: tuple[Path, bool], monkeypatch: pytest.MonkeyPatch, there: int, here: int, chunk: int, sampling: Sampling
) -> None:
    folder, guesses = model
    args = load(folder, blocks=BLOCKS, **MTP).args
    alone = Node(args, 1, monkeypatch)
    whole = decoded(alone, prefilled(alone, LENGTH, HERE, sampling))

    prefill, decode = Node(args, there, monkeypatch), Node(args, here, monkeypatch)
    first = prefilled(prefill, chunk, THERE, sampling)
    read(prefill, decode)
    decode.open(prompt_of(LENGTH, VOCAB, seed=3), first.tokens, first.drafts[0][2], sampling)
    take(first, decode.step(LENGTH, 1, HERE))
    assert first.drafts[1][0] == 1, "the first step after the hand-off speculates"
    assert decoded(decode, first) == whole
    assert (sum(right for _, right, _ in whole.drafts) >= 2) == guesses
