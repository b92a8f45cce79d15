"""How the matrices of a model are held, and multiplied with: packed for the processor where that loses nothing.

Four forms, all with rows of the compute type in and out. The figures are whole steps of the 58M Llama on one core of
an AVX-512 machine, against the plain form.

fp16        FBGEMM: weights in float16, products summed in float32. Half the bytes to stream: 1.2, 1.6, 1.7 times as
            fast at 1, 4, 8 rows, the same in prefill. Loses nothing if every weight is a float16 number, if need be
            after a shift of all exponents: so it is with any checkpoint in bfloat16, which has 8 bits where float16
            has 11, unless a matrix spans more than 12 decimal orders.
onednn      float32 in the blocks that oneDNN's kernels read. The head, a wide matrix, takes 0.4 times the time at 8
            rows and 1.1 times at one; narrow ones lose up to a third at one row.
transposed  float32, what one row is multiplied with lying together: 1.05 times as fast at one row (more on AVX2), up
            to 1.2 times in prefill; slower only at 2 rows.
plain       what torch.nn.functional.linear does, on every device and for every type.

A matrix for each head is held as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pdbus.bus.errors import ConfigError

from .invariant import ROWS, TiledLinear, measure_tiles

Linear = Callable[[Tensor], Tensor]  # rows [T, in] to [T, out]
Pack = Callable[[Tensor, Tensor | None], Linear]  # weight [out, in] and bias [out] in one of the forms

WEIGHTS = ("auto", "float32", "fp16")
FP16_MAX = 65504.0
FP16_EXPONENT_MAX = 15  # shifted weights stay under 2 ** this
SHIFT_MAX = 64  # either way; rows shifted back by more could leave float32's range
WIDE = 8  # outputs per input from which a matrix counts as wide: no layer's has as many, every head has
ONEDNN_ROWS = 256  # the number of rows that oneDNN is told to pack for; a prefill chunk
CHECKED_ELEMENTS = 1 << 18  # of a matrix at a time: one that will not do is mostly known by its first


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def transposed(weight: Tensor, bias: Tensor | None) -> Linear:
    by_input = weight.t().contiguous()
    return (lambda x: torch.mm(x, by_input)) if bias is None else (lambda x: torch.addmm(bias, x, by_input))


def onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")


def by_head(weight: Tensor, bias: Tensor | None) -> Linear:
    """Of weights [heads, out, in], without a bias: each head's part of a row is multiplied with its own."""
    by_input = weight.mT

    def product(x: Tensor) -> Tensor:
        parts = x.view(x.shape[0], weight.shape[0], -1).transpose(0, 1)
        return torch.bmm(parts, by_input).transpose(0, 1).flatten(1)

    return product


def fp16(weight: Tensor, bias: Tensor | None, shift: int = 0) -> Linear:
    """The weights are held times 2 ** shift, the rows are multiplied by 2 ** -shift: neither loses a bit."""
    product = torch.ops.quantized.linear_dynamic_fp16.default
    if not shift:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return lambda x: product(x, packed)
    shifted, back = torch.ops.quantized.linear_prepack_fp16(weight * 2.0**shift, bias), 2.0**-shift
    return lambda x: product(x * back, shifted)


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
        self._tiles: dict[tuple[str, torch.Size], tuple[int, ...]] = {}
        self._made: list[tuple[Linear, Tensor]] = []  # with rows that fit

    def __call__(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The linear of `weight` [out, in] and `bias` [out], or of each head's weight [heads, out, in].

        `name` is the tensor's, for errors.
        """
        linear = self._best(name, weight, bias)
        rows = ROWS if self._deterministic else 1
        self._made.append((linear, weight.new_zeros(rows, _channels(weight.shape))))
        return linear

    def touch(self) -> Iterator[None]:
        """As few rows as can be through each linear in turn: its weights are in the caches afterwards."""
        for linear, rows in self._made:
            linear(rows)
            yield

    def _best(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        for form, pack in self._forms(name, weight):
            linear = pack(weight, bias)
            if not self._deterministic:
                return linear
            tiles = self._measured(form, weight.shape, linear)
            if tiles:
                return TiledLinear(linear, tiles)
        raise ConfigError(
            "--deterministic", "this processor's matrix library gives a row other bits in another place of a batch"
        )

    def _forms(self, name: str, weight: Tensor) -> Iterator[tuple[str, Pack]]:
        """Those that will do, best first."""
        if weight.dim() == 3:
            yield "by_head", by_head
            return
        if self._packs and self._weights != "float32" and has_fbgemm():
            shift = exact_shift(weight)
            if shift is None and self._weights == "fp16":
                _check_range(name, weight)
                shift = 0
            if shift is not None:
                yield "fp16", partial(fp16, shift=shift)
        if self._weights == "fp16":
            return
        if self._packs and _has_onednn() and weight.shape[0] >= WIDE * weight.shape[1]:
            yield "onednn", onednn
        if self._packs:
            yield "transposed", transposed
        yield "plain", plain

    def _measured(self, form: str, shape: torch.Size, linear: Linear) -> tuple[int, ...]:
        if (form, shape) not in self._tiles:
            self._tiles[form, shape] = measure_tiles(linear, _channels(shape))
        return self._tiles[form, shape]


def _channels(shape: torch.Size) -> int:
    """What goes into a linear of such weights, of all heads together."""
    return shape.numel() // shape[-2]


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def exact_shift(weight: Tensor) -> int | None:
    """By how much to shift the exponents of a float32 matrix for all its values to be float16 numbers; None: by none.

    0 if that does, for it costs nothing. Else what brings the largest value to the upper end of float16's range.
    """
    largest = _largest(weight)
    if not math.isfinite(largest):
        return None
    upwards = FP16_EXPONENT_MAX - math.frexp(largest)[1]
    shifts = (0, upwards) if abs(upwards) <= SHIFT_MAX else (0,)
    return next((shift for shift in shifts if _is_float16(weight, shift)), None)


def _is_float16(weight: Tensor, shift: int) -> bool:
    for part in torch.split(weight.reshape(-1), CHECKED_ELEMENTS):
        shifted = part * 2.0**shift
        if not torch.equal(shifted.half().float(), shifted):
            return False
    return True


def _check_range(name: str, weight: Tensor) -> None:
    """FBGEMM would take the nearest number that float16 has."""
    if not _largest(weight) <= FP16_MAX:
        raise ConfigError("--weights", f"{name} has weights beyond float16's {FP16_MAX:g}, or NaN; use auto or float32")


def _largest(weight: Tensor) -> float:
    """The largest magnitude, or NaN if there is one."""
    low, high = torch.aminmax(weight)
    return float(torch.maximum(-low, high))
