"""A node's workers and movers: what each rank's are made of, and what its peers are told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pdbus.bus.messages import Agent
from pdbus.connector import ipc
from pdbus.connector.joins import MoverJoin, MoversReady, WorkerJoin
from pdbus.connector.layout import layers_of, layout_of
from pdbus.connector.managed import Managed, agent_of
from pdbus.connector.process import Exit, nixl_environment
from pdbus.connector.slab import Slab

from .config import NodeConfig
from .ranks import Ranks
from .setup import Setup, worker_args

Workers = Ranks[ipc.FromWorker, ipc.FromWorker]
Movers = Ranks[ipc.FromMover, ipc.FromMover | MoversReady]


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


def movers(
    config: NodeConfig,
    setup: Setup,
    slabs: Sequence[Slab],
    directory: Path,
    *,
    on_message: Callable[[ipc.FromMover | MoversReady], None],
    on_exit: Callable[[Exit], None],
) -> Movers:
    """One for each slab. Started with an `agent_name` of (node, rank, incarnation, epoch)."""

    def make(
        rank: int, hear: Callable[[ipc.FromMover], None], reaped: Callable[[Exit], None]
    ) -> Managed[ipc.FromMover]:
        slab, layout = slabs[rank], layout_of(setup.geometry, setup.blocks, rank)
        return Managed(
            "pdbus.connector.mover",
            ipc.MoverArgs(
                endpoint="", slab_path=slab.path, slab_bytes=slab.size_bytes, layout=layout, rank=rank, agent_name=""
            ),
            ipc.FromMover,
            ipc.StopMover(),
            directory=directory,
            on_message=hear,
            on_exit=reaped,
            environment=nixl_environment(config.listen),
            rank=rank,
        )

    return Ranks(len(slabs), make, MoverJoin, on_message=on_message, on_exit=on_exit)


def agents_of(setup: Setup, ready: MoversReady) -> tuple[Agent, ...]:
    """What peers are told of the movers."""
    return tuple(
        agent_of(mover, rank, layout_of(setup.geometry, setup.blocks, rank)) for rank, mover in enumerate(ready.ranks)
    )
