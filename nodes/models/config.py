"""What a model is, from its config.json: sizes, position encoding, special tokens. Knows nothing of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared
from pdbus.connector.layout import heads_of

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")
DEMO_NAME = "smollm2-135m-instruct"
DEMO_NAMES = (DEMO_NAME, "smollm2-135m")  # served under the first, whichever was asked for


class RopeConfig(Declared):
    """Rotary position encoding. `kind` linear divides positions by `factor`; llama3 only the slow frequencies."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


class ModelConfig(Declared):
    """A decoder of the Llama family. `max_positions` in tokens; `head_dim`, `hidden`, `ffn` in channels."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class ResolvedModel(Declared):
    """A model that can be loaded: its folder (absolute), the name it is served under, its configuration."""

    folder: str
    name: str
    config: ModelConfig


def resolve_model(name_or_path: str) -> ResolvedModel:
    """Find a model and check it without reading its weights. Imports no torch.

    Takes a Hugging Face folder, a GGUF file (converted into the cache first) or the demo model's name (fetched
    into the cache first). Raises ConfigError naming `--model` and what would be right.
    """
    from .checkpoint import check_tensors, open_checkpoint

    folder = _find_folder(name_or_path)
    config = read_config(folder)
    check_tensors(config, open_checkpoint(folder))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError("--model", f"{folder} has no tokenizer.json")
    return ResolvedModel(folder=str(folder), name=_served_name(name_or_path), config=config)


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Whether ranks can share the model. Raises ConfigError naming `--tp`."""
    for name, count in (("attention heads", config.heads), ("channels of the feed-forward layers", config.ffn)):
        if count % ranks:
            raise ConfigError("--tp", f"{ranks} ranks cannot share the model's {count} {name} equally")
    heads_of(config.kv_heads, ranks, 0)


def _find_folder(name_or_path: str) -> Path:
    if name_or_path in DEMO_NAMES:
        from .demo import fetch_demo_model

        return fetch_demo_model()
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        from .gguf import convert_to_cache

        return convert_to_cache(path)
    if not path.is_dir():
        raise ConfigError(
            "--model",
            f"{name_or_path!r} is no folder, no .gguf file and not the demo model's name, {DEMO_NAME!r}",
        )
    return path.resolve()


def _served_name(name_or_path: str) -> str:
    if name_or_path in DEMO_NAMES:
        return DEMO_NAME
    path = Path(name_or_path).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def read_config(folder: Path) -> ModelConfig:
    """The configuration in `folder`. Raises ConfigError naming `--model` for what is missing or not supported."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.is_file() else {})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError("--model", f"{path.parent} has no {path.name}: it must be a Hugging Face folder") from None
    except (OSError, ValueError) as e:
        raise ConfigError("--model", f"cannot read {path}: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", f"{path} holds no JSON object")
    return value


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """config.json and generation_config.json as a ModelConfig. Raises ConfigError for what we cannot compute."""
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise ConfigError("--model", f"architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_variants(raw)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        layers=_positive(raw, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_positive(raw, "num_key_value_heads", heads),
        head_dim=_positive(raw, "head_dim", hidden // heads),
        ffn=_positive(raw, "intermediate_size"),
        vocab=_positive(raw, "vocab_size"),
        max_positions=_positive(raw, "max_position_embeddings", 2048),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        bos_ids=_ids(generation.get("bos_token_id", raw.get("bos_token_id"))),
        eos_ids=_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ConfigError("--model", f"{heads} heads of {config.head_dim} over {config.kv_heads} KV heads do not fit")
    return config


def _refuse_variants(raw: dict[str, Any]) -> None:
    sliding = raw.get("sliding_window") is not None and raw.get("use_sliding_window", True)
    wrong = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "sliding_window": sliding and raw["sliding_window"] < raw.get("max_position_embeddings", 0),
        "quantization_config": raw.get("quantization_config"),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1) != 1,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError("--model", f"config.json: {key} = {raw[key]!r} is not supported")


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ConfigError("--model", f"config.json: {key} is {value!r}, but must be a positive integer")
    return value


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and the newer rope_parameters that holds everything."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError("--model", f"config.json: rope type {kind!r} is not supported; supported: {ROPE_TYPES}")
    try:
        return RopeConfig(
            theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            kind=kind,
            factor=float(rope.get("factor", 1.0)),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            original_positions=int(rope.get("original_max_position_embeddings", 8192)),
        )
    except (TypeError, ValueError) as e:
        raise ConfigError("--model", f"config.json: rope settings {rope!r}: {e}") from None


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
