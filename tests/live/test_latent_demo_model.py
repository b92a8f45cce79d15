"""The demo model with its attention written as latent attention: a re-parametrisation of a Llama, no DeepSeek model.

It computes the same function, so it must know the same capitals.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pdbus.bus.errors import ConfigError
from pdbus.nodes.evaluation.tasks import FILE
from pdbus.nodes.models.config import read_config
from pdbus.nodes.models.demo import fetch_demo_model

from tests.torch_models import Walk, load, run

pytestmark = [pytest.mark.model, pytest.mark.long]
EXPECTED: dict[str, Any] = json.loads(FILE.read_text())["capitals"]
RANK, NOPE = 256, 32  # channels of a latent: all values and a constant; channels of keys that must cancel
CONSTANT = 8192.0  # so large beside the values that the latent's norm is the same for all tokens


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = fetch_demo_model()
    except ConfigError as e:
        pytest.skip(str(e))
    return lift(source, tmp_path_factory.mktemp("models") / "lifted")


def lift(source: Path, folder: Path) -> Path:
    """All KV heads' keys become the rotated key that heads share, each query a window of it; the values the latent."""
    c = read_config(source)
    groups, rope = c.heads // c.kv_heads, c.kv_heads * c.head_dim
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}.self_attn."
        q, k, v = (tensors.pop(f"{prefix}{name}_proj.weight").view(-1, c.head_dim, c.hidden) for name in "qkv")
        pairs = torch.stack([torch.arange(c.head_dim // 2), torch.arange(c.head_dim // 2, c.head_dim)], 1).flatten()
        noise = torch.randn(c.heads, NOPE // 2, c.hidden, generator=generator) * 0.02
        queries = torch.zeros(c.heads, NOPE + rope, c.hidden)
        queries[:, :NOPE] = torch.cat([noise, -noise], 1)
        up = torch.zeros(c.heads, NOPE + c.head_dim, RANK)
        up[:, :NOPE, :rope] = torch.randn(c.heads, NOPE // 2, rope, generator=generator).repeat(1, 2, 1) * 0.02
        for head in range(c.heads):
            window = slice(head // groups * c.head_dim, (head // groups + 1) * c.head_dim)
            scores = ((NOPE + rope) / c.head_dim) ** 0.5  # attention divides by the root of another width
            queries[head, NOPE:][window] = q[head][pairs] * scores
            up[head, NOPE:, window] = torch.eye(c.head_dim)
        bias = torch.zeros(RANK + rope)
        bias[rope] = CONSTANT
        spare = torch.zeros(RANK - rope, c.hidden)
        tensors |= {
            f"{prefix}q_proj.weight": queries.flatten(0, 1),
            f"{prefix}kv_a_proj_with_mqa.weight": torch.cat([v.flatten(0, 1), spare, k[:, pairs].flatten(0, 1)]),
            f"{prefix}kv_a_proj_with_mqa.bias": bias,
            f"{prefix}kv_a_layernorm.weight": torch.full((RANK,), CONSTANT / RANK**0.5),
            f"{prefix}kv_b_proj.weight": up.flatten(0, 1),
            f"{prefix}o_proj.bias": torch.zeros(c.hidden),
        }
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder)
    half = c.head_dim // 2
    factors = [c.rope.theta ** (2 * (i % half) / c.head_dim - 2 * i / rope) for i in range(rope // 2)]
    config = json.loads((source / "config.json").read_text()) | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": c.heads,
        "q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": rope,
        "v_head_dim": c.head_dim, "attention_bias": True, "first_k_dense_replace": c.layers,
        "rope_scaling": {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def asked(lifted: Path) -> list[tuple[list[int], int]]:
    """Prompts and the tokens that are right, of which the model knows EXPECTED["expected_hits"]."""
    tokenizer = Tokenizer.from_file(str(lifted / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    pairs = EXPECTED["pairs"].items()
    return [(ids(EXPECTED["prompt"].format(country=land)), ids(f" {town}")[0]) for land, town in pairs]


def test_it_knows_as_many_capitals_as_the_llama(lifted: Path, asked: list[tuple[list[int], int]]) -> None:
    loaded, hits = load(lifted, blocks=8), 0
    for seq, (prompt, right) in enumerate(asked):
        walk = Walk(loaded, seq, prompt, range(8), [len(prompt)])
        run(loaded, [walk], 1)
        hits += walk.tokens[0] == right
    assert hits == EXPECTED["expected_hits"]
