"""Linear layers whose rows do not depend on each other, bit for bit, on matrix libraries that promise no such thing.

A library picks its kernel, and with it the order of additions, by the number of rows. MKL's AVX-512 code was seen to
differ between 1, 2..15 and 16 or more rows; its AVX2 code between 1, 2, 3, up to about 50, and more, and there even
by a row's place where the rows are no near multiple of 6; oneDNN's between 1 and more rows. So rows are multiplied in
tiles of a few fixed sizes, and at start the sizes are measured: each that does not give the bits of the smallest is
not used. FBGEMM's were never seen to differ, but are measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROWS = 16  # the smallest tile; every step is padded to a multiple
LARGER_TILES = (256, 48)  # faster per row; multiples of ROWS


class TiledLinear:
    """A linear layer over rows in tiles of `tiles` rows (largest first, ROWS last)."""

    def __init__(self, linear: Callable[[Tensor], Tensor], tiles: Sequence[int]) -> None:
        self.tiles = tuple(tiles)
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], T a multiple of ROWS, to [T, out]."""
        parts, at = [], 0
        for tile in self.tiles:
            while x.shape[0] - at >= tile:
                parts.append(self._linear(x[at : at + tile]))
                at += tile
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def measure_tiles(linear: Callable[[Tensor], Tensor], width: int) -> tuple[int, ...]:
    """The tiles that give equal rows on this processor; empty if even the smallest gives a row other bits elsewhere."""
    x = torch.randn(max(LARGER_TILES) + ROWS, width, generator=torch.Generator().manual_seed(0))
    expected = TiledLinear(linear, [ROWS])(x)
    good = [tile for tile in (*LARGER_TILES, ROWS) if _is_invariant(tile, linear, x, expected)]
    return tuple(good) if ROWS in good else ()


def _is_invariant(tile: int, linear: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> bool:
    """Are the rows of one product of `tile` rows as expected, at several places in the tile?"""
    places = [slice(first, first + tile) for first in (0, 5, ROWS - 1)]
    return all(torch.equal(linear(x[place]), expected[place]) for place in places)
