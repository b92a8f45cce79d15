"""How the matrices of a model are held, and multiplied with: packed for the processor where that loses nothing.

Three forms, all with rows of the compute type in and out:

fp16      FBGEMM: weights in float16, products summed in float32. Half the bytes to stream, so 1.3 to 4 times as fast as
          the plain form on 1 to 16 rows. Loses nothing if every weight is a float16 number, as those of a checkpoint
          in bfloat16 are from 2**-17 (smaller ones only in part) up to 65504.
onednn    float32 in the blocks that oneDNN's kernels read; the plain form packs anew in every call, which at 4 to
          16 rows costs more than the product.
plain     what torch.nn.functional.linear does, on every device and for every type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pdbus.bus.errors import ConfigError

from .invariant import TiledLinear, measure_tiles

Linear = Callable[[Tensor], Tensor]  # rows [T, in] to [T, out]
Pack = Callable[[Tensor, Tensor | None], Linear]  # weight [out, in] and bias [out] in one of the forms

WEIGHTS = ("auto", "float32", "fp16")
FP16_MAX = 65504.0
ONEDNN_ROWS = 256  # the number of rows that oneDNN is told to pack for; a prefill chunk
CHECKED_ELEMENTS = 1 << 18  # of a matrix at a time: one that will not do is mostly known by its first


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def fp16(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: product(x, packed)  # type: ignore[no-any-return]


class LinearMaker:
    """Makes the linears of one model. `weights` is one of WEIGHTS.

    `packs`: this is float32 on a CPU; nothing else is packed. With `deterministic`, only forms whose rows were measured
    not to depend on each other, in tiles. Raises ConfigError naming `--weights` where fp16 is asked for but cannot be.
    """

    def __init__(self, weights: str, *, packs: bool, deterministic: bool) -> None:
        if weights not in WEIGHTS:
            raise ConfigError("--weights", f"{weights!r} is none of {', '.join(WEIGHTS)}")
        if weights == "fp16" and not packs:
            raise ConfigError("--weights", "fp16 needs --device cpu and --dtype float32")
        if weights == "fp16" and not has_fbgemm():
            raise ConfigError("--weights", "fp16 needs FBGEMM, which this PyTorch or processor has not; use float32")
        self._weights, self._packs, self._deterministic = weights, packs, deterministic
        self._tiles: dict[tuple[Pack, torch.Size], tuple[int, ...]] = {}

    def __call__(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The linear of `weight` [out, in]. `name` is the tensor's, for errors."""
        for pack in self._forms(name, weight):
            linear = pack(weight, bias)
            if not self._deterministic:
                return linear
            tiles = self._measured(pack, weight.shape, linear)
            if tiles:
                return TiledLinear(linear, tiles)
        raise ConfigError(
            "--deterministic", "this processor's matrix library gives a row other bits in another place of a batch"
        )

    def _forms(self, name: str, weight: Tensor) -> Iterator[Pack]:
        """Best first."""
        if self._weights == "fp16":
            if weight.abs().max() > FP16_MAX:
                raise ConfigError("--weights", f"{name} has weights beyond float16's {FP16_MAX:g}; use auto or float32")
            yield fp16
            return
        if self._packs and self._weights == "auto" and has_fbgemm() and is_float16(weight):
            yield fp16
        if self._packs and torch.backends.mkldnn.is_available():
            yield onednn
        yield plain

    def _measured(self, pack: Pack, shape: torch.Size, linear: Linear) -> tuple[int, ...]:
        if (pack, shape) not in self._tiles:
            self._tiles[pack, shape] = measure_tiles(linear, shape[1])
        return self._tiles[pack, shape]


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def is_float16(weight: Tensor) -> bool:
    """Is every value of this float32 tensor a float16 number? False for NaN."""
    parts = weight.reshape(-1).split(CHECKED_ELEMENTS)
    return all(torch.equal(part.half().float(), part) for part in parts)
