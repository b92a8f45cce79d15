"""A process that is short of descriptors lets nobody else in, keeps who is in, and opens again."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import pytest

from pdbus.bus.client import Client
from pdbus.bus.door import DESCRIPTORS_KEPT, descriptors_left

from tests.fake_node import FakeNode

CALLERS, ROOM = 100, 20  # beside those that are kept
CALL = """
import socket, sys
port, count, held = int(sys.argv[1]), int(sys.argv[2]), []
sys.stdin.readline()
for _ in range(count):
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex(("127.0.0.1", port))
sys.stdin.read()
"""


@contextmanager
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/dev/fd")))
    free = (number for number in range(soft) if number not in used)
    limit = next(islice(free, ROOM + DESCRIPTORS_KEPT, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Crowd:
    """Strangers in a process of their own, which connect all at once and say nothing."""

    @classmethod
    async def gather(cls, address: str) -> Crowd:
        self, pipe = cls(), asyncio.subprocess.PIPE
        words = (sys.executable, "-c", CALL, address.rpartition(":")[2], str(CALLERS))
        self._process = await asyncio.create_subprocess_exec(*words, stdin=pipe)
        return self

    def come(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("door", ["bus", "events"])
def test_a_crowd_before_the_door(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.bus.door.LOOK_S", 0.01)

    async def scene() -> None:
        node = FakeNode()
        node.bind()
        crowded, address = (node.endpoint, node.address) if door == "bus" else (node.publisher, node.events)
        crowd = await Crowd.gather(address)
        async with Client(node.address) as inside:
            with few_descriptors():
                crowd.come()
                await until(lambda: crowded.door_problem)
                assert "raise `ulimit -n`" in crowded.door_problem
                await until(lambda: descriptors_left() >= DESCRIPTORS_KEPT // 2)  # the rest is hung up on
                await inside.status()
                await crowd.leave()
                await until(lambda: not crowded.door_problem)
            async with Client(node.address) as newcomer:
                await newcomer.status()
        node.close()

    asyncio.run(scene())
