"""A rank's KV memory as an array, wherever its layout puts the rows: in host memory, or in a device's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.messages import KVLayout
from pdbus.connector.layout import row_bytes

Bytes = NDArray[np.uint8]


def view_of(memory: Any, layout: KVLayout) -> Any:
    """[block, layer, part, head, slot, row bytes], no copy. The layers lie evenly.

    Bytes of a buffer, a tensor of a tensor of bytes.
    """
    starts = layout.starts
    layer = starts[1] - starts[0] if len(starts) > 1 else 0
    strides = (layout.block_stride, layer, layout.part_stride, layout.head_stride, layout.slot_stride, 1)
    shape = (layout.blocks, len(starts), len(layout.parts), len(layout.heads), layout.block_size, row_bytes(layout))
    if hasattr(memory, "as_strided"):
        return memory.as_strided(shape, strides, starts[0])
    return np.ndarray(shape, np.uint8, memory, starts[0], strides)


def on_host(part: Any) -> Bytes:
    """A part of a view as an array: the same bytes, or a copy from the device's memory."""
    if isinstance(part, np.ndarray):
        return part
    copied: Bytes = part.cpu().numpy()
    return copied
