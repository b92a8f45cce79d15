"""A rank's KV memory as an array, wherever its layout puts the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdbus.bus.messages import KVLayout
from pdbus.connector.layout import row_bytes

Bytes = NDArray[np.uint8]


def view_of(memory: Any, layout: KVLayout) -> Bytes:
    """[block, layer, part, head, slot, row bytes], no copy. The layers lie evenly."""
    starts = layout.starts
    layer = starts[1] - starts[0] if len(starts) > 1 else 0
    strides = (layout.block_stride, layer, layout.part_stride, layout.head_stride, layout.slot_stride, 1)
    shape = (layout.blocks, len(starts), len(layout.parts), len(layout.heads), layout.block_size, row_bytes(layout))
    return np.ndarray(shape, np.uint8, memory, starts[0], strides)
