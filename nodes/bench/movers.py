"""Mover processes without a node around them, for benches and live tests: spawned, spoken to one message at a time."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TypeVar

from pdbus.bus.errors import Broken
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent, Geometry
from pdbus.connector.ipc import FromMover, MoverArgs, MoverFailed, MoverReady, PeerAdd, PeerAdded, StopMover, ToMover
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.managed import Managed
from pdbus.connector.process import Exit
from pdbus.connector.run_directory import RunDirectory
from pdbus.connector.slab import Slab

HEAR_S = 20.0  # how long to wait for any one message before giving up

Heard = TypeVar("Heard", bound=FromMover)


class LiveMover:
    """One mover process over a slab of its own. `ready` tells what peers need to know of its agent."""

    ready: MoverReady

    def __init__(self, agent_name: str, slab: Slab, geometry: Geometry, process: Managed[FromMover]) -> None:
        self.agent_name = agent_name
        self.slab = slab
        self.geometry = geometry
        self.process = process
        self.heard: asyncio.Queue[FromMover] = asyncio.Queue()
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def say(self, message: ToMover) -> None:
        self.process.send(message)

    async def hear(self, kind: type[Heard]) -> Heard:
        """The next message of that kind, dropping others. Raises Broken when the mover fails or stays silent."""
        try:
            async with asyncio.timeout(HEAR_S):
                while not isinstance(message := await self.heard.get(), kind):
                    if isinstance(message, MoverFailed):
                        raise Broken(message.problem)
        except TimeoutError:
            raise Broken(f"no {kind.__name__} from {self.agent_name} within {HEAR_S:.0f} s") from None
        return message

    def end(self, ended: Exit) -> None:
        """The process is gone; whoever waits for a message learns it at once."""
        self.ended.set_result(ended)
        self.heard.put_nowait(MoverFailed(problem=str(ended)))

    def as_peer(self) -> PeerAdd:
        """What another mover must be told to read from this one. The peer's name is the agent's."""
        agent = Agent(
            epoch=1,
            name=self.ready.agent_name,
            metadata=self.ready.metadata,
            metadata_digest=prompt_digest(self.ready.metadata),
            base_address=self.ready.base_address,
            region_bytes=self.ready.region_bytes,
            blocks=self.ready.region_bytes // self.geometry.block_bytes,
        )
        return PeerAdd(peer=self.agent_name, geometry=self.geometry, agents=(agent,))


def plain_blocks(block_bytes: int) -> Geometry:
    """KV without structure: a block is one token, and a token one row."""
    return geometry_for(1, 1, block_bytes, 1, "uint8", kv_parts=1)


class Movers:
    """Any number of movers; all are stopped at the end of the `async with`."""

    def __init__(self) -> None:
        self._directory = RunDirectory()
        self._movers: list[LiveMover] = []

    async def __aenter__(self) -> Movers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mover in self._movers:
            await mover.process.stop()
            await mover.ended
            mover.slab.close()
        self._directory.close()

    async def start(self, agent_name: str, slab_bytes: int, block_bytes: int) -> LiveMover:
        """A mover of plain blocks that is ready. Raises Broken when it does not start."""
        slab = Slab.create(slab_bytes)
        geometry = plain_blocks(block_bytes)
        directory = self._directory.path / agent_name
        directory.mkdir()
        args = MoverArgs(
            endpoint="", slab_path=slab.path, slab_bytes=slab_bytes, rank=0, agent_name=agent_name,
            layout=layout_of(geometry, slab_bytes // block_bytes),
        )  # fmt: skip
        process: Managed[FromMover] = Managed(
            "pdbus.connector.mover", args, FromMover, StopMover(), directory=directory,
            on_message=lambda message: mover.heard.put_nowait(message),
            on_exit=lambda ended: mover.end(ended),
        )  # fmt: skip
        mover = LiveMover(agent_name, slab, geometry, process)
        await process.start()
        self._movers.append(mover)
        mover.ready = await mover.hear(MoverReady)
        return mover


async def introduce(one: LiveMover, other: LiveMover) -> None:
    """Make two movers each other's peers. Raises Broken when either cannot."""
    one.say(other.as_peer())
    other.say(one.as_peer())
    for mover in (one, other):
        if problem := (await mover.hear(PeerAdded)).problem:
            raise Broken(problem)
