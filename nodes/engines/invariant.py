"""Linear layers whose rows do not depend on each other, bit for bit, on a matrix library that promises no such thing.

A library picks its kernel, and with it the order of additions, by the number of rows. MKL's AVX-512 code was seen to
differ between 1, 2..15 and 16 or more rows; its AVX2 code between 1, 2, 3, up to about 50, and more, and there even
by a row's place where the rows are no near multiple of 6. So rows are multiplied in tiles of a few fixed sizes,
and at start the sizes are measured: each that does not give the bits of the smallest is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pdbus.bus.errors import ConfigError

ROWS = 16  # the smallest tile; every step is padded to a multiple
LARGER_TILES = (256, 48)  # faster per row; multiples of ROWS


class TiledLinear:
    """A linear layer over rows in tiles of `tiles` rows (largest first, ROWS last)."""

    def __init__(self, tiles: Sequence[int]) -> None:
        self.tiles = tuple(tiles)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in], T a multiple of ROWS, by weight [out, in]."""
        out = x.new_empty(len(x), len(weight))
        at = 0
        for tile in self.tiles:
            while len(x) - at >= tile:
                torch.mm(x[at : at + tile], weight.t(), out=out[at : at + tile])
                at += tile
        return out if bias is None else out.add_(bias)


def measure_tiles(weights: Iterable[Tensor]) -> TiledLinear:
    """The tiles that give equal rows for the shapes of all these weights on this processor.

    Raises ConfigError naming `--deterministic` if even the smallest one gives a row other bits in another place.
    """
    shapes = {tuple(weight.shape): weight for weight in weights}
    generator = torch.Generator().manual_seed(0)
    good = set(LARGER_TILES)
    for weight in shapes.values():
        x = torch.randn(max(LARGER_TILES) + ROWS, weight.shape[1], generator=generator)
        expected = TiledLinear([ROWS])(x, weight)
        if not _is_invariant(ROWS, x, weight, expected):
            raise ConfigError(
                "--deterministic", "this processor's matrix library gives a row other bits in another place of a batch"
            )
        good = {tile for tile in good if _is_invariant(tile, x, weight, expected)}
    return TiledLinear([*sorted(good, reverse=True), ROWS])


def _is_invariant(tile: int, x: Tensor, weight: Tensor, expected: Tensor) -> bool:
    """Are the rows of one product of `tile` rows as expected, at several places in the tile?"""
    for first in (0, 5, ROWS - 1):
        if not torch.equal(torch.mm(x[first : first + tile], weight.t()), expected[first : first + tile]):
            return False
    return True
