"""A rank's tensors by name, from however many files, cast and moved as asked, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from pdbus.nodes.engines.linear import Linear

from .checkpoint import Checkpoint
from .shards import Shards
from .step import RmsNorm

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]  # of a tensor's name, weight and bias: LinearMaker's


@dataclass(frozen=True)
class Source:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: str
    make: MakeLinear
    shards: Shards

    def mapped(self, name: str) -> Tensor:
        """As stored, in pages of the file."""
        with safe_open(self.checkpoint[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor."""
        stored = self.checkpoint[name]
        data = torch.from_numpy(np.fromfile(stored.file, np.uint8, stored.size, offset=stored.offset))
        return data.view(STORED[stored.dtype]).view(stored.shape).to(device=self.device, dtype=dtype or self.dtype)

    def part(self, name: str) -> Tensor:
        """This rank's part of a tensor."""
        return self.shards.part(name, self.get(name))

    def parts(self, names: Sequence[str]) -> Tensor:
        """The rows of several tensors' parts under each other."""
        if len(names) == 1:
            return self.part(names[0])
        shapes = [self.shards.part(n, torch.empty(self.checkpoint[n].shape, device="meta")).shape for n in names]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(stacked, rows), strict=True):
            part.copy_(self.part(name))
        return stacked

    def norm(self, name: str, eps: float) -> RmsNorm:
        weight = self.get(name)
        return RmsNorm(weight, weight.new_tensor(eps, dtype=torch.float32))

    def linear(self, prefix: str, names: Sequence[str], *, bias: bool = False) -> Linear:
        """What the whole layer's weights `prefix` + name + `.weight` give, under each other, their biases likewise."""
        weights = [f"{prefix}{name}.weight" for name in names]
        biases = self.parts([f"{prefix}{name}.bias" for name in names]) if bias else None
        return self.shards.linear(weights[0], self.make(weights[0], self.parts(weights), biases))

    def head(self, name: str, weight: Tensor) -> Linear:
        return self.shards.head(self.make(name, self.shards.head_part(weight), None))
