"""`pd bench bus`: round trips between two processes, a typed request and reply beside bare pyzmq.

Both carry the same bytes in the same frames, and are measured in turns in one run. Then again while a node's worker
computes one prompt of 1,000 tokens after the other: the typed ones with that node's own control, so that whatever a
forward pass does to its bus shows. What keys cost is measured with the same two processes: curve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from pdbus.bus.client import Client
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.frames import pack
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keyring import Keyring
from pdbus.bus.keys import Key
from pdbus.bus.messages import Generate, Ledger, LedgerReply, Message, Token
from pdbus.bus.wire import Header, pack_u32
from pdbus.nodes.bench.serve import random_model, random_prompts
from pdbus.nodes.cluster import Cluster

from .figures import p99

ASK: Message = Generate(client_id="c1", tokens=pack_u32(range(64)))
ANSWER: Message = Token(client_id="c1", request=bytes(16), index=3, tokens=pack_u32([17]), text=" word")
HEADER = Header(from_="bench-1", from_inc=bytes(16), to="bench-2", to_inc=bytes(16), seq=1000, cause=1000)
TURN_TRIPS = 100
ANSWER_S = 5.0
PREFILL_TOKENS = 1000
STREAM = "stream"  # a client_id that asks for STREAM_TOKENS answers
STREAM_TOKENS = 1000
PIPELINED = 64  # requests under way while throughput is measured

Trip = Callable[[], Awaitable[object]]


def run(messages: int = 2000) -> dict[str, float]:
    """Medians, 99th percentiles and throughput over `messages` round trips of each kind."""
    result: dict[str, float] = uvloop.run(_run(messages))
    return result


async def _run(messages: int) -> dict[str, float]:
    async with callers() as (plain, _, bare_at):
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(bare_at)
        try:
            return await _measure(messages, plain, dealer)
        finally:
            context.destroy(linger=0)


class Caller:
    """An endpoint with a link to the other process."""

    def __init__(self, address: str, keyring: Keyring | None = None) -> None:
        self.endpoint = Endpoint("bench-1", os.urandom(16), self._hear, keyring=keyring)
        self._link = self.endpoint.connect(address)
        self._left = 0
        self._done = asyncio.Event()

    async def trip(self) -> object:
        return await self.endpoint.request(self._link, ASK, Token, ANSWER_S, to="bench-2", to_inc=bytes(16))

    async def stream(self) -> float:
        """Tokens a second, sent one a message."""
        self._left = STREAM_TOKENS
        self._done.clear()
        began = time.perf_counter()
        self.endpoint.send(self._link, Generate(client_id=STREAM), to="bench-2", to_inc=bytes(16))
        async with asyncio.timeout(ANSWER_S):
            await self._done.wait()
        return STREAM_TOKENS / (time.perf_counter() - began)

    def _hear(self, received: Received) -> None:
        self._left -= 1
        if self._left <= 0:
            self._done.set()


@contextlib.asynccontextmanager
async def callers() -> AsyncIterator[tuple[Caller, Caller, str]]:
    """To another process without keys and with, and the address of a bare socket there."""
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFolder(folder)
        for name, role in (("bench-1", "client"), ("bench-2", "decode")):
            keys.allow(Key(name=name, role=role, public=keys.make(name).public))
        async with _other_process(folder) as (typed_at, bare_at, keyed_at):
            plain = Caller(typed_at)
            keyed = Caller(keyed_at, Keyring(keys, keys.own("bench-1"), node=keys.own("bench-2").public))
            try:
                yield plain, keyed, bare_at
            finally:
                plain.endpoint.close()
                keyed.endpoint.close()


async def _measure(messages: int, plain: Caller, dealer: zmq.asyncio.Socket) -> dict[str, float]:
    frames = pack(HEADER, ASK)

    async def bare() -> object:
        await dealer.send_multipart(frames)
        return await dealer.recv_multipart()

    typed_us, bare_us = await in_turns(plain.trip, bare, messages)
    per_second = await _throughput(plain.trip, messages)
    loaded_us, loaded_bare_us = await _under_load(plain.endpoint, bare, messages)
    return {
        "rtt_us": median(typed_us),
        "pyzmq_rtt_us": median(bare_us),
        "ratio_to_pyzmq": median(typed_us) / median(bare_us),
        "p99_us": p99(typed_us),
        "pyzmq_p99_us": p99(bare_us),
        "p99_ms_during_prefill": p99(loaded_us) / 1e3,
        "pyzmq_p99_ms_during_prefill": p99(loaded_bare_us) / 1e3,
        "messages_per_s": per_second,
    }


async def _under_load(endpoint: Endpoint, bare: Trip, messages: int) -> tuple[list[float], list[float]]:
    """Round trips with a node's control, and bare ones, while its worker computes prompts."""
    options: dict[str, Any] = {"model": str(random_model()), "threads": 1}
    async with Cluster(0, 0, both=1, options=options) as cluster, Client(cluster.both[0].address) as client:
        link = endpoint.connect(cluster.both[0].address)

        async def typed() -> object:
            return await endpoint.request(link, Ledger(), LedgerReply, ANSWER_S)

        prefilling = asyncio.create_task(_prefill_for_ever(client))
        try:
            return await in_turns(typed, bare, messages)
        finally:
            prefilling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await prefilling


async def _prefill_for_ever(client: Client) -> None:
    for salt in itertools.count():
        (prompt,) = random_prompts(1, PREFILL_TOKENS, salt)
        async for _ in client.generate(prompt, max_tokens=1):
            pass


async def in_turns(one: Trip, other: Trip, trips: int, turn_trips: int = TURN_TRIPS) -> tuple[list[float], list[float]]:
    """Microseconds of each round trip, in turns of `turn_trips`; who is first changes with every turn. The first
    TURN_TRIPS of each only warm up."""
    took: tuple[list[float], list[float]] = ([], [])
    warm_up = -(-TURN_TRIPS // turn_trips)
    for turn in range(-warm_up, -(-trips // turn_trips)):
        pairs = list(zip((one, other), took, strict=True))
        for trip, into in pairs if turn % 2 else reversed(pairs):
            times = [await _timed(trip) for _ in range(turn_trips)]
            if turn >= 0:
                into += times
    return took


async def _timed(trip: Trip) -> float:
    began = time.perf_counter_ns()
    await trip()
    return (time.perf_counter_ns() - began) / 1e3


async def _throughput(trip: Trip, trips: int) -> float:
    """Round trips a second with PIPELINED of them under way."""

    async def some() -> None:
        for _ in range(-(-trips // PIPELINED)):
            await trip()

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(PIPELINED)))
    return PIPELINED * -(-trips // PIPELINED) / (time.perf_counter() - began)


# ---------------------------------------------------------------- the other process


@contextlib.asynccontextmanager
async def _other_process(keys: str) -> AsyncIterator[tuple[str, str, str]]:
    """Its addresses: typed, bare, and typed with `keys`, a folder; it ends when its standard input does."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, keys, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        typed_at, bare_at, keyed_at = json.loads(await child.stdout.readline())
        yield typed_at, bare_at, keyed_at
    finally:
        await child.communicate(b"")


def _answering(keyring: Keyring | None = None) -> tuple[Endpoint, str]:
    """An endpoint that answers, and where."""

    def answer(received: Received) -> None:
        if isinstance(received.message, Generate) and received.message.client_id == STREAM:
            for _ in range(STREAM_TOKENS):
                endpoint.send(received.link, ANSWER, to="bench-1", to_inc=bytes(16))
        else:
            endpoint.send(received.link, ANSWER, cause=received.header.seq, to="bench-1", to_inc=bytes(16))

    endpoint = Endpoint("bench-2", os.urandom(16), answer, keyring=keyring)
    return endpoint, endpoint.bind("tcp://127.0.0.1:0")


async def _answer_all(keys: Path) -> None:
    """One ROUTER of each sort, until standard input ends."""
    folder = KeyFolder(keys)
    plain, typed_at = _answering()
    keyed, keyed_at = _answering(Keyring(folder, folder.own("bench-2")))
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps([typed_at, f"tcp://127.0.0.1:{port}", keyed_at]), flush=True)
    echoing = asyncio.create_task(_echo(router))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    echoing.cancel()
    plain.close()
    keyed.close()
    context.destroy(linger=0)


async def _echo(router: zmq.asyncio.Socket) -> None:
    answer = pack(HEADER, ANSWER)
    while True:
        frames = await router.recv_multipart()
        await router.send_multipart([frames[0], *answer])


if __name__ == "__main__":
    uvloop.run(_answer_all(Path(sys.argv[1])))
