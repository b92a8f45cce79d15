"""A rank's weights of latent attention and of experts.

Where rotated channels stand in pairs, rows are put into the order of two halves, of queries and of keys alike: so one
way to rotate serves all models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdbus.bus.errors import ConfigError
from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.linear import Linear

from .config import ModelConfig
from .deepseek import LatentConfig
from .latent import Compressed, LatentAttention
from .mlp import Experts, GatedMlp, Router
from .source import Source

NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says


def load_latent(
    source: Source, prefix: str, place: int, config: ModelConfig, group: Group, is_last: bool
) -> LatentAttention:
    sizes = config.latent
    assert sizes is not None
    heads = config.heads // group.size
    name = prefix + "kv_b_proj.weight"
    both = source.part(name)
    keys, values = torch.split(both.view(heads, -1, sizes.rank), [sizes.nope, sizes.value], 1)
    return LatentAttention(
        layer=place,
        heads=heads,
        sizes=sizes,
        scale=(sizes.nope + sizes.rope) ** -0.5 * config.rope.score_factor,
        is_last=is_last,
        q=_queries(source, prefix, sizes, heads),
        kv=_latents(source, prefix, sizes),
        kv_norm=source.norm(prefix + "kv_a_layernorm.weight", NORM_EPS),
        into_latent=source.make(name, keys.mT.contiguous(), None),
        from_latent=source.make(name, values.contiguous(), None),
        expand=source.make(name, both, None),
        out=source.linear(prefix, ["o_proj"], bias=sizes.bias),
    )


def _queries(source: Source, prefix: str, sizes: LatentConfig, heads: int) -> Linear:
    name = prefix + ("q_b_proj.weight" if sizes.q_rank else "q_proj.weight")
    rows = source.part(name)
    by_head = rows.view(heads, sizes.nope + sizes.rope, -1)
    up = source.make(name, _in_halves(by_head, sizes).view(rows.shape), None)
    if not sizes.q_rank:
        return up
    down = source.linear(prefix, ["q_a_proj"], bias=sizes.bias)
    return Compressed(down, source.norm(prefix + "q_a_layernorm.weight", NORM_EPS), up)


def _latents(source: Source, prefix: str, sizes: LatentConfig) -> Linear:
    name = prefix + "kv_a_proj_with_mqa"
    weight = _in_halves(source.get(f"{name}.weight")[None], sizes)[0]
    bias = _in_halves(source.get(f"{name}.bias")[None], sizes)[0] if sizes.bias else None
    return source.make(f"{name}.weight", weight, bias)


def _in_halves(rows: Tensor, sizes: LatentConfig) -> Tensor:
    """`rows` [heads, channels, ...], the last `rope` channels of each head from pairs to halves."""
    if not sizes.interleaved:
        return rows
    fixed, pairs = rows[:, : -sizes.rope], rows[:, -sizes.rope :]
    return torch.cat([fixed, pairs[:, ::2], pairs[:, 1::2]], 1)


def load_experts(source: Source, prefix: str, config: ModelConfig, pad_to: int) -> Experts:
    experts = config.experts
    assert experts is not None
    gate, bias = f"{prefix}gate.weight", f"{prefix}gate.e_score_correction_bias"
    return Experts(
        router=Router(
            config=experts,
            gate=source.make(gate, source.get(gate, torch.float32), None),
            bias=source.get(bias, torch.float32) if experts.sigmoid else None,
        ),
        experts=tuple(_expert(source, f"{prefix}experts.{i}.") for i in range(experts.count)),
        shared=_expert(source, f"{prefix}shared_experts."),
        whole=source.shards.whole,
        pad_to=pad_to,
    )


def _expert(source: Source, prefix: str) -> GatedMlp:
    """It gives this rank's part of what the whole one gives."""
    names = (f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down"))
    return GatedMlp(*(source.make(name, _finite(name, source.part(name)), None) for name in names))


def _finite(name: str, weight: Tensor) -> Tensor:
    """Damage elsewhere shows in a node's first logits; those may be other experts'."""
    if not bool(torch.isfinite(weight).all()):
        raise ConfigError("--model", f"tensor {name} is damaged: it has weights that are no finite numbers")
    return weight
