"""A child of control with its channel: spawned, spoken to, reaped, spawned again. Decides nothing about requests or
leases."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from pdbus.bus.errors import Broken
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent, KVLayout
from pdbus.bus.wire import Declared, replace

from .channel import ControlChannel, endpoint_in
from .ipc import MoverArgs, MoverReady, WorkerArgs
from .process import Child, Exit, spawn

STOP_WAIT_S = 3.0  # from the stop message to SIGTERM: a step or a read may be under way

Received = TypeVar("Received", bound=Declared)


class Managed(Generic[Received]):
    """One child process and its channel, through all its lives. `on_exit` is called after it has been reaped."""

    def __init__(
        self,
        module: str,
        args: WorkerArgs | MoverArgs,
        receives: type[Received],
        stop: Declared,
        *,
        directory: Path,
        on_message: Callable[[Received], None],
        on_exit: Callable[[Exit], None],
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        rank: int = 0,
    ) -> None:
        self._module = module
        self._name = f"{module.rpartition('.')[2]}-{rank}"
        self._args = args
        self._receives = receives
        self._stop = stop
        self._directory = directory
        self._on_message = on_message
        self._on_exit = on_exit
        self._threads, self._environment = threads, environment
        self._lives = 0
        self._heard = False  # this life has said its first word
        self._stopping = False  # this life has been asked to end
        self._child: Child | None = None
        self._channel: ControlChannel[Received] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None and self._child.running else 0

    async def start(self, **changes: str) -> None:
        """Spawn it, with some of its arguments changed, on a fresh endpoint: no life hears what the last was told."""
        self._lives += 1
        endpoint = endpoint_in(self._directory, f"{self._name}-{self._lives}")
        self._heard = self._stopping = False
        self._channel = ControlChannel(endpoint, self._receives, self._hear)
        args = replace(self._args, endpoint=endpoint, **changes)
        self._child = await spawn(
            self._module, args, threads=self._threads, environment=self._environment, on_exit=self._reaped
        )

    async def run(self) -> None:
        """Raises what `on_message` raised; ends when this life's channel is closed."""
        if self._channel is not None:
            await self._channel.run()

    def send(self, message: Declared) -> None:
        """Dropped until it has said that it is ready: a new life is told everything then. One that does not read is
        dying or stuck, and is seen to its end: what it was told last is part of what its end undoes."""
        if self._channel is None or not self._heard:
            return
        try:
            self._channel.send(message)
        except Broken:
            if self._child is not None and not self._stopping:
                self._child.signal(signal.SIGKILL)

    async def stop(self) -> None:
        """One that has not spoken yet cannot hear either: it gets SIGTERM at once."""
        self._stopping = True
        if self._child is not None:
            await self._child.stop(lambda: self.send(self._stop), STOP_WAIT_S if self._heard else 0)

    def _hear(self, message: Received) -> None:
        self._heard = True
        self._on_message(message)

    def _reaped(self, ended: Exit) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._on_exit(ended)


def agent_of(mover: MoverReady, rank: int, layout: KVLayout) -> Agent:
    """What peers are told of a mover."""
    return Agent(
        epoch=int(mover.agent_name.rpartition("/")[2]),
        rank=rank,
        name=mover.agent_name,
        metadata=mover.metadata,
        metadata_digest=prompt_digest(mover.metadata),
        base_address=mover.base_address,
        region_bytes=mover.region_bytes,
        blocks=layout.blocks,
        layout=layout,
    )
