"""Control's worker and mover: spawned, spoken to, reaped, spawned again. Decides nothing about requests or leases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from pdbus.bus.wire import Declared, replace
from pdbus.connector.channel import ControlChannel, endpoint_in
from pdbus.connector.ipc import MoverArgs, WorkerArgs
from pdbus.connector.process import Child, Exit, spawn

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
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[Received], None],
        on_exit: Callable[[Exit], None],
        threads: int = 1,
    ) -> None:
        self._module = module
        self._args = args
        self._receives = receives
        self._stop = stop
        self._directory = directory
        self._context = context
        self._on_message = on_message
        self._on_exit = on_exit
        self._threads = threads
        self._lives = 0
        self._child: Child | None = None
        self._channel: ControlChannel[Received] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None and self._child.running else 0

    async def start(self, **changes: str) -> None:
        """Spawn it, with some of its arguments changed, on a fresh endpoint: no life hears what the last was told."""
        self._lives += 1
        endpoint = endpoint_in(self._directory, f"{self._module.rpartition('.')[2]}-{self._lives}")
        self._channel = ControlChannel(self._context, endpoint, self._receives, self._on_message)
        args = replace(self._args, endpoint=endpoint, **changes)
        self._child = await spawn(self._module, args, threads=self._threads, on_exit=self._reaped)

    async def run(self) -> None:
        """Raises what `on_message` raised; ends when this life's channel is closed."""
        if self._channel is not None:
            await self._channel.run()

    def send(self, message: Declared) -> None:
        """Dropped when it does not run: a new life is told everything again."""
        if self._channel is not None:
            self._channel.send(message)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(lambda: self.send(self._stop), STOP_WAIT_S)

    def _reaped(self, ended: Exit) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._on_exit(ended)
