"""Coded KV from every layout to every other: each cell of the grid is a hand-off through a mover, over loopback.

The owner's ranks are filled with code, the reader's with poison; afterwards every position must hold the code, blocks
that were warm and all blocks of others must be as before, and the canary pages around must live. Each cell is done
twice: with room for scratch, and without, so that every run is direct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest

from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent, Geometry, KVLayout
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import PeerAdd, Read, ReadEnded
from pdbus.connector.layout import blocks_for, geometry_for, offset
from pdbus.connector.loopback import Fabric, LoopbackAgent
from pdbus.connector.mover import Mover
from pdbus.connector.readable import layouts_of, unreadable
from pdbus.nodes.engines.coded import coded_cells

from tests.kv_memory import POISON, Bytes, Guarded, read_cells, write_cells

LAYERS, HEAD_DIM = 2, 8
BLOCKS = 8
SPREAD = 500
SCRATCH = 128 << 10  # some detours of two blocks each for the largest cells
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


ORDERS = ("native", "NHD", "HND")
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


def geometry(cell: Cell, layout: str, block_size: int, tp: int) -> Geometry:
    heads, width, parts = (1, HEAD_DIM * cell.kv_heads, 1) if cell.latent else (cell.kv_heads, HEAD_DIM, 2)
    return replace(geometry_for(LAYERS, heads, width, block_size, "float32", parts), layout=layout, tp=tp)


@dataclass(frozen=True)
class HandOff:
    """What is read by one rank: `region` is its KV and, behind it, scratch."""

    geometry: Geometry  # of the owner
    memory: list[Bytes]  # of its ranks
    target: KVLayout
    reader: int
    region: memoryview
    begin: int
    end: int
    source: tuple[int, ...]
    table: tuple[int, ...]

    def message(self, number: int) -> Read:
        first = self.begin // self.target.block_size
        return Read(
            read=number, peer="owner", begin=self.begin, end=self.end,
            source=pack_u32(self.source), target=pack_u32(self.table[first:]),
        )  # fmt: skip


Carry = Callable[[HandOff], ReadEnded]


def through_loopback(it: HandOff) -> ReadEnded:
    fabric = Fabric()
    agents = []
    for rank, memory in enumerate(it.memory):
        there = LoopbackAgent(fabric, f"owner/{rank}", memoryview(memory))
        agents.append(agent_of(there.name, there.metadata, rank, len(memory)))
    mover = Mover(LoopbackAgent(fabric, "reader", it.region), it.region, it.target, it.reader)
    mover.handle(PeerAdd(peer="owner", geometry=it.geometry, agents=tuple(agents)))
    mover.handle(it.message(1))
    ended: list[ReadEnded] = []
    while not ended:
        ended = [said for said in mover.turn() if isinstance(said, ReadEnded)]
    return ended[0]


def agent_of(name: str, metadata: bytes, rank: int, region_bytes: int, base_address: int = 0) -> Agent:
    return Agent(
        epoch=1, rank=rank, name=name, metadata=metadata, metadata_digest=prompt_digest(metadata),
        base_address=base_address, region_bytes=region_bytes, blocks=BLOCKS,
    )  # fmt: skip


@cache
def layouts(model: Geometry) -> tuple[KVLayout, ...]:
    return layouts_of(model, BLOCKS)


@cache
def code(model: Geometry, prompt: int) -> Bytes:
    return coded_cells(model, range(100, 100 + prompt))


@cache
def owned(model: Geometry, prompt: int, table: tuple[int, ...]) -> list[Bytes]:
    regions = [np.full(layout.region_bytes, 0x55, np.uint8) for layout in layouts(model)]
    for region, layout in zip(regions, layouts(model), strict=True):
        write_cells(region, layout, table, code(model, prompt))
    return regions


def hand_off(cell: Cell, carry: Carry, scratches: tuple[int, ...]) -> str:
    """One cell: '' when all bytes are right, 'refused' when such ranks cannot be, else what is wrong."""
    there = geometry(cell, cell.layout_there, cell.blocks[0], cell.there)
    here = geometry(cell, cell.layout_here, cell.blocks[1], cell.here)
    if unreadable(there, here):
        return "refused"
    have = {"nothing": 0, "one block": min(cell.prompt, cell.blocks[1]), "all": cell.prompt}[cell.warm]
    table_there = (5, 2, 3)[: blocks_for(cell.prompt, cell.blocks[0])]
    table_here = (6, 1, 7)[: blocks_for(cell.prompt, cell.blocks[1])]
    memory = owned(there, cell.prompt, table_there)
    source = table_there[have // cell.blocks[0] :]
    for reader, target in enumerate(layouts(here)):
        for scratch in scratches:
            guarded = Guarded(target.region_bytes + scratch)
            it = HandOff(there, memory, target, reader, guarded.memory, have, cell.prompt, source, table_here)
            if problem := _read(it, guarded, code(replace(here, tp=1, layout="native"), cell.prompt), carry):
                return problem
    return ""


def _read(it: HandOff, guarded: Guarded, cells: Bytes, carry: Carry) -> str:
    region, target, have = guarded.region, it.target, it.begin
    write_cells(region, target, it.table, cells[:have])
    before = region.copy()
    ended = carry(it)
    if ended.problem:
        return ended.problem
    if have == it.end and ended.bytes:
        return f"{ended.bytes} bytes read, but all were here"
    expected = cells[:, :, :, list(target.heads)]
    if not np.array_equal(read_cells(region, target, it.table, it.end), expected):
        return "wrong KV"
    return "" if guarded.canaries_live() and untouched(region, before, target, it.table, have) else "stray bytes"


def untouched(region: Bytes, before: Bytes, target: KVLayout, table: tuple[int, ...], have: int) -> bool:
    """Blocks that are not the request's keep their poison, whole warm blocks their bytes."""
    ours = table[have // target.block_size :]
    others = [block for block in range(target.blocks) if block not in ours]
    tokens = len(others) * target.block_size
    after, then = (read_cells(some, target, others, tokens) for some in (region, before))
    return bool(np.array_equal(after, then)) and bool((then == POISON).any())


def outcomes(
    cells: list[Cell], carry: Carry = through_loopback, scratches: tuple[int, ...] = (0, SCRATCH)
) -> dict[Cell, str]:
    return {cell: wrong for cell in cells if (wrong := hand_off(cell, carry, scratches)) != ""}


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
    there = geometry(cell, cell.layout_there, cell.blocks[0], 1)
    (source,) = layouts(there)
    (memory,) = owned(there, 17, (5, 2))
    at = offset(source, 2, 1)
    memory[at] ^= 1
    try:
        assert outcomes([cell]) == {cell: "wrong KV"}
    finally:
        memory[at] ^= 1
