"""The movers of a node, one for each rank: what they are made of, and what peers are told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pdbus.bus.messages import Agent, KVLayout

from . import ipc
from .joins import MoverJoin, MoversReady
from .managed import Managed, agent_of
from .process import Exit, nixl_environment
from .ranks import Ranks
from .slab import Slab

Movers = Ranks[ipc.FromMover, ipc.FromMover | MoversReady]


def movers(
    slabs: Sequence[Slab],
    layouts: Sequence[KVLayout],
    directory: Path,
    *,
    listen: str,
    on_message: Callable[[ipc.FromMover | MoversReady], None],
    on_exit: Callable[[Exit], None],
) -> Movers:
    """One for each slab, in which KV lies as its layout says. `listen`: the node's bus address."""

    def make(
        rank: int, hear: Callable[[ipc.FromMover], None], reaped: Callable[[Exit], None]
    ) -> Managed[ipc.FromMover]:
        slab = slabs[rank]
        return Managed(
            "pdbus.connector.mover",
            ipc.MoverArgs(
                endpoint="", slab_path=slab.path, slab_bytes=slab.size_bytes, layout=layouts[rank], rank=rank,
                agent_name="",
            ),
            ipc.FromMover,
            ipc.StopMover(),
            directory=directory,
            on_message=hear,
            on_exit=reaped,
            environment=nixl_environment(listen),
            rank=rank,
        )  # fmt: skip

    return Ranks(len(slabs), make, MoverJoin, on_message=on_message, on_exit=on_exit)


async def start_movers(some: Movers, name: str, incarnation: bytes, epoch: int) -> None:
    """A life of all of them. Their agents are called after the node, its incarnation and this epoch."""
    await some.start(lambda rank: {"agent_name": f"{name}/{rank}/{incarnation.hex()}/{epoch}"})


def agents_of(layouts: Sequence[KVLayout], ready: MoversReady) -> tuple[Agent, ...]:
    """What peers are told of the movers."""
    return tuple(agent_of(mover, rank, layouts[rank]) for rank, mover in enumerate(ready.ranks))
