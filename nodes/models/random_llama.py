"""Random Llamas, written without a model hub: one of 58M parameters for benchmarks, a tiny one for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from .cache import is_cached, new_folder, unwritable
from .checkpoint import expected_tensors
from .config import parse_config

Size = Literal["58m", "tiny", "tiny6", "wide"]
SEED = 0
# The tiny ones' weights are larger, so that logits lie well apart and tokens depend on the whole prompt. Two or three
# ranks can share tiny6, but for its tokens. The heads of wide are as vLLM's CPU kernels want them.
SIZES: dict[Size, dict[str, Any]] = {
    "58m": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 384, "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    },
    "wide": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384, "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    },
    "tiny6": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 6, "head_dim": 16, "vocab_size": 385, "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    },
}  # fmt: skip
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def write_random_llama(folder: Path, size: Size = "58m") -> Path:
    """Write the model into `folder` and return it; a folder that is already there is left as it is.

    Raises ConfigError naming PD_CACHE, where such models are kept, when it cannot be written.
    """
    if is_cached(folder):
        return folder
    with new_folder(folder) as building:
        config = _config(size)
        try:
            save_file(_tensors(config), building / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as e:
            raise unwritable(folder.parent, e) from None
        (building / "tokenizer.json").write_text(_tokenizer(config["vocab_size"]).to_str(pretty=True), "utf-8")
        (building / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(config)))
        (building / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SIZES[size],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Normal weights and norms of one, in the order of the checkpoint's names."""
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(parse_config(config, {})).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.empty(shape).normal_(0.0, config["initializer_range"], generator=generator)
    return tensors


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Words `w4`, `w5`, ... between spaces, one token each."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": config["max_position_embeddings"],
    }
