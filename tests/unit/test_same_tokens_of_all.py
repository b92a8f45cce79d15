"""Every architecture, greedy and seeded, with every way to speculate and chunks of 32 and 512: a prompt prefilled on
one node and decoded on another gives the tokens of one node that does not speculate.

Everything between the two engines is real but the network: the mover reads over loopback what the plan says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.messages import Sampling

from tests.deepseek_models import V2, V3, write_deepseek, write_drafting
from tests.torch_models import cut, load
from tests.unit.test_latent_hand_off import HERE, LENGTH, THERE, Node, read
from tests.unit.test_layout_grid import BLOCKS

TOKENS = 22
GROUPED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 512, "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": GROUPED | {"architectures": [f"{name}ForCausalLM"]}
       for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    "DeepseekV2ForCausalLM": V2, "DeepseekV3ForCausalLM": V3,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculate": 4},
    "draft": {"speculate": 3, "speculate_method": "draft"},
    "mtp": {"speculate": 1, "speculate_method": "mtp"},
}
PROMPT = [*range(40, 49)] * 4 + [40]  # repeats itself, so that its end has come before
assert len(PROMPT) == LENGTH


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    into = tmp_path_factory.mktemp("models")
    made = {name: write_deepseek(into / name, config) for name, config in CONFIGS.items()}
    return made | {"mtp": write_drafting(into / "mtp", V3, guessing=True)}


def every() -> list[Any]:
    """One of each way in `make test`, all in `make check-long`."""
    cells = []
    for architecture in CONFIGS:
        ways = [way for way in WAYS if way != "mtp" or architecture == "DeepseekV3ForCausalLM"]
        for way in ways:
            for seeded in (False, True):
                for chunk in (32, 512):
                    short = chunk == 32 and seeded and (architecture, way) in SHORT
                    marks = () if short else (pytest.mark.long,)
                    name = (
                        f"{architecture.removesuffix('ForCausalLM')}-{way}-{'seeded' if seeded else 'greedy'}-{chunk}"
                    )
                    cells.append(pytest.param(architecture, way, seeded, chunk, marks=marks, id=name))
    return cells


SHORT = {("Qwen3ForCausalLM", "off"), ("MistralForCausalLM", "ngram")}


@pytest.mark.parametrize(("architecture", "way", "seeded", "chunk"), every())
def test_a_pair_says_what_one_node_says(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, architecture: str, way: str, seeded: bool, chunk: int
) -> None:
    folder = folders["mtp" if way == "mtp" else architecture]
    sampling = Sampling(max_tokens=TOKENS, **({"temperature": 0.7, "seed": 11, "top_p": 0.9} if seeded else {}))
    options = WAYS[way] | ({"draft_model": str(folder)} if way == "draft" else {})

    alone = Node(load(folder, blocks=BLOCKS, deterministic=True).args, 1, monkeypatch)
    alone.open(PROMPT, sampling=sampling)
    whole = said(alone, alone.step(0, LENGTH, HERE))

    args = load(folder, blocks=BLOCKS, deterministic=True, **options).args
    prefill, decode = Node(args, 1, monkeypatch), Node(args, 1, monkeypatch)
    prefill.open(PROMPT, sampling=sampling)
    at = 0
    for count in cut(LENGTH, chunk):
        first = prefill.step(at, count, [] if at else THERE, sample=at + count == LENGTH)
        at += count
    read(prefill, decode)
    decode.open(PROMPT, [first.token], first.draft, sampling)
    tokens = [first.token, *said(decode, decode.step(LENGTH, 1, HERE), 1)]
    assert tokens == whole


def said(node: Node, result: Any, before: int = 0) -> list[int]:
    """Goes on until there are TOKENS with the `before` that were said elsewhere."""
    tokens = [result.token, *(more.token for more in result.more)]
    while before + len(tokens) < TOKENS:
        result = node.step(LENGTH + before + len(tokens) - 1, 1, [])
        tokens += [result.token, *(more.token for more in result.more)]
    return tokens
