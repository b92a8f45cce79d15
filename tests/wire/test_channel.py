"""Control's line to its children: in order, whole, private, and loud when something is wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pdbus.bus.errors import Broken, Closed, ConfigError, RemoteProtocolError
from pdbus.connector.channel import ChildChannel, ControlChannel, endpoint_in
from pdbus.connector.ipc import Advertise, FromMover, MoverAlive, PeerRemove, ProbeMover, ToMover
from pdbus.connector.run_directory import RunDirectory


@pytest.fixture
def directory() -> Iterator[Path]:
    made = RunDirectory()
    yield made.path
    made.close()


HERE = MoverAlive(probe=-1, reads=0)


def echo(endpoint: str, count: int) -> None:
    """A child: says a first word, then answers each of `count` probes with its number when all have come."""
    channel = ChildChannel(endpoint, ToMover)
    channel.send(HERE)
    heard: list[ToMover] = []
    while len(heard) < count:
        heard += channel.poll(1000)
    for message in heard:
        assert isinstance(message, ProbeMover)
        channel.send(MoverAlive(probe=message.probe, reads=0))
    channel.close()


def in_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())
    uvloop.run(test())


def test_directory_is_private(directory: Path) -> None:
    """Neither end authenticates: the directory's mode is the lock."""
    assert directory.stat().st_mode & 0o777 == 0o700


def test_path_longer_than_a_unix_socket_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        endpoint_in(directory, "x" * 120)


def test_messages_arrive_whole_and_in_order(directory: Path) -> None:
    """Many at once: a wake-up must drain the socket."""
    names = iter("ab")

    async def test() -> None:
        heard: asyncio.Queue[FromMover] = asyncio.Queue()
        channel = ControlChannel(endpoint_in(directory, next(names)), FromMover, heard.put_nowait)
        child = threading.Thread(target=echo, args=(channel.endpoint, 500))
        child.start()
        assert await heard.get() == HERE
        for probe in range(500):
            channel.send(ProbeMover(probe=probe))
        assert [await heard.get() for _ in range(500)] == [MoverAlive(probe=n, reads=0) for n in range(500)]
        child.join()
        channel.close()
        await channel.run()

    in_both_loops(test)


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(directory: Path) -> None:
    async def test() -> None:
        heard: asyncio.Queue[FromMover] = asyncio.Queue()
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, heard.put_nowait)
        got: list[ToMover] = []
        child = threading.Thread(target=collect, args=(channel.endpoint, got, 3))
        child.start()
        assert await heard.get() == HERE
        said = [PeerRemove(peer="a" * 3_000_000), PeerRemove(peer="b"), PeerRemove(peer="c" * 1_000_000)]
        for message in said:
            channel.send(message)
        await asyncio.to_thread(child.join)
        assert got == said
        channel.close()

    asyncio.run(test())


def collect(endpoint: str, got: list[ToMover], count: int) -> None:
    channel = ChildChannel(endpoint, ToMover)
    channel.send(HERE)
    while len(got) < count:
        got += channel.poll(1000)
    channel.close()


def test_a_childs_last_words_are_heard_after_its_end(directory: Path) -> None:
    async def test() -> None:
        heard: asyncio.Queue[FromMover] = asyncio.Queue()
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, heard.put_nowait)
        child = ChildChannel(channel.endpoint, ToMover)
        child.send(HERE)
        child.close()
        assert await heard.get() == HERE
        channel.close()

    asyncio.run(test())


def test_a_child_learns_at_once_that_control_has_gone(directory: Path) -> None:
    async def test() -> None:
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, lambda message: None)
        child = ChildChannel(channel.endpoint, ToMover)
        channel.close()
        with pytest.raises(Closed, match="control has ended"):
            child.poll(None)
        with pytest.raises(Closed, match="control has ended"):
            child.send(HERE)
        child.close()

    asyncio.run(test())


def test_request_and_reply_do_not_lose_a_wake_up(directory: Path) -> None:
    """Sending may swallow the edge that says something is to be read."""
    names = iter("ab")

    async def test() -> None:
        heard: asyncio.Queue[FromMover] = asyncio.Queue()
        channel = ControlChannel(endpoint_in(directory, next(names)), FromMover, heard.put_nowait)
        child = threading.Thread(target=serve_probes, args=(channel.endpoint, 300))
        child.start()
        assert await heard.get() == HERE
        for probe in range(300):
            channel.send(ProbeMover(probe=probe))
            channel.send(Advertise(leases=probe))
            assert await heard.get() == MoverAlive(probe=probe, reads=0)
        child.join()
        channel.close()

    in_both_loops(test)


def serve_probes(endpoint: str, count: int) -> None:
    channel = ChildChannel(endpoint, ToMover)
    channel.send(HERE)
    while count:
        for message in channel.poll(1000):
            if isinstance(message, ProbeMover):
                channel.send(MoverAlive(probe=message.probe, reads=0))
                count -= 1
    channel.close()


def test_failing_handler_ends_run_loudly(directory: Path) -> None:
    async def test() -> None:
        def refuse(message: FromMover) -> None:
            raise ValueError("a bug")

        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, refuse)
        child = threading.Thread(target=echo, args=(channel.endpoint, 0))
        child.start()
        with pytest.raises(ValueError, match="a bug"):
            await channel.run()
        child.join()
        channel.close()

    asyncio.run(test())


@pytest.mark.parametrize("said", [b"\x05\0\0\0\xff not", b"\xff\xff\xff\xff"])
def test_what_is_no_message_is_refused(directory: Path, said: bytes) -> None:
    async def test() -> None:
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, lambda message: None)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(channel.endpoint)
            stranger.sendall(said)
            with pytest.raises(RemoteProtocolError):
                await channel.run()
        channel.close()

    asyncio.run(test())


def test_nothing_can_be_said_before_the_child_is_there(directory: Path) -> None:
    async def test() -> None:
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, lambda message: None)
        with pytest.raises(Broken, match="does not read"):
            channel.send(ProbeMover(probe=1))
        channel.close()

    asyncio.run(test())


def test_closed_channel_refuses_to_speak_and_leaves_no_file(directory: Path) -> None:
    async def test() -> None:
        channel = ControlChannel(endpoint_in(directory, "a"), FromMover, lambda message: None)
        channel.close()
        channel.close()
        await channel.run()
        with pytest.raises(Closed):
            channel.send(PeerRemove(peer="P"))

    asyncio.run(test())
    assert [file.name for file in directory.iterdir()] == ["lock"]
