"""What a mover promises, to control and to its peers: over real NIXL in two processes, and over loopback.

The contract tests run on all of them; what only real processes can show stands below.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import pytest

from pdbus.bus.errors import Broken
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import (
    Advertise,
    FromMover,
    MoverAlive,
    PeerAdd,
    PeerAdded,
    PeerRemove,
    ProbeMover,
    Read,
    ReadEnded,
    StopMover,
    ToMover,
)
from pdbus.connector.layout import layout_of
from pdbus.connector.loopback import Fabric, LoopbackAgent
from pdbus.connector.mover import Mover
from pdbus.connector.process import Exit
from pdbus.connector.reading import SLICE_BYTES_MAX
from pdbus.nodes.bench.movers import LiveMover, Movers, plain_blocks

BLOCK_BYTES = 64 << 10
BLOCKS = 640
SLAB_BYTES = BLOCKS * BLOCK_BYTES
POISON = 0xEE
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

Heard = TypeVar("Heard", bound=FromMover)
_numbers = count(1)


class Side(Protocol):
    """One mover as these tests see it, process or not."""

    agent_name: str

    @property
    def memory(self) -> memoryview: ...

    def say(self, message: ToMover) -> None: ...

    def hear(self, kind: type[Heard]) -> Heard: ...

    def as_peer(self) -> PeerAdd: ...


class Rig(Protocol):
    def start(self) -> Side: ...


class LoopbackSide:
    def __init__(self, fabric: Fabric, name: str) -> None:
        self.agent_name = name
        self.memory = memoryview(bytearray(SLAB_BYTES))
        self.agent = LoopbackAgent(fabric, name, self.memory)
        self.mover = Mover(self.agent, self.memory, layout_of(plain_blocks(BLOCK_BYTES), BLOCKS))
        self.heard: list[FromMover] = []

    def say(self, message: ToMover) -> None:
        self.mover.handle(message)

    def hear(self, kind: type[Heard]) -> Heard:
        for _ in range(1000):
            while self.heard:
                if isinstance(message := self.heard.pop(0), kind):
                    return message
            self.heard += self.mover.turn()
        raise AssertionError(f"no {kind.__name__}")

    def as_peer(self) -> PeerAdd:
        metadata = self.agent.metadata
        agent = Agent(
            epoch=1, name=self.agent_name, metadata=metadata, metadata_digest=prompt_digest(metadata),
            region_bytes=SLAB_BYTES, blocks=BLOCKS,
        )  # fmt: skip
        return PeerAdd(peer=self.agent_name, geometry=plain_blocks(BLOCK_BYTES), agents=(agent,))


class LoopbackRig:
    def __init__(self) -> None:
        self.fabric = Fabric()

    def start(self) -> LoopbackSide:
        return LoopbackSide(self.fabric, f"agent-{next(_numbers)}")


class LiveSide:
    def __init__(self, runner: asyncio.Runner, mover: LiveMover) -> None:
        self._runner = runner
        self.mover = mover
        self.agent_name = mover.agent_name

    @property
    def memory(self) -> memoryview:
        return self.mover.slab.memory

    @property
    def pid(self) -> int:
        return self.mover.ready.pid

    def say(self, message: ToMover) -> None:
        self.mover.say(message)

    def hear(self, kind: type[Heard]) -> Heard:
        return self._runner.run(self.mover.hear(kind))

    def ended(self) -> Exit:
        """Wait for the process's end."""
        return self._runner.run(asyncio.wait_for(asyncio.shield(self.mover.ended), 20))

    def as_peer(self) -> PeerAdd:
        return self.mover.as_peer()


class LiveRig:
    """Movers of real processes; `close` ends them all."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._movers = self._runner.run(self._open())

    async def _open(self) -> Movers:
        return await Movers().__aenter__()

    def start(self) -> LiveSide:
        name = f"test-{os.getpid()}-{next(_numbers)}"
        return LiveSide(self._runner, self._runner.run(self._movers.start(name, SLAB_BYTES, BLOCK_BYTES)))

    def close(self) -> None:
        self._runner.run(self._movers.__aexit__(None, None, None))
        self._runner.close()


TRANSPORTS = [
    "loopback",
    pytest.param("default", marks=pytest.mark.live),
    pytest.param("tcp", marks=pytest.mark.live),
]


def open_rig(transport: str) -> Iterator[Rig]:
    if transport == "loopback":
        yield LoopbackRig()
        return
    with pytest.MonkeyPatch.context() as patch:
        for key, value in TCP.items():
            patch.setenv(key, value) if transport == "tcp" else patch.delenv(key, raising=False)
        rig = LiveRig()
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from open_rig(request.param)


@pytest.fixture(params=TRANSPORTS[1:])
def live(request: pytest.FixtureRequest) -> Iterator[LiveRig]:
    """A rig of real processes whose movers a test may kill."""
    yield from open_rig(request.param)  # type: ignore[misc]


@pytest.fixture(scope="module")
def sides(rig: Rig) -> tuple[Side, Side]:
    """An owner and a reader that know each other, shared by the tests that break neither."""
    return introduced(rig)


@pytest.fixture
def pair(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    """The shared two, every owner's block told apart by its bytes, every reader's block poisoned."""
    owner, reader = sides
    fill(owner, reader)
    return owner, reader


def introduced(rig: Any) -> tuple[Any, Any]:
    owner, reader = rig.start(), rig.start()
    owner.say(reader.as_peer())
    reader.say(owner.as_peer())
    assert owner.hear(PeerAdded).problem == ""
    assert reader.hear(PeerAdded).problem == ""
    owner.say(Advertise(leases=1))
    return owner, reader


def coded(block: int) -> bytes:
    return block.to_bytes(4, "little") * (BLOCK_BYTES // 4)


def fill(owner: Side, reader: Side) -> None:
    for block in range(BLOCKS):
        owner.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = coded(block)
    reader.memory[:] = bytes([POISON]) * SLAB_BYTES


def block_of(side: Side, block: int) -> bytes:
    return bytes(side.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])


def read(reader: Side, owner: Side, source: list[int], target: list[int]) -> int:
    """Ask for a read; its number."""
    number = next(_numbers)
    packed = {"source": pack_u32(source), "target": pack_u32(target)}
    reader.say(Read(read=number, peer=owner.agent_name, begin=0, end=len(source), **packed))
    return number


def assert_only(reader: Side, expected: dict[int, int]) -> None:
    """Those target blocks hold those source blocks' bytes; every other one is still poison."""
    poison = bytes([POISON]) * BLOCK_BYTES
    wrong = [b for b in range(BLOCKS) if block_of(reader, b) != (coded(expected[b]) if b in expected else poison)]
    assert wrong == []


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("blocks", [1, 2, 7, 300])
def test_read_brings_exactly_the_blocks_named(pair: tuple[Side, Side], blocks: int) -> None:
    """Scattered on both sides; 300 blocks are several slices."""
    owner, reader = pair
    chosen = random.Random(blocks)
    source, target = chosen.sample(range(BLOCKS), blocks), chosen.sample(range(BLOCKS), blocks)
    number = read(reader, owner, source, target)
    ended = reader.hear(ReadEnded)
    assert (ended.read, ended.problem, ended.posted, ended.bytes) == (number, "", True, blocks * BLOCK_BYTES)
    assert_only(reader, dict(zip(target, source, strict=True)))


def test_neighbouring_blocks_longer_than_a_slice(pair: tuple[Side, Side]) -> None:
    owner, reader = pair
    blocks = SLICE_BYTES_MAX // BLOCK_BYTES + 50
    read(reader, owner, list(range(10, 10 + blocks)), list(range(3, 3 + blocks)))
    assert reader.hear(ReadEnded).problem == ""
    assert_only(reader, {3 + i: 10 + i for i in range(blocks)})


def test_blocks_in_falling_order(pair: tuple[Side, Side]) -> None:
    """A free list hands blocks out backwards; the mover sorts, and must keep the pairs."""
    owner, reader = pair
    read(reader, owner, [9, 8, 7, 6], [4, 3, 2, 1])
    assert reader.hear(ReadEnded).problem == ""
    assert_only(reader, {4: 9, 3: 8, 2: 7, 1: 6})


def test_many_reads_at_once_end_once_each(pair: tuple[Side, Side]) -> None:
    owner, reader = pair
    numbers = [read(reader, owner, [i, i + 100], [2 * i, 2 * i + 1]) for i in range(40)]
    ended = [reader.hear(ReadEnded) for _ in numbers]
    assert sorted(e.read for e in ended) == sorted(numbers)
    assert {e.problem for e in ended} == {""}
    assert_only(reader, {2 * i: i for i in range(40)} | {2 * i + 1: i + 100 for i in range(40)})
    reader.say(ProbeMover(probe=7))
    assert reader.hear(MoverAlive) == MoverAlive(probe=7, reads=0)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ([BLOCKS], [0], f"source block {BLOCKS}"),
        ([0], [BLOCKS], f"target block {BLOCKS}"),
        ([0], [(1 << 32) - 1], "target block 4294967295"),
        ([0, 1], [0], "1 target blocks of 1 for tokens 0 to 2"),
        ([1, 2], [5, 5], "named twice"),
    ],
)
def test_impossible_read_is_refused(pair: tuple[Side, Side], source: list[int], target: list[int], reason: str) -> None:
    """NIXL would read past the region or into another request's blocks: nothing is posted, nothing changes."""
    owner, reader = pair
    number = read(reader, owner, source, target)
    ended = reader.hear(ReadEnded)
    assert ended.read == number and reason in ended.problem and not ended.posted
    assert_only(reader, {})


def test_read_from_a_stranger_is_refused(pair: tuple[Side, Side]) -> None:
    _, reader = pair
    reader.say(Read(read=next(_numbers), peer="nobody", begin=0, end=1, source=pack_u32([0]), target=pack_u32([0])))
    ended = reader.hear(ReadEnded)
    assert "nobody" in ended.problem and not ended.posted


@pytest.mark.parametrize("metadata", [b"", b"\x00" * 300, b"garbage", b"nixlSerDes|" + bytes(range(256))])
def test_garbage_metadata_refuses_the_peer_and_hurts_nobody(pair: tuple[Side, Side], metadata: bytes) -> None:
    owner, reader = pair
    agent = Agent(
        epoch=1, name="bad", metadata=metadata, metadata_digest=prompt_digest(metadata),
        base_address=4096, region_bytes=SLAB_BYTES, blocks=BLOCKS,
    )  # fmt: skip
    reader.say(PeerAdd(peer="bad", geometry=plain_blocks(BLOCK_BYTES), agents=(agent,)))
    added = reader.hear(PeerAdded)
    assert added.peer == "bad" and added.problem
    read(reader, owner, [1], [1])
    assert reader.hear(ReadEnded).problem == ""


def other(peer: PeerAdd, **changes: Any) -> PeerAdd:
    """The same under another name, and with other words of its agent."""
    return replace(peer, peer="other", agents=tuple(replace(agent, **changes) for agent in peer.agents))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metadata": b"flipped"}, "does not match its digest"),
        ({"name": "other"}, ""),  # reading from the wrong agent would succeed, and bring the wrong bytes
        ({"rank": 1}, "agents of ranks 1, but its hello said tp 1"),
        ({"blocks": 0}, "the agent of rank 0 has 0 blocks"),
        ({"blocks": BLOCKS + 1}, "but its region has"),
        ({"layout": {"block_size": 2}}, "says block_size 2, its hello 1"),
        ({"layout": {"block_stride": BLOCK_BYTES - 1}}, "bytes apart overlap"),
        ({"layout": {"block_stride": -BLOCK_BYTES}}, "is negative"),
        ({"layout": {"starts": (BLOCK_BYTES,)}}, "the last byte is number"),
    ],
)
def test_agent_that_cannot_be_is_refused(pair: tuple[Side, Side], changes: dict[str, Any], reason: str) -> None:
    owner, reader = pair
    if "layout" in changes:
        changes = {"layout": replace(layout_of(plain_blocks(BLOCK_BYTES), BLOCKS), **changes["layout"])}
    reader.say(other(owner.as_peer(), **changes))
    added = reader.hear(PeerAdded)
    assert added.peer == "other" and added.problem and reason in added.problem
    read(reader, owner, [3], [4])
    assert reader.hear(ReadEnded).problem == ""
    assert_only(reader, {4: 3})


def test_peer_is_added_once(pair: tuple[Side, Side]) -> None:
    """Two agents of one name would give the wrong one's bytes."""
    owner, reader = pair
    reader.say(owner.as_peer())
    assert "already" in reader.hear(PeerAdded).problem


def test_removed_peer_is_a_stranger_and_others_stay(rig: Rig, pair: tuple[Side, Side]) -> None:
    owner, reader = pair
    third = rig.start()
    third.say(reader.as_peer())
    reader.say(third.as_peer())
    assert reader.hear(PeerAdded).problem == ""
    third.memory[:BLOCK_BYTES] = coded(77)
    read(reader, third, [0], [0])
    assert reader.hear(ReadEnded).problem == ""
    reader.say(PeerRemove(peer=third.agent_name))
    read(reader, third, [0], [1])
    assert "no peer" in reader.hear(ReadEnded).problem
    read(reader, owner, [5], [6])
    assert reader.hear(ReadEnded).problem == ""
    assert_only(reader, {0: 77, 6: 5})


def test_nothing_to_read_ends_at_once(pair: tuple[Side, Side]) -> None:
    owner, reader = pair
    number = read(reader, owner, [], [])
    ended = reader.hear(ReadEnded)
    assert (ended.read, ended.problem, ended.posted, ended.bytes) == (number, "", False, 0)


# ---------------------------------------------------------------- real processes only


def test_owner_killed_ends_its_reads_and_spares_the_reader(live: LiveRig) -> None:
    """Frozen first, so that the reads are certainly under way."""
    owner, reader = introduced(live)
    os.kill(owner.pid, signal.SIGSTOP)
    blocks = list(range(400))
    numbers = [read(reader, owner, blocks, blocks) for _ in range(2)]
    os.kill(owner.pid, signal.SIGKILL)
    assert owner.ended().signal == "SIGKILL"
    ended = {e.read: e.problem for e in (reader.hear(ReadEnded) for _ in numbers)}
    assert sorted(ended) == numbers
    read(reader, owner, [0], [0])
    assert "gone" in reader.hear(ReadEnded).problem
    reader.say(PeerRemove(peer=owner.agent_name))
    successor = live.start()
    successor.say(reader.as_peer())
    reader.say(successor.as_peer())
    assert reader.hear(PeerAdded).problem == ""
    fill(successor, reader)
    read(reader, successor, [1], [2])
    assert reader.hear(ReadEnded).problem == ""
    assert_only(reader, {2: 1})


def test_owner_outlives_a_killed_reader_or_says_how_it_died(live: LiveRig) -> None:
    """Over TCP the death of a reader in mid-read may end the owner's mover by a signal: that is why it is a process
    of its own. Whatever happens, the slab keeps its bytes and the next mover or the next reader works."""
    owner, reader = introduced(live)
    fill(owner, reader)
    blocks = list(range(400))
    read(reader, owner, blocks, blocks)
    os.kill(reader.pid, signal.SIGKILL)
    reader.ended()
    owner.say(ProbeMover(probe=1))
    try:
        owner.hear(MoverAlive)
    except Broken:
        assert owner.ended().signal in {"SIGABRT", "SIGSEGV"}
    assert block_of(owner, 399) == coded(399)


@pytest.mark.parametrize("live", ["default"], indirect=True)
@pytest.mark.live
def test_region_that_the_metadata_does_not_hold_is_refused(live: LiveRig) -> None:
    owner, reader = live.start(), live.start()
    reader.say(other(owner.as_peer(), region_bytes=2 * SLAB_BYTES))
    assert "region" in reader.hear(PeerAdded).problem
    reader.say(ProbeMover(probe=1))
    assert reader.hear(MoverAlive).reads == 0


def test_stop_without_reads_exits_cleanly(live: LiveRig) -> None:
    _, reader = introduced(live)
    reader.say(StopMover())
    assert reader.ended().code == 0


def test_stop_waits_for_its_own_reads(live: LiveRig) -> None:
    """A reader that leaves in mid-read can kill the owner."""
    owner, reader = introduced(live)
    fill(owner, reader)
    blocks = list(range(400))
    read(reader, owner, blocks, blocks)
    reader.say(StopMover(wait_ms=20_000))
    assert reader.hear(ReadEnded).problem == ""
    assert reader.ended().code == 0
    assert_only(reader, {b: b for b in blocks})


@pytest.mark.parametrize("live", ["tcp"], indirect=True)
@pytest.mark.live
def test_stop_does_not_wait_for_ever(live: LiveRig) -> None:
    """A frozen owner's read stays in progress for ever."""
    owner, reader = introduced(live)
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        read(reader, owner, [1], [1])
        reader.say(StopMover(wait_ms=100))
        assert reader.ended().code == 0
    finally:
        os.kill(owner.pid, signal.SIGCONT)


@pytest.mark.parametrize("live", ["default"], indirect=True)
@pytest.mark.live
def test_sigterm_stops_it_in_order(live: LiveRig) -> None:
    """The kernel sends it when control dies."""
    side = live.start()
    os.kill(side.pid, signal.SIGTERM)
    assert side.ended().code == 0


@pytest.mark.parametrize("live", ["default"], indirect=True)
@pytest.mark.live
def test_mover_never_loads_torch(live: LiveRig) -> None:
    """It would cost every mover seconds and hundreds of MB."""
    side = live.start()
    maps = Path(f"/proc/{side.pid}/maps").read_text()
    assert "nixl" in maps and "torch" not in maps


@pytest.mark.live
def test_mover_that_cannot_start_says_why(tmp_path: Path) -> None:
    """UCX's own error is a bare 'backend error'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "nosuch0")
        patch.setenv("UCX_TLS", "tcp")
        rig = LiveRig()
        try:
            with pytest.raises(Broken, match="UCX_NET_DEVICES"):
                rig.start()
        finally:
            rig.close()


CONTROL = """
import asyncio, sys
from pdbus.nodes.bench.movers import Movers
async def main():
    movers = Movers()
    mover = await movers.start("orphan-%d", 1 << 20, 1 << 16)
    print("PID", mover.ready.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.live
def test_mover_ends_when_control_is_killed() -> None:
    control = subprocess.Popen(
        [sys.executable, "-c", CONTROL % os.getpid()], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert control.stdout
    with control, control.stdout:
        pid = next(int(line.split()[1]) for line in control.stdout if line.startswith("PID"))
        mover = psutil.Process(pid)
        control.kill()
        mover.wait(20)
