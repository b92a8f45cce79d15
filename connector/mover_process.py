"""Control's end of one mover: the child, its channel, and the way both begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from pdbus.bus.errors import Broken

from .channel import ControlChannel, endpoint_in
from .ipc import FromMover, MoverArgs, MoverFailed, MoverReady, StopMover, ToMover
from .process import Child, Exit, spawn
from .slab import Slab

START_S = 30.0  # importing NIXL, mapping and registering the slab: 1 s, and faulting in many GB
EXIT_SLACK_S = 2.0  # beyond what a stopping mover may wait for its reads


class MoverProcess:
    """A running mover. `ready` tells what peers need to know of its agent. Made by `start_mover`."""

    def __init__(self, child: Child, channel: ControlChannel[FromMover], ready: MoverReady) -> None:
        self.child = child
        self.ready = ready
        self._channel = channel

    def send(self, message: ToMover) -> None:
        """Tell the mover something. Raises Closed or Broken when it cannot hear."""
        self._channel.send(message)

    async def run(self) -> None:
        """Ends when the channel is closed; raises what `on_message` raised."""
        await self._channel.run()

    async def stop(self, wait_ms: int = 2000) -> Exit:
        """Ask it to wait `wait_ms` for its reads and to exit; insist if it does not."""
        ended = await self.child.stop(lambda: self.send(StopMover(wait_ms=wait_ms)), wait_ms / 1e3 + EXIT_SLACK_S)
        self._channel.close()
        return ended

    def close(self) -> None:
        """Close the channel of a mover that has ended by itself."""
        self._channel.close()


async def start_mover(
    slab: Slab,
    block_bytes: int,
    agent_name: str,
    *,
    directory: Path,
    context: zmq.Context[Any],
    on_message: Callable[[FromMover], None],
    on_exit: Callable[[Exit], None],
    cpus: tuple[int, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> MoverProcess:
    """Spawn a mover over the slab and wait until it is ready. `agent_name` must never have been used.

    `on_message` gets everything after MoverReady, `on_exit` its end, once. Raises Broken when it does not start.
    """
    started: asyncio.Future[MoverReady] = asyncio.get_running_loop().create_future()

    def hear(message: FromMover) -> None:
        if started.done():
            on_message(message)
        elif isinstance(message, MoverReady):
            started.set_result(message)
        elif isinstance(message, MoverFailed):
            started.set_exception(Broken(message.problem))

    def leave(ended: Exit) -> None:
        if started.done():
            on_exit(ended)
        else:
            started.set_exception(Broken(f"the mover did not start: {ended}"))

    channel = ControlChannel(context, endpoint_in(directory, f"{agent_name}.ipc"), FromMover, hear)
    args = MoverArgs(
        endpoint=channel.endpoint,
        slab_path=slab.path,
        slab_bytes=slab.size_bytes,
        block_bytes=block_bytes,
        agent_name=agent_name,
        cpus=cpus,
    )
    child = None
    try:
        child = await spawn("pdbus.connector.mover", args, on_exit=leave, environment=environment)
        async with asyncio.timeout(START_S):
            return MoverProcess(child, channel, await started)
    except TimeoutError:
        raise Broken(f"the mover {agent_name} was not ready after {START_S:.0f} s") from None
    finally:
        if not started.done() or started.cancelled() or started.exception():
            channel.close()
            if child:
                await child.stop(lambda: None, 0.0)
