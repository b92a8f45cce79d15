"""Coded KV from every layout to every other: each cell of the grid is a hand-off, done by copies in this process.

The owner's ranks are filled with code, the reader's with poison; afterwards every position must hold the code, blocks
that were warm and all blocks of others must be as before, and the canary pages around must live. Each cell is done
twice: with every run direct, and with short runs through scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Geometry
from pdbus.bus.wire import replace
from pdbus.connector.apply import Pairing, pair
from pdbus.connector.layout import KVLayout, blocks_for, geometry_for, layout_of
from pdbus.connector.plan import RUN_BYTES_MIN, TransferPlan, plan
from pdbus.nodes.engines.coded import coded_cells

from tests.kv_memory import POISON, Bytes, Guarded, move, read_cells, write_cells

LAYERS, HEAD_DIM = 2, 8
BLOCKS = 8
SPREAD = 500
BATCH = 512  # cells of one test


@dataclass(frozen=True)
class Cell:
    kv_heads: int  # of a latent: its width in units of HEAD_DIM
    there: int
    here: int
    layout_there: str
    layout_here: str
    blocks: tuple[int, int]
    latent: bool
    prompt: int
    warm: str


ORDERS = ("native", "nhd", "hnd")
GRID = [
    Cell(*axes)
    for axes in product(
        (1, 2, 3, 8), (1, 2, 4), (1, 2, 4), ORDERS, ORDERS,
        ((16, 16), (32, 16), (16, 32)), (False, True), (1, 15, 16, 17, 48), ("nothing", "one block", "all"),
    )
]  # fmt: skip


def spread(count: int) -> list[Cell]:
    """A step that shares no factor with the grid's axes meets every value of each, in ever new company."""
    step = len(GRID) // count
    while np.gcd(step, len(GRID)) != 1:
        step -= 1
    return [GRID[i * step] for i in range(count)]


def geometry(cell: Cell, layout: str, block_size: int) -> Geometry:
    heads, width, parts = (1, HEAD_DIM * cell.kv_heads, 1) if cell.latent else (cell.kv_heads, HEAD_DIM, 2)
    return replace(geometry_for(LAYERS, heads, width, block_size, "float32", parts), layout=layout)


@cache
def layouts(model: Geometry, ranks: int) -> tuple[KVLayout, ...]:
    return tuple(layout_of(model, BLOCKS, ranks, rank) for rank in range(ranks))


@cache
def planned(sources: tuple[KVLayout, ...], target: KVLayout, reader: int) -> tuple[TransferPlan, ...]:
    return tuple(plan(sources, target, reader, run_bytes_min) for run_bytes_min in (0, RUN_BYTES_MIN))


@cache
def code(model: Geometry, prompt: int) -> Bytes:
    return coded_cells(model, range(100, 100 + prompt))


@cache
def owned(sources: tuple[KVLayout, ...], model: Geometry, prompt: int, table: tuple[int, ...]) -> list[Bytes]:
    regions = [np.full(layout.region_bytes, 0x55, np.uint8) for layout in sources]
    for region, layout in zip(regions, sources, strict=True):
        write_cells(region, layout, table, code(model, prompt))
    return regions


Carry = Callable[[TransferPlan, Pairing, list[Bytes], Bytes], int]


def hand_off(cell: Cell, carry: Carry = move) -> str:
    """One cell: '' when all bytes are right, 'refused' when such ranks cannot be, else what is wrong.

    `carry` carries out a plan (kv_memory.move).
    """
    there = geometry(cell, cell.layout_there, cell.blocks[0])
    here = geometry(cell, cell.layout_here, cell.blocks[1])
    try:
        sources, targets = layouts(there, cell.there), layouts(here, cell.here)
    except ConfigError:
        return "refused"
    have = {"nothing": 0, "one block": min(cell.prompt, cell.blocks[1]), "all": cell.prompt}[cell.warm]
    table_there = (5, 2, 3)[: blocks_for(cell.prompt, cell.blocks[0])]
    table_here = (6, 1, 7)[: blocks_for(cell.prompt, cell.blocks[1])]
    memory = owned(sources, there, cell.prompt, table_there)
    announced = table_there[have // cell.blocks[0] :]
    problems = (
        read_by(carry, made, target, cell, have, announced, table_here, memory)
        for reader, target in enumerate(targets)
        for made in planned(sources, target, reader)
    )
    return next((problem for problem in problems if problem), "")


def read_by(
    carry: Carry, made: TransferPlan, target: KVLayout, cell: Cell, have: int,
    announced: tuple[int, ...], table: tuple[int, ...], memory: list[Bytes],
) -> str:  # fmt: skip
    cells = code(geometry(cell, cell.layout_here, cell.blocks[1]), cell.prompt)
    guarded = Guarded(target.region_bytes)
    write_cells(guarded.region, target, table, cells[:have])
    before = guarded.region.copy()
    pairing = pair(made, have, 0, cell.prompt, announced, table)
    read = carry(made, pairing, memory, guarded.region)
    if have == cell.prompt and read:
        return f"{read} bytes read, but all were here"
    expected = cells[:, :, :, list(target.heads)]
    if not np.array_equal(read_cells(guarded.region, target, table, cell.prompt), expected):
        return "wrong KV"
    return "" if guarded.canaries_live() and untouched(guarded.region, before, target, table, have) else "stray bytes"


def untouched(region: Bytes, before: Bytes, target: KVLayout, table: tuple[int, ...], have: int) -> bool:
    """Blocks that are not the request's keep their poison, whole warm blocks their bytes."""
    ours = table[have // target.block_size :]
    others = [block for block in range(target.blocks) if block not in ours]
    tokens = len(others) * target.block_size
    after, then = (read_cells(some, target, others, tokens) for some in (region, before))
    return bool(np.array_equal(after, then)) and bool((then == POISON).any())


def outcomes(cells: list[Cell], carry: Carry = move) -> dict[Cell, str]:
    return {cell: wrong for cell in cells if (wrong := hand_off(cell, carry)) != ""}


def can_be(cell: Cell) -> bool:
    heads = 1 if cell.latent else cell.kv_heads
    return all(heads % ranks == 0 or ranks % heads == 0 for ranks in (cell.there, cell.here))


def test_spread_of_cells_hands_over_the_code() -> None:
    cells = spread(SPREAD)
    assert outcomes(cells) == {cell: "refused" for cell in cells if not can_be(cell)}


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, len(GRID), BATCH))
def test_every_cell_hands_over_the_code(first: int) -> None:
    cells = GRID[first : first + BATCH]
    assert outcomes(cells) == {cell: "refused" for cell in cells if not can_be(cell)}


def test_spread_meets_every_value_of_every_axis() -> None:
    for axis in Cell.__dataclass_fields__:
        assert {getattr(cell, axis) for cell in spread(SPREAD)} == {getattr(cell, axis) for cell in GRID}


def test_wrong_byte_would_be_seen() -> None:
    """The grid has teeth: one flipped byte in the owner's memory is wrong KV here."""
    cell = next(cell for cell in GRID if cell.prompt == 17 and cell.there == cell.here == 1)
    there = geometry(cell, cell.layout_there, cell.blocks[0])
    (source,) = layouts(there, 1)
    (memory,) = owned((source,), there, 17, (5, 2))
    at = source.offset(2, 1)
    memory[at] ^= 1
    try:
        assert hand_off(cell) == "wrong KV"
    finally:
        memory[at] ^= 1
