"""Checkpoints become weights: mapped, checked, cast, and fused where one matrix product can serve for several."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from .checkpoint import check_tensors, open_checkpoint
from .config import ModelConfig
from .llama import LayerWeights, Weights


def load_weights(folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: str) -> Weights:
    """All weights of the model in `folder`. Raises ConfigError naming `--model` and the file or tensor at fault.

    Matrices that need no cast and no fusing (the embedding, the head) stay mapped, and so are shared between the
    processes of one machine.
    """
    checkpoint = open_checkpoint(Path(folder))
    check_tensors(config, checkpoint)
    source = _Source({name: tensor.file for name, tensor in checkpoint.items()}, dtype, device)
    embed = source.get("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(_layer(source, f"model.layers.{i}.", config) for i in range(config.layers)),
        norm=source.get("model.norm.weight"),
        head=embed if config.tie_embeddings else source.get("lm_head.weight"),
    )


class _Source:
    """Tensors by name, from however many files, cast and moved as asked."""

    def __init__(self, files: dict[str, str], dtype: torch.dtype, device: str) -> None:
        self._files = files
        self._open = {file: safe_open(file, framework="pt") for file in files.values()}
        self._dtype, self._device = dtype, device

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[self._files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.to(device=self._device, dtype=self._dtype)

    def stacked(self, prefix: str, names: str, suffix: str) -> torch.Tensor:
        """The rows of several tensors under each other."""
        return torch.cat([self.get(prefix + name + suffix) for name in names.split()])


def _layer(source: _Source, prefix: str, config: ModelConfig) -> LayerWeights:
    attention = prefix + "self_attn."
    return LayerWeights(
        input_norm=source.get(prefix + "input_layernorm.weight"),
        qkv=source.stacked(attention, "q k v", "_proj.weight"),
        qkv_bias=source.stacked(attention, "q k v", "_proj.bias") if config.qkv_bias else None,
        out=source.get(attention + "o_proj.weight"),
        post_norm=source.get(prefix + "post_attention_layernorm.weight"),
        gate_up=source.stacked(prefix + "mlp.", "gate up", "_proj.weight"),
        down=source.get(prefix + "mlp.down_proj.weight"),
    )
