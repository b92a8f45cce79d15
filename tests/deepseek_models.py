"""Small random DeepSeek models: configurations, and folders as they come from Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdbus.nodes.models.checkpoint import draft_tensors, expected_tensors
from pdbus.nodes.models.config import parse_config

from tests.tokenizers_made import byte_level

COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 384,
    "max_position_embeddings": 512, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
V2 = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
    "topk_method": "greedy", "norm_topk_prob": False,
}  # fmt: skip
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 40, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
}  # fmt: skip


def write_deepseek(folder: Path, config: dict[str, Any]) -> Path:
    """Weights large enough that logits lie well apart, and biases that matter."""
    return _write(folder, config, _drawn(expected_tensors(parse_config(config, {}))))


def write_drafting(folder: Path, config: dict[str, Any], *, guessing: bool) -> Path:
    """With a draft layer. Where it is `guessing`, the next token is for the most part a matter of the last one, and so
    is what the draft layer expects: it is often right. Else it never is."""
    config = config | {"num_nextn_predict_layers": 1}
    parsed = parse_config(config, {})
    tensors = _drawn(expected_tensors(parsed) | draft_tensors(parsed))
    layer = f"model.layers.{parsed.layers}."
    if guessing:
        tensors["model.embed_tokens.weight"] *= 3
        for name in tensors:
            if "o_proj.weight" in name or "down_proj.weight" in name:
                tensors[name] *= 0.03
        tensors[f"{layer}eh_proj.weight"] *= 0.05
        tensors[f"{layer}eh_proj.weight"] += torch.eye(parsed.hidden, 2 * parsed.hidden)
        tensors[f"{layer}enorm.weight"] = torch.ones(parsed.hidden)
        tensors[f"{layer}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    return _write(folder, config, tensors)


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: _tensor(name, shape, generator) for name, shape in shapes.items()}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    drawn = torch.empty(shape).normal_(0.0, 0.2, generator=generator)
    return 1 + drawn if name.endswith("norm.weight") else drawn
