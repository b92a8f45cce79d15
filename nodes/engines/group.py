"""The ranks that share one model: what each computes a part of, put together.

Sums are added in order of rank on every rank, so that all have the same bits, whatever a row's neighbours are: a
reduction inside the library may add in an order that depends on where a row stands.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pdbus.bus.messages import Geometry
from pdbus.connector.ipc import WorkerArgs

from .stage import SentStage, Stage

BACKENDS = {"cpu": "gloo", "fake": "gloo", "cuda": "nccl", "xpu": "xccl"}
WAIT_S = 300.0  # for the other ranks to load, or to end a step; one that dies is noticed at once, by its connection


class Group:
    """`rank` of `size`, those of one stage. Alone, everything is as it is."""

    def __init__(self, rank: int = 0, size: int = 1, members: dist.ProcessGroup | None = None) -> None:
        """`members`: None for all processes."""
        self.rank = rank
        self.size = size
        self._members = members

    def share(self, count: int) -> slice:
        """This rank's equal part of `count`, which the ranks can share."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, each [rows, n]."""
        if self.size == 1:
            return part
        first, *others = self._gathered(part)
        for other in others:
            first.add_(other)
        return first

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts [rows, n] beside each other, [rows, n * size]."""
        return part if self.size == 1 else torch.cat(self._gathered(part), dim=-1)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._members)
        return parts


def meet(args: WorkerArgs) -> tuple[Group, Stage]:
    """Wait for the other ranks of `args.geometry`, in the file `args.group`. Gloo keeps to the loopback device."""
    shape = args.geometry
    if shape.ranks == 1:
        return Group(), Stage()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        BACKENDS[args.device.partition(":")[0]],
        init_method=f"file://{args.group}",
        rank=args.rank,
        world_size=shape.ranks,
        timeout=timedelta(seconds=WAIT_S),
    )
    stage = SentStage(args.rank, shape.tp, shape.pp)
    return Group(args.rank % shape.tp, shape.tp, _members(shape, stage.index)), stage


def _members(shape: Geometry, stage: int) -> dist.ProcessGroup | None:
    """Those of a stage; every rank must make the groups of all stages."""
    if 1 in (shape.pp, shape.tp):
        return None
    firsts = range(0, shape.ranks, shape.tp)
    made: list[dist.ProcessGroup] = [dist.new_group(list(range(first, first + shape.tp))) for first in firsts]
    return made[stage]
