"""GGUF files become Hugging Face folders: safetensors in float32, config.json, tokenizer.json, chat template.

One path for all that follows: nothing else reads GGUF. llama.cpp keeps the rows of q and k in the order of its
interleaved rotary encoding; they are put back into the order of the two halves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdbus.bus.errors import ConfigError

from .cache import is_cached, models_cache, new_folder

Array = NDArray[Any]
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
EDGE_BYTES = 1 << 20  # of each end of a file that tell it from others
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_to_cache(path: Path) -> Path:
    """The cached conversion of one GGUF file, made if need be. Raises ConfigError naming `--model`, or PD_CACHE when
    the cache cannot be written."""
    target = models_cache() / f"{path.stem}-{_content_key(path)}"
    if not is_cached(target):
        with new_folder(target) as folder:
            convert(path, folder)
    return target


def _content_key(path: Path) -> str:
    try:
        with path.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            head = f.read(EDGE_BYTES)
            f.seek(max(0, size - EDGE_BYTES))
            return xxhash.xxh3_64_hexdigest(head + f.read(EDGE_BYTES) + str(size).encode())
    except OSError as e:
        raise ConfigError("--model", f"cannot read {path}: {e.strerror}") from None


def convert(path: Path, folder: Path, progress: Callable[[float], None] = lambda done: None) -> None:
    """Write `path` into `folder`. `progress` hears the share done, 0 to 1. Raises ConfigError naming `--model`."""
    try:
        reader = gguf.GGUFReader(path)
        meta = _Metadata(reader)
        tensors = {_hf_name(t.name): t for t in reader.tensors if not t.name.startswith("rope_freqs")}
        config, tokenizer = _config(meta, "lm_head.weight" in tensors), _tokenizer(meta)
        _write_tensors(folder / "model.safetensors", tensors, config, progress)
    except ConfigError:
        raise
    except (ValueError, KeyError, IndexError, struct.error) as e:
        raise ConfigError("--model", f"{path} is no GGUF file, or is truncated or damaged: {e}") from None
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta, special))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


class _Metadata:
    """A GGUF file's key-value pairs. A missing key raises ConfigError unless a default is given."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = ...) -> Any:
        field = self._fields.get(key)
        if field is None and default is ...:
            raise ConfigError("--model", f"the GGUF file has no {key}")
        return default if field is None else field.contents()


def _hf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise ConfigError("--model", f"the GGUF file has a tensor {name} that no Llama has")


def _config(meta: _Metadata, has_head: bool) -> dict[str, Any]:
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ConfigError("--model", f"GGUF architecture {architecture!r} is not supported; supported: 'llama'")
    heads, hidden = meta.get("llama.attention.head_count"), meta.get("llama.embedding_length")
    bos, eos = meta.get("tokenizer.ggml.bos_token_id", None), meta.get("tokenizer.ggml.eos_token_id", None)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta.get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": meta.get("llama.feed_forward_length"),
        "num_hidden_layers": meta.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": meta.get("llama.context_length"),
        "rms_norm_eps": _shortest(meta.get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": not has_head,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", eos),
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """1e-5 was stored as float32; read back as a double it would be 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_tensors(
    file: Path, tensors: dict[str, Any], config: dict[str, Any], progress: Callable[[float], None]
) -> None:
    """Safetensors in float32, one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 64)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(packed)) + packed)
        for name, tensor in tensors.items():
            out.write(np.ascontiguousarray(_float32(name, tensor, config), dtype="<f4").data)
            progress(header[name]["data_offsets"][1] / end)


def _float32(name: str, tensor: Any, config: dict[str, Any]) -> Array:
    try:
        values: Array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ConfigError("--model", f"GGUF type {tensor.tensor_type.name} of {name} is not supported") from None
    if name.endswith("q_proj.weight"):
        return _halves(values, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return _halves(values, config["num_key_value_heads"])
    return values


def _halves(weight: Array, heads: int) -> Array:
    """Rows [head, pair, 2] of the interleaved rotary encoding to rows [head, 2, pair]."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(meta: _Metadata) -> Tokenizer:
    """Byte-level BPE. Raises ConfigError for the other kinds."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2"):
        raise ConfigError(
            "--model",
            f"a GGUF tokenizer of kind {kind!r} ({pre!r}) is not supported; use the model's Hugging Face folder",
        )
    tokens = meta.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_]) if pre == "smollm" else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(meta: _Metadata, special: dict[str, int | None]) -> dict[str, Any]:
    tokens = meta.get("tokenizer.ggml.tokens")
    named = {key.removesuffix("_id"): tokens[i] for key, i in special.items() if i is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "model_max_length": meta.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta.get("tokenizer.chat_template", None),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}, indent=1), encoding="utf-8")
