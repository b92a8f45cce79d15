"""KV memory of any layout for tests: coded cells in, cells out, and in between a transfer made of plain copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.messages import KVLayout
from pdbus.connector.apply import Pairing, batches, direct_runs, permute, scratch_runs
from pdbus.connector.layout import row_bytes
from pdbus.connector.plan import TransferPlan

Bytes = NDArray[np.uint8]
POISON = 0xEE
PAGE = 4_096


class Guarded:
    """A rank's region full of poison, with a canary page before and one after."""

    def __init__(self, size_bytes: int, fill: int = POISON) -> None:
        self._whole = np.full(size_bytes + 2 * PAGE, 0xCA, np.uint8)
        self.region = self._whole[PAGE : PAGE + size_bytes]
        self.region[:] = fill

    @property
    def memory(self) -> memoryview:
        return memoryview(self.region)

    def canaries_live(self) -> bool:
        return bool((self._whole[:PAGE] == 0xCA).all() and (self._whole[-PAGE:] == 0xCA).all())


def layer_view(region: Bytes, layout: KVLayout, layer: int) -> Bytes:
    """One layer in place: [block, part, head, slot, row bytes]."""
    return np.lib.stride_tricks.as_strided(
        region[layout.starts[layer] :],
        (layout.blocks, len(layout.parts), len(layout.heads), layout.block_size, row_bytes(layout)),
        (layout.block_stride, layout.part_stride, layout.head_stride, layout.slot_stride, 1),
    )


def write_cells(region: Bytes, layout: KVLayout, table: Sequence[int], cells: Bytes) -> None:
    """Put what this rank holds of `cells`, [position, layer, part, head, row bytes] of the model, into its blocks."""
    positions = np.arange(len(cells))
    blocks, slots = np.asarray(table, np.intp)[positions // layout.block_size], positions % layout.block_size
    for place, layer in enumerate(layout.layers):
        view = layer_view(region, layout, place)
        view[blocks, :, :, slots] = cells[:, int(layer)][:, :, list(layout.heads)]


def read_cells(region: Bytes, layout: KVLayout, table: Sequence[int], positions: int) -> Bytes:
    """What this rank holds of the first positions: [position, layer held, part, head held, row bytes]."""
    at = np.arange(positions)
    blocks, slots = np.asarray(table, np.intp)[at // layout.block_size], at % layout.block_size
    views = [layer_view(region, layout, place)[blocks, :, :, slots] for place in range(len(layout.layers))]
    return np.stack(views, axis=1)


def move(plan: TransferPlan, pairing: Pairing, sources: Sequence[Bytes], target: Bytes, blocks_at_once: int = 2) -> int:
    """Carry a plan out by copying run after run; how many bytes were read."""
    read = 0
    for rank in plan.ranks:
        read += copy_runs(direct_runs(rank, pairing), sources[rank.rank], target)
        for some in batches(pairing, blocks_at_once) if rank.reads else ():
            scratch = np.full(blocks_at_once * rank.scratch_bytes, POISON, np.uint8)
            read += copy_runs(scratch_runs(rank, some), sources[rank.rank], scratch)
            permute(plan, rank, some, memoryview(scratch), memoryview(target))
    return read


def copy_runs(runs: object, source: Bytes, target: Bytes) -> int:
    total = 0
    for at, to, length in zip(*(column.tolist() for column in runs), strict=True):  # type: ignore[attr-defined]
        assert at + length <= len(source) and to + length <= len(target)
        target[to : to + length] = source[at : at + length]
        total += length
    return total
