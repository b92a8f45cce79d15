"""What tensors a Hugging Face folder stores, from the safetensors headers alone. Imports no torch."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared

from .config import ModelConfig
from .deepseek import ExpertsConfig, LatentConfig

HEADER_BYTES_MAX = 100 << 20  # what the safetensors library itself allows
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = ("F32", "F16", "BF16")


class StoredTensor(Declared):
    """One tensor as stored: `offset` and `size` in bytes within `file`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


Checkpoint = dict[str, StoredTensor]  # by tensor name, sorted


def open_checkpoint(folder: Path) -> Checkpoint:
    """Every tensor of a folder's safetensors, single or sharded. Raises ConfigError for a missing or cut file."""
    tensors: Checkpoint = {}
    for file in _files(folder):
        tensors.update(_read_header(file))
    return dict(sorted(tensors.items()))


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ConfigError("--model", f"{index} is no safetensors index") from None
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError("--model", f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _read_header(file: Path) -> Checkpoint:
    try:
        with file.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            if size < 8:
                raise ValueError(f"it has {size} bytes")
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(HEADER_BYTES_MAX, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(file, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise ConfigError("--model", f"{file} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError("--model", f"{file} is no safetensors file, or is damaged: {e}") from None
    end = max((t.offset + t.size for t in tensors.values()), default=0)
    if end > size:
        raise ConfigError("--model", f"{file} is truncated: it has {size} bytes, its header promises {end}")
    return tensors


def _stored(file: Path, entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - begin != prod(shape) * ITEM_BYTES.get(entry["dtype"], 0):
        raise ValueError(f"{entry['dtype']} of shape {shape} in {end - begin} bytes")
    return StoredTensor(file=str(file), dtype=entry["dtype"], shape=shape, offset=base + begin, size=end - begin)


Shapes = dict[str, tuple[int, ...]]  # by tensor name


def expected_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a model of this configuration must have."""
    c = config
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab, c.hidden)}
    for i in range(c.layers):
        shapes |= _layer(c, i)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    return shapes


def draft_tensors(config: ModelConfig) -> Shapes:
    """Of the first draft layer, which stands behind the others: those that are its own. It has the model's embedding
    and head, and checkpoints repeat them."""
    c, layer = config, f"model.layers.{config.layers}."
    norms = {f"{layer}{name}.weight": (c.hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {**_layer(c, c.layers), **norms, f"{layer}eh_proj.weight": (c.hidden, 2 * c.hidden)}


def _layer(c: ModelConfig, index: int) -> Shapes:
    layer = f"model.layers.{index}."
    shapes: Shapes = {f"{layer}{name}_layernorm.weight": (c.hidden,) for name in ("input", "post_attention")}
    attention = _latent_attention(c, c.latent) if c.latent else _grouped_attention(c)
    shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
    mlp = _experts(c, c.experts) if c.experts and not c.is_dense(index) else _gated(c, c.ffn)
    return shapes | {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}


def _grouped_attention(c: ModelConfig) -> Shapes:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: Shapes = {}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{name}_proj.weight"] = (rows, c.hidden)
        if c.qkv_bias:
            shapes[f"{name}_proj.bias"] = (rows,)
    if c.qk_norm:
        shapes |= {f"{name}_norm.weight": (c.head_dim,) for name in ("q", "k")}
    return shapes | {"o_proj.weight": (c.hidden, q)}


def _latent_attention(c: ModelConfig, a: LatentConfig) -> Shapes:
    queries = c.heads * (a.nope + a.rope)
    shapes: Shapes = {"q_proj.weight": (queries, c.hidden)}
    if a.q_rank:
        shapes = {
            "q_a_proj.weight": (a.q_rank, c.hidden),
            "q_a_layernorm.weight": (a.q_rank,),
            "q_b_proj.weight": (queries, a.q_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (a.rank + a.rope, c.hidden),
        "kv_a_layernorm.weight": (a.rank,),
        "kv_b_proj.weight": (c.heads * (a.nope + a.value), a.rank),
        "o_proj.weight": (c.hidden, c.heads * a.value),
    }
    if a.bias:
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased if f"{name}.weight" in shapes}
    return shapes


def _gated(c: ModelConfig, ffn: int) -> Shapes:
    return {
        "gate_proj.weight": (ffn, c.hidden), "up_proj.weight": (ffn, c.hidden), "down_proj.weight": (c.hidden, ffn),
    }  # fmt: skip


def _experts(c: ModelConfig, e: ExpertsConfig) -> Shapes:
    shapes: Shapes = {"gate.weight": (e.count, c.hidden)}
    if e.sigmoid:
        shapes["gate.e_score_correction_bias"] = (e.count,)
    members = {f"experts.{i}": e.ffn for i in range(e.count)} | {"shared_experts": e.shared * e.ffn}
    for member, ffn in members.items():
        shapes |= {f"{member}.{name}": shape for name, shape in _gated(c, ffn).items()}
    return shapes


def check_tensors(config: ModelConfig, checkpoint: Checkpoint, *, drafting: bool = False) -> None:
    """Raises ConfigError naming the first tensor that is missing, left over, misshapen or of another dtype. What only
    drafts is looked at if it is to be used."""
    expected = expected_tensors(config) | (draft_tensors(config) if drafting else {})
    for name, shape in expected.items():
        stored = checkpoint.get(name)
        if stored is None:
            raise ConfigError("--model", f"the checkpoint has no tensor {name}")
        if stored.shape != shape:
            raise ConfigError("--model", f"tensor {name} has shape {stored.shape}, config.json asks for {shape}")
        if stored.dtype not in FLOATS:
            raise ConfigError("--model", f"tensor {name} is {stored.dtype}; supported: {', '.join(FLOATS)}")
    for name in checkpoint:
        if name not in expected and not _harmless(name, config):
            raise ConfigError("--model", f"the checkpoint has a tensor {name} that {config.architecture} has not")


def _harmless(name: str, config: ModelConfig) -> bool:
    drafting = (f"model.layers.{config.layers + i}." for i in range(config.draft_layers))
    if name.startswith(tuple(drafting)):
        return True
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")
