"""Checkpoints become weights: read, checked, fused where one product can serve for several, and packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from pdbus.nodes.engines.group import Group
from pdbus.nodes.engines.linear import Linear

from .checkpoint import Checkpoint, check_tensors, open_checkpoint
from .config import ModelConfig
from .llama import BodyLayer, LastLayer, Weights
from .shards import Shards

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]  # of a tensor's name, weight [out, in] and bias [out]


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    make: MakeLinear,
    group: Group | None = None,
) -> Weights:
    """A rank's weights of the model in `folder`. Raises ConfigError naming `--model` and the file or tensor at fault.

    Q, K, V, gate and up are cut by what comes out of them, heads and channels; what goes into out and down then is a
    part, and so are their sums, which the ranks add. The head is cut by tokens. All else is on every rank.

    Never more is in memory than what stays and one matrix on its way: tensors are read, for pages of a mapped file
    would count until the process ends. Only the embedding of a CPU is mapped: few of its rows are ever used.
    """
    checkpoint = open_checkpoint(Path(folder))
    check_tensors(config, checkpoint)
    source = _Source(checkpoint, dtype, device, make, Shards(config, group or Group()))
    embed = source.mapped(EMBED) if device == "cpu" else source.get(EMBED)
    if config.tie_embeddings and device != "cpu":
        head = source.head(EMBED, embed)
    else:
        name = EMBED if config.tie_embeddings else HEAD
        head = source.head(name, source.get(name))
    return Weights(
        embed=embed,
        head=head,  # before the layers: the largest matrix on its way, while little stays
        body=tuple(_body_layer(source, i, config) for i in range(config.layers - 1)),
        last=_last_layer(source, config.layers - 1, config),
        norm=source.get("model.norm.weight"),
    )


def _body_layer(source: _Source, index: int, config: ModelConfig) -> BodyLayer:
    return BodyLayer(qkv=_projection(source, index, "qkv", config), **_common(source, index, config))


def _last_layer(source: _Source, index: int, config: ModelConfig) -> LastLayer:
    q, kv = (_projection(source, index, names, config) for names in ("q", "kv"))
    return LastLayer(q=q, kv=kv, **_common(source, index, config))


def _projection(source: _Source, index: int, names: str, config: ModelConfig) -> Linear:
    prefix = f"model.layers.{index}.self_attn."
    return source.linear(prefix, names, "_proj.weight", "_proj.bias" if config.qkv_bias else "")


def _common(source: _Source, index: int, config: ModelConfig) -> dict[str, Any]:
    layer = f"model.layers.{index}."
    norms = [source.get(f"{layer}self_attn.{x}_norm.weight") if config.qk_norm else None for x in ("q", "k")]
    return {
        "input_norm": source.get(layer + "input_layernorm.weight"),
        "out": source.linear(layer, ["self_attn.o_proj.weight"]),
        "post_norm": source.get(layer + "post_attention_layernorm.weight"),
        "gate": source.linear(layer, ["mlp.gate_proj.weight"]),
        "up": source.linear(layer, ["mlp.up_proj.weight"]),
        "down": source.linear(layer, ["mlp.down_proj.weight"]),
        "q_norm": norms[0],
        "k_norm": norms[1],
    }


class _Source:
    """A rank's tensors by name, from however many files, cast and moved as asked."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: str, make: MakeLinear, shards: Shards
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype, self._device, self._make = dtype, device, make
        self._shards = shards

    def mapped(self, name: str) -> Tensor:
        """As stored, in pages of the file."""
        with safe_open(self._checkpoint[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def get(self, name: str) -> Tensor:
        """The whole tensor."""
        stored = self._checkpoint[name]
        data = torch.from_numpy(np.fromfile(stored.file, np.uint8, stored.size, offset=stored.offset))
        return data.view(STORED[stored.dtype]).view(stored.shape).to(device=self._device, dtype=self._dtype)

    def linear(self, prefix: str, names: Sequence[str], suffix: str = "", bias: str = "") -> Linear:
        """The linear of this rank's part of the weights `prefix` + name + `suffix` under each other, their biases
        likewise."""
        weights = [prefix + name + suffix for name in names]
        biases = self._stacked([prefix + name + bias for name in names]) if bias else None
        return self._shards.linear(weights[0], self._make(weights[0], self._stacked(weights), biases))

    def head(self, name: str, weight: Tensor) -> Linear:
        return self._shards.head(self._make(name, self._shards.head_part(weight), None))

    def _stacked(self, names: Sequence[str]) -> Tensor:
        """The rows of several tensors' parts under each other."""
        if len(names) == 1:
            return self._shards.part(names[0], self.get(names[0]))
        shapes = [self._shards.part(n, torch.empty(self._checkpoint[n].shape, device="meta")).shape for n in names]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(stacked, rows), strict=True):
            part.copy_(self._shards.part(name, self.get(name)))
        return stacked
