"""A prompt prefilled by stages and decoded on another node: the tokens are those of one node, bit for bit.

Everything between the engines is real but the network and the processes: rows go from thread to thread, and the mover
reads over loopback what the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32
from pdbus.connector.ipc import StepRow
from pdbus.connector.layout import blocks_for
from pdbus.nodes.engines import stage
from pdbus.nodes.engines.torch_engine import TorchEngine

from tests.deepseek_models import V3, write_deepseek
from tests.torch_models import BLOCK_SIZE, Loaded, Walk, cut, load, prompt_of, run
from tests.unit.test_latent_hand_off import Node
from tests.unit.test_layout_grid import BLOCKS, HandOff, through_loopback
from tests.unit.test_same_tokens_of_all import GROUPED

VOCAB, TOKENS = 384, 10
THERE, HERE = [5, 2, 3, 0], [6, 1, 7, 4]
SEEDED = Sampling(temperature=0.9, seed=11, top_p=0.9, max_tokens=TOKENS)
B = BLOCK_SIZE


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of three layers each; those of DeepSeek but the first have experts."""
    into = tmp_path_factory.mktemp("models")
    qwen = GROUPED | {"architectures": ["Qwen3ForCausalLM"]}
    tied = qwen | {"tie_word_embeddings": True}
    return {"qwen": write_deepseek(into / "qwen", qwen), "tied": write_deepseek(into / "tied", tied),
            "deepseek": write_deepseek(into / "v3", V3)}  # fmt: skip


def one_node(alone: Loaded, prompt: list[int], chunks: list[int], sampling: Sampling) -> list[int]:
    walk = Walk(alone, 1, prompt, range(4), chunks, sampling)
    run(alone, [walk], TOKENS)
    return walk.tokens


def prefilled(prefill: Node, prompt: list[int], chunks: list[int], sampling: Sampling, warm: int = 0) -> int:
    """The first token, of a node that has the first `warm` tokens in its blocks."""
    prefill.open(prompt, sampling=sampling)
    at, token = warm, -1
    for count in chunks:
        blocks = THERE[: blocks_for(len(prompt), B)] if at == warm else []
        token = prefill.step(at, count, blocks, sample=at + count == len(prompt)).token
        at += count
    prefill.close()
    return token


def decoded(prefill: Node, decode: Node, prompt: list[int], first: int, sampling: Sampling, have: int = 0) -> list[int]:
    """All tokens, after everything behind the first `have` has been read."""
    owned = [np.frombuffer(prefill.bytes(rank), np.uint8) for rank in range(prefill.geometry.ranks)]
    held = blocks_for(len(prompt), B)
    for rank, layout in enumerate(decode.layouts):
        ended = through_loopback(
            HandOff(prefill.geometry, owned, layout, rank, decode.bytes(rank), have, len(prompt),
                    tuple(THERE[have // B : held]), tuple(HERE[:held]))
        )  # fmt: skip
        assert ended.problem == ""
    decode.open(prompt, [first], sampling=sampling)
    tokens = [first, decode.step(len(prompt), 1, HERE).token]
    while len(tokens) < TOKENS:
        tokens.append(decode.step(len(prompt) + len(tokens) - 1, 1, []).token)
    decode.close()
    return tokens


def loaded(folder: Path) -> Loaded:
    return load(folder, blocks=BLOCKS, deterministic=True)


@pytest.mark.parametrize(
    ("pp", "sampling"),
    [
        pytest.param(2, Sampling(), id="2-greedy", marks=pytest.mark.long), pytest.param(2, SEEDED, id="2-seeded"),
        pytest.param(3, Sampling(), id="3-greedy", marks=pytest.mark.long),
        pytest.param(3, SEEDED, id="3-seeded", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_tokens_are_those_of_one_node_whatever_the_length(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, pp: int, sampling: Sampling
) -> None:
    alone = loaded(folders["qwen"])
    prefill, decode = Node(alone.args, 1, monkeypatch, pp), Node(alone.args, 1, monkeypatch)
    for length in (1, B - 1, B, B + 1, 50):
        for chunk in (50, 20):
            prompt, chunks = prompt_of(length, VOCAB, length), cut(length, chunk)
            first = prefilled(prefill, prompt, chunks, sampling)
            tokens = decoded(prefill, decode, prompt, first, sampling)
            assert tokens == one_node(alone, prompt, chunks, sampling), (length, chunk)


@pytest.mark.parametrize("name", ["deepseek", "tied"])
def test_latents_experts_and_tied_heads_go_by_stages(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    alone, prompt = loaded(folders[name]), prompt_of(37, VOCAB)
    prefill, decode = (Node(alone.args, 1, monkeypatch, pp) for pp in (2, 1))
    first = prefilled(prefill, prompt, [20, 17], SEEDED)
    assert decoded(prefill, decode, prompt, first, SEEDED) == one_node(alone, prompt, [37], SEEDED)


@pytest.mark.parametrize(("there", "here"), [(0, B), (B, 0), (2 * B, B), (B, 2 * B)])
def test_prefixes_that_either_side_has_cached_stay_where_they_are(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, there: int, here: int
) -> None:
    """In tokens: each stage has its own layers of what P has cached."""
    alone = loaded(folders["qwen"])
    prefill, decode = Node(alone.args, 1, monkeypatch, 2), Node(alone.args, 1, monkeypatch)
    prompt = prompt_of(45, VOCAB)
    whole = prefilled(prefill, prompt, [45], Sampling())
    decoded(prefill, decode, prompt, whole, Sampling())
    other = [*prompt[: max(there, here)], *prompt_of(12, VOCAB, 9)]
    first = prefilled(prefill, other, [len(other) - there], Sampling(), there)
    tokens = decoded(prefill, decode, other, first, Sampling(), here)
    assert tokens == one_node(alone, other, [len(other)], Sampling())


@pytest.mark.parametrize(("pp", "tp", "here"), [(2, 1, 2), (2, 2, 2)])
def test_stages_feed_several_ranks(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, pp: int, tp: int, here: int
) -> None:
    alone, prompt = loaded(folders["qwen"]), prompt_of(37, VOCAB)
    prefill, decode = Node(alone.args, tp, monkeypatch, pp), Node(alone.args, here, monkeypatch)
    first = prefilled(prefill, prompt, [20, 17], Sampling())
    assert decoded(prefill, decode, prompt, first, Sampling()) == one_node(alone, prompt, [37], Sampling())


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_step_of_many_prompts_is_computed_in_parts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Prompts of one token, of several parts, and one whose end alone is in the step; some sample, some do not."""
    monkeypatch.setattr(stage, "PART_ROWS", 8)
    lengths = (3, 1, 31, 1, 16)
    alone = load(folders["qwen"], blocks=BLOCKS, deterministic=deterministic)
    staged = Node(alone.args, 1, monkeypatch, 2)
    first, last = staged.run(lambda engine: together(engine, lengths))
    assert last == together(alone.engine, lengths)
    assert first == [-1] * len(lengths)


def together(engine: TorchEngine, lengths: Sequence[int]) -> list[int]:
    """What follows each prompt, computed in two steps of all of them; that of the third is not asked for."""
    tokens, halves, at = [-1] * len(lengths), [length // 2 for length in lengths], 0
    rows: tuple[list[StepRow], list[StepRow]] = ([], [])
    for seq, (length, half) in enumerate(zip(lengths, halves, strict=True)):
        engine.open(seq, prompt_of(length, VOCAB, seq), Sampling())
        blocks, at = pack_u32(range(at, at + blocks_for(length, B))), at + blocks_for(length, B)
        if half:
            rows[0].append(StepRow(seq=seq, start=0, count=half, new_blocks=blocks, sample=False))
        new = b"" if half else blocks
        rows[1].append(StepRow(seq=seq, start=half, count=length - half, new_blocks=new, sample=seq != 2))
    for some in rows:
        for result in engine.step(some):
            tokens[result.seq] = result.token
    return tokens


def test_a_stage_holds_the_weights_of_its_layers_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Node(loaded(folders["qwen"]).args, 1, monkeypatch, 3)
    first, middle, last = (engine._decoder.weights for engine in prefill.engines)
    assert [len(some.layers) for some in (first, middle, last)] == [1, 1, 1]
    assert [some.embed is None for some in (first, middle, last)] == [False, True, True]
    assert [some.head is None for some in (first, middle, last)] == [True, True, False]
    assert [some.norm is None for some in (first, middle, last)] == [True, True, False]
