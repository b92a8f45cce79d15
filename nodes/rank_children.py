"""A node's workers, one for each rank: what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pdbus.connector import ipc
from pdbus.connector.joins import WorkerJoin
from pdbus.connector.layout import layers_of
from pdbus.connector.managed import Managed
from pdbus.connector.process import Exit
from pdbus.connector.ranks import Ranks
from pdbus.connector.slab import Slab

from .config import NodeConfig
from .setup import Setup, worker_args

Workers = Ranks[ipc.FromWorker, ipc.FromWorker]


def workers(
    config: NodeConfig,
    setup: Setup,
    slabs: Sequence[Slab],
    directory: Path,
    *,
    on_message: Callable[[ipc.FromWorker], None],
    on_exit: Callable[[Exit], None],
) -> Workers:
    """One for each slab."""

    def make(
        rank: int, hear: Callable[[ipc.FromWorker], None], reaped: Callable[[Exit], None]
    ) -> Managed[ipc.FromWorker]:
        return Managed(
            "pdbus.nodes.worker",
            worker_args(config, setup, slabs[rank].path, slabs[rank].size_bytes, rank),
            ipc.FromWorker,
            ipc.StopWorker(),
            directory=directory,
            on_message=hear,
            on_exit=reaped,
            threads=config.threads,
            rank=rank,
        )

    shape = setup.geometry
    stages = tuple(len(layers_of(shape.layers, shape.pp, stage)) for stage in range(shape.pp))
    join = partial(WorkerJoin, copies=max(1, shape.tp // shape.kv_heads), stages=stages)
    return Ranks(len(slabs), make, join, on_message=on_message, on_exit=on_exit)
