"""Checkpoints become weights: read, checked, fused where one product can serve for several, and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdbus.connector.layout import heads_of
from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.linear import Linear
from pdbus.nodes.engines.stage import Stage

from .checkpoint import check_tensors, open_checkpoint
from .config import ModelConfig
from .decoder import Attention, DraftLayer, Layer, Weights
from .grouped import GroupedAttention, LastGroupedAttention
from .load_deepseek import load_experts, load_latent
from .mlp import GatedMlp
from .shards import Shards
from .source import MakeLinear, Source

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    make: MakeLinear,
    group: Group | None = None,
    stage: Stage | None = None,
    *,
    pad_to: int = 1,
    drafting: bool = False,
) -> Weights:
    """A rank's weights of the model in `folder`. Raises ConfigError naming `--model` and the file or tensor at fault.

    Which part of each matrix is a rank's: shards.py. Linears are given a multiple of `pad_to` rows, as long as the
    decoder is. With `drafting` the draft layer's, too. A stage of several has the weights of its layers alone, the
    first one besides them the embedding, the last one norm and head.

    Never more is in memory than what stays and one matrix on its way: tensors are read, for pages of a mapped file
    would count until the process ends. Only the embedding of a CPU is mapped: few of its rows are ever used.
    """
    checkpoint, group, stage = open_checkpoint(Path(folder)), group or Group(), stage or Stage()
    check_tensors(config, checkpoint, drafting=drafting)
    source = Source(checkpoint, dtype, device, make, Shards(config, group))
    embed = _embedding(source, device) if stage.is_first else None
    return Weights(
        embed=embed,
        # before the layers: the largest matrix on its way, while little stays
        head=_head(source, config, embed if device != "cpu" else None) if stage.is_last else None,
        layers=tuple(
            _layer(source, i, place, config, group, pad_to, is_last=i == config.layers - 1 and not drafting)
            for place, i in enumerate(stage.layers(config.layers))
        ),
        norm=source.norm("model.norm.weight", config.norm_eps) if stage.is_last else None,
        draft=_draft(source, config, group, pad_to) if drafting else None,
    )


def _embedding(source: Source, device: str) -> Tensor:
    return source.mapped(EMBED) if device == "cpu" else source.get(EMBED)


def _head(source: Source, config: ModelConfig, embed: Tensor | None) -> Linear:
    """`embed`: the embedding, where it is held in a form that the head could share."""
    name = EMBED if config.tie_embeddings else HEAD
    return source.head(name, source.get(name) if embed is None or name == HEAD else embed)


def _draft(source: Source, config: ModelConfig, group: Group, pad_to: int) -> DraftLayer:
    prefix = f"model.layers.{config.layers}."
    join = f"{prefix}eh_proj.weight"
    return DraftLayer(
        token_norm=source.norm(f"{prefix}enorm.weight", config.norm_eps),
        hidden_norm=source.norm(f"{prefix}hnorm.weight", config.norm_eps),
        join=source.make(join, source.get(join), None),
        layer=_layer(source, config.layers, config.layers, config, group, pad_to, is_last=True),
        norm=source.norm(f"{prefix}shared_head.norm.weight", config.norm_eps),
    )


def _layer(
    source: Source, index: int, place: int, config: ModelConfig, group: Group, pad_to: int, *, is_last: bool
) -> Layer:
    """`index` in the model, `place` in the cache."""
    prefix = f"model.layers.{index}."
    attend = _grouped if config.latent is None else load_latent
    attention: Attention = attend(source, f"{prefix}self_attn.", place, config, group, is_last)
    if config.is_dense(index):
        mlp: Any = GatedMlp(*(source.linear(f"{prefix}mlp.", [f"{name}_proj"]) for name in ("gate", "up", "down")))
    else:
        mlp = load_experts(source, f"{prefix}mlp.", config, pad_to)
    return Layer(
        input_norm=source.norm(prefix + "input_layernorm.weight", config.norm_eps),
        attention=attention,
        post_norm=source.norm(prefix + "post_attention_layernorm.weight", config.norm_eps),
        mlp=mlp,
        is_last=is_last,
    )


def _grouped(source: Source, prefix: str, place: int, config: ModelConfig, group: Group, is_last: bool) -> Attention:
    norms = [source.norm(f"{prefix}{x}_norm.weight", config.norm_eps) if config.qk_norm else None for x in ("q", "k")]
    common: dict[str, Any] = {
        "layer": place,
        "heads": config.heads // group.size,
        "kv_heads": len(heads_of(config.kv_heads, group.size, group.rank)),
        "head_dim": config.head_dim,
        "out": source.linear(prefix, ["o_proj"]),
        "q_norm": norms[0],
        "k_norm": norms[1],
    }
    q, k, v = ("q_proj", "k_proj", "v_proj")
    if not is_last:
        return GroupedAttention(qkv=source.linear(prefix, [q, k, v], bias=config.qkv_bias), **common)
    return LastGroupedAttention(
        q=source.linear(prefix, [q], bias=config.qkv_bias),
        kv=source.linear(prefix, [k, v], bias=config.qkv_bias),
        **common,
    )
