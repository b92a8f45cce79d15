"""Rotary position encoding (Su et al., 2021, arXiv:2104.09864): tables of cosines and sines, and the turning itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope import RopeConfig


def rotary_tables(rope: RopeConfig, head_dim: int, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, 1, head_dim / 2], with the device and type of `like`."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    angles = angles[:, None, :].to(device=like.device, dtype=torch.float32)
    cos, sin = (table.mul_(rope.attention_factor).to(like.dtype) for table in (angles.cos(), angles.sin()))
    return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place: heads [T, n, D] by the angles of [T, 1, D/2]."""
    first, second = heads.chunk(2, -1)
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, scaled as the configuration says."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.factors)
    kept = _kept_by_llama3(rope, frequencies) if rope.kind == "llama3" else _kept_by_yarn(rope, head_dim)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _kept_by_llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """How much of each frequency stays as it is: Llama 3.1's rope scaling."""
    turns = rope.original_positions * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Likewise, by the channels that turn `beta_fast` and `beta_slow` times within the original context."""

    def channel(turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - ((torch.arange(head_dim // 2).float() - first) / width).clamp(0.0, 1.0)
