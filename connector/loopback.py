"""An agent without a network: reads are copies between slabs of one process, for simulation and tests.

It keeps NIXL's manners. A read posted while the fabric is held is in progress and lands, whole, when asked, even after
everyone lost interest; a dead agent's reads fail at the next check; a read can be made doubtful; names are used once.
`Mover(LoopbackAgent(...), ...)` takes and gives the same messages as the mover process.
"""

from __future__ import annotations

from pdbus.bus.errors import Broken

from .agent import ReadDoubtful, ReadFailed
from .apply import Runs

MAGIC = b"loopback:"


class LoopbackRead:
    """One handle: pieces of memory, (from, to), and what has become of it."""

    def __init__(
        self, reader: LoopbackAgent, owner: LoopbackAgent, pieces: list[tuple[memoryview, memoryview]]
    ) -> None:
        self.reader = reader
        self.owner = owner
        self.pieces = pieces
        self.landed = False
        self.doubt = ""

    def land(self) -> None:
        """The bytes arrive, as they are in the owner's memory now."""
        for there, here in self.pieces:
            here[:] = there
        self.landed = True


class Fabric:
    """What connects loopback agents. While `held`, posted reads wait for `land`."""

    def __init__(self) -> None:
        self.held = False
        self.agents: dict[str, LoopbackAgent] = {}  # the dead ones too: a name is never used again
        self.in_flight: list[LoopbackRead] = []

    def land(self, count: int | None = None) -> None:
        """Let the oldest `count` reads in flight (all, if None) arrive."""
        landing = self.in_flight[:count]
        del self.in_flight[:count]
        for read in landing:
            read.land()

    def kill(self, name: str) -> None:
        """An agent's process dies: what was in flight from it or to it will not arrive."""
        agent = self.agents[name]
        agent.alive = False
        self.in_flight = [read for read in self.in_flight if agent not in (read.owner, read.reader)]


class LoopbackAgent:
    """An agent (agent.py) over `memory`."""

    def __init__(self, fabric: Fabric, name: str, memory: memoryview) -> None:
        if name in fabric.agents:
            raise Broken(f"agent name {name} was used before")
        self.name = name
        self.metadata = MAGIC + name.encode()
        self.alive = True
        self._fabric = fabric
        self._memory = memory
        self._scratch = memoryview(bytearray(1))
        fabric.agents[name] = self

    def add_peer(self, name: str, metadata: bytes, base_address: int, region_bytes: int) -> LoopbackAgent:
        if metadata != MAGIC + name.encode():
            raise Broken(f"cannot load the metadata of agent {name}")
        if (peer := self._fabric.agents.get(name)) is None or not peer.alive:
            raise Broken(f"agent {name} is not there")
        return peer

    def remove_peer(self, peer: LoopbackAgent) -> None:
        pass

    def make_warm_up(self, peer: LoopbackAgent) -> LoopbackRead:
        return LoopbackRead(self, peer, [(peer._memory[:1], self._scratch)])

    def make_read(self, peer: LoopbackAgent, runs: Runs) -> LoopbackRead:
        each = zip(*(column.tolist() for column in runs), strict=True)
        return LoopbackRead(
            self, peer, [(peer._memory[at : at + size], self._memory[to : to + size]) for at, to, size in each]
        )

    def post(self, handle: LoopbackRead) -> bool:
        self._check_owner(handle)
        if self._fabric.held:
            self._fabric.in_flight.append(handle)
        else:
            handle.land()
        return handle.landed

    def check(self, handle: LoopbackRead) -> bool:
        if not handle.landed:
            self._check_owner(handle)
            if handle.doubt:
                raise ReadDoubtful(handle.doubt)
        return handle.landed

    def _check_owner(self, handle: LoopbackRead) -> None:
        if not handle.owner.alive:
            raise ReadFailed("the peer has gone")

    def release(self, handle: LoopbackRead) -> None:
        pass

    def pump(self) -> None:
        pass

    def close(self) -> None:
        self._fabric.kill(self.name)
