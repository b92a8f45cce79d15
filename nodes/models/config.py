"""What a model is, from its config.json: sizes, position encoding, special tokens. Knows nothing of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared
from pdbus.connector.layout import heads_of

from .cache import is_in_cache
from .deepseek import ARCHITECTURES as DEEPSEEK
from .deepseek import ExpertsConfig, LatentConfig, read_experts, read_latent
from .fields import Fields
from .rope import RopeConfig, read_rope

LAYERS_MAX = 1024  # each layer's tensors are looked up one by one; no model has nearly as many layers
SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *DEEPSEEK)
DEMO_NAME = "smollm2-135m-instruct"
DEMO_NAMES = (DEMO_NAME, "smollm2-135m")  # served under the first, whichever was asked for


class ModelConfig(Declared):
    """A decoder of the Llama or DeepSeek family. `max_positions` in tokens; `head_dim`, `hidden`, `ffn` in channels.

    Where attention is latent, the cache has one head, that of the latents, and `head_dim` is their width.
    """

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
    qk_norm: bool  # of every head of Q and K
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    draft_layers: int = 0  # in the checkpoint behind the others; the first is used, if any

    @property
    def kv_parts(self) -> int:
        """Of a cache row: K and V, or the latent that is both."""
        return 1 if self.latent else 2

    @property
    def rotated(self) -> int:
        """The channels of a head that are rotated."""
        return self.latent.rope if self.latent else self.head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether it has a feed-forward layer, not experts."""
        return self.experts is None or layer < self.experts.first_layer


class ResolvedModel(Declared):
    """A model that can be loaded: its folder (absolute), the name it is served under, its configuration."""

    folder: str
    name: str
    config: ModelConfig


def resolve_model(name_or_path: str) -> ResolvedModel:
    """Find a model and check it without reading its weights. Imports no torch.

    Takes a Hugging Face folder, a GGUF file (converted into the cache first) or the demo model's name (fetched
    into the cache first). Raises ConfigError naming `--model` and what would be right, or PD_CACHE.
    """
    folder = _find_folder(name_or_path)
    try:
        config = _checked(folder)
    except ConfigError as e:
        if not is_in_cache(folder):
            raise
        raise ConfigError(e.setting, f"{e.problem}; delete {folder}, and it is made anew") from None
    return ResolvedModel(folder=str(folder), name=_served_name(name_or_path), config=config)


def _checked(folder: Path) -> ModelConfig:
    from .checkpoint import check_tensors, open_checkpoint

    config = read_config(folder)
    check_tensors(config, open_checkpoint(folder))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError("--model", f"{folder} has no tokenizer.json")
    return config


def check_drafting(model: ResolvedModel) -> None:
    """Whether it has a draft layer, whole. Raises ConfigError naming `--speculate-method` or `--model`."""
    from .checkpoint import check_tensors, open_checkpoint

    if not model.config.draft_layers:
        problem = f"mtp drafts with a layer of the model's own, and {model.name} has none (num_nextn_predict_layers)"
        raise ConfigError("--speculate-method", problem)
    check_tensors(model.config, open_checkpoint(Path(model.folder)), drafting=True)


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Whether ranks can share the model. Raises ConfigError naming `--tp`."""
    counts = {"attention heads": config.heads, "channels of the feed-forward layers": config.ffn}
    if config.experts:
        counts["channels of each expert"] = config.experts.ffn
    for name, count in counts.items():
        if count % ranks:
            raise ConfigError("--tp", f"{ranks} ranks cannot share the model's {count} {name} equally")
    heads_of(config.kv_heads, ranks, 0)


def _find_folder(name_or_path: str) -> Path:
    if name_or_path in DEMO_NAMES:
        from .demo import fetch_demo_model

        return fetch_demo_model().resolve()
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        from .gguf import convert_to_cache

        return convert_to_cache(path).resolve()
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
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError("--model", f"cannot read {path}: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", f"{path} holds no JSON object")
    return value


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """config.json and generation_config.json as a ModelConfig. Raises ConfigError for what we cannot compute."""
    fields = Fields("config.json", raw)
    architecture = _architecture(fields)
    layers, heads = fields.whole("num_hidden_layers", most=LAYERS_MAX), fields.whole("num_attention_heads")
    latent = read_latent(fields, architecture, heads) if architecture in DEEPSEEK else None
    vocab, max_positions = fields.whole("vocab_size"), fields.whole("max_position_embeddings", 2048)
    _refuse_variants(fields, max_positions, latent is not None)
    kv_heads, head_dim = (1, latent.rank + latent.rope) if latent else _heads(fields, heads)
    rope = read_rope(fields, max_positions, latent.rope if latent else head_dim)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=fields.whole("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.whole("intermediate_size"),
        vocab=vocab,
        max_positions=min(max_positions, rope.original_positions) if rope.kind == "longrope" else max_positions,
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=fields.switch("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_ids=_token_ids(fields, generation, "bos_token_id", vocab),
        eos_ids=_token_ids(fields, generation, "eos_token_id", vocab),
        latent=latent,
        experts=read_experts(fields, architecture, layers) if latent else None,
        draft_layers=fields.whole("num_nextn_predict_layers", 0, least=0, most=LAYERS_MAX) if latent else 0,
    )


def _heads(fields: Fields, heads: int) -> tuple[int, int]:
    """How many KV heads there are, and the channels of a head."""
    kv_heads = fields.whole("num_key_value_heads", heads)
    head_dim = fields.whole("head_dim", fields.whole("hidden_size") // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError("--model", f"config.json: {heads} heads of {head_dim} over {kv_heads} KV heads do not fit")
    return kv_heads, head_dim


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures") or ["none"]
    if not isinstance(names, list):
        raise fields.wrong("architectures", "must be a list of names")
    if names[0] not in SUPPORTED:
        problem = f"architecture {names[0]} is not supported; supported: {', '.join(SUPPORTED)}"
        raise ConfigError("--model", f"config.json: {problem}")
    return str(names[0])


def _refuse_variants(fields: Fields, max_positions: int, latent: bool) -> None:
    sliding = "sliding_window" in fields and fields.switch("use_sliding_window", True)
    wrong = {
        "hidden_act": fields.text("hidden_act", "silu") != "silu",
        "attention_bias": not latent and fields.switch("attention_bias", False),
        "mlp_bias": fields.switch("mlp_bias", False),
        "sliding_window": sliding and fields.whole("sliding_window") < max_positions,
        "quantization_config": fields.get("quantization_config"),
        "partial_rotary_factor": fields.real("partial_rotary_factor", 1.0) != 1,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise fields.error(key, f"= {fields.get(key)!r} is not supported")


def _token_ids(fields: Fields, generation: dict[str, Any], key: str, vocab: int) -> tuple[int, ...]:
    """generation_config.json's word holds, where it has one."""
    special = Fields("generation_config.json", generation)
    return special.token_ids(key, vocab) if key in special else fields.token_ids(key, vocab)
