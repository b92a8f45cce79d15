"""`pd bench bus`: round trips between two processes, a typed request and reply beside bare pyzmq.

Both carry the same bytes in the same frames, and are measured in turns in one run. Then again while a node's worker
computes one prompt of 1,000 tokens after the other: the typed ones with that node's own control, so that whatever a
forward pass does to its bus shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from statistics import median, quantiles
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from pdbus.bus.client import Client
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.frames import pack
from pdbus.bus.messages import Generate, Ledger, LedgerReply, Message, Token
from pdbus.bus.wire import Header, pack_u32
from pdbus.nodes.bench.serve import random_model, random_prompts
from pdbus.nodes.cluster import Cluster

ASK: Message = Generate(client_id="c1", tokens=pack_u32(range(64)))
ANSWER: Message = Token(client_id="c1", request=bytes(16), index=3, tokens=pack_u32([17]), text=" word")
HEADER = Header(from_="bench-1", from_inc=bytes(16), to="bench-2", to_inc=bytes(16), seq=1000, cause=1000)
TURN_TRIPS = 100
ANSWER_S = 5.0
PREFILL_TOKENS = 1000
PIPELINED = 64  # requests under way while throughput is measured

Trip = Callable[[], Awaitable[object]]


def run(messages: int = 2000) -> dict[str, float]:
    """Medians, 99th percentiles and throughput over `messages` round trips of each kind."""
    result: dict[str, float] = uvloop.run(_run(messages))
    return result


async def _run(messages: int) -> dict[str, float]:
    async with _other_process() as (typed_at, bare_at):
        endpoint = Endpoint("bench-1", os.urandom(16), lambda received: None)
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(bare_at)
        try:
            return await _measure(messages, endpoint, endpoint.connect(typed_at), dealer)
        finally:
            endpoint.close()
            context.destroy(linger=0)


async def _measure(messages: int, endpoint: Endpoint, link: str, dealer: zmq.asyncio.Socket) -> dict[str, float]:
    frames = pack(HEADER, ASK)

    async def typed() -> object:
        return await endpoint.request(link, ASK, Token, ANSWER_S, to="bench-2", to_inc=bytes(16))

    async def bare() -> object:
        await dealer.send_multipart(frames)
        return await dealer.recv_multipart()

    typed_us, bare_us = await _in_turns(typed, bare, messages)
    per_second = await _throughput(typed, messages)
    loaded_us, loaded_bare_us = await _under_load(endpoint, bare, messages)
    return {
        "rtt_us": median(typed_us),
        "pyzmq_rtt_us": median(bare_us),
        "ratio_to_pyzmq": median(typed_us) / median(bare_us),
        "p99_us": _p99(typed_us),
        "pyzmq_p99_us": _p99(bare_us),
        "p99_ms_during_prefill": _p99(loaded_us) / 1e3,
        "pyzmq_p99_ms_during_prefill": _p99(loaded_bare_us) / 1e3,
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
            return await _in_turns(typed, bare, messages)
        finally:
            prefilling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await prefilling


async def _prefill_for_ever(client: Client) -> None:
    for salt in itertools.count():
        (prompt,) = random_prompts(1, PREFILL_TOKENS, salt)
        async for _ in client.generate(prompt, max_tokens=1):
            pass


async def _in_turns(one: Trip, other: Trip, trips: int) -> tuple[list[float], list[float]]:
    """Microseconds of each round trip, in turns of TURN_TRIPS; the first turn of each only warms up."""
    took: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, -(-trips // TURN_TRIPS)):
        for trip, into in zip((one, other), took, strict=True):
            times = [await _timed(trip) for _ in range(TURN_TRIPS)]
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


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


# ---------------------------------------------------------------- the other process


@contextlib.asynccontextmanager
async def _other_process() -> AsyncIterator[tuple[str, str]]:
    """Its typed and its bare address; it ends when its standard input does."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        typed_at, bare_at = json.loads(await child.stdout.readline())
        yield typed_at, bare_at
    finally:
        await child.communicate(b"")


async def _answer_both() -> None:
    """One ROUTER of each sort, until standard input ends."""

    def answer(received: Received) -> None:
        endpoint.send(received.link, ANSWER, cause=received.header.seq, to="bench-1", to_inc=bytes(16))

    endpoint = Endpoint("bench-2", os.urandom(16), answer)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps([endpoint.bind("tcp://127.0.0.1:0"), f"tcp://127.0.0.1:{port}"]), flush=True)
    echoing = asyncio.create_task(_echo(router))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    echoing.cancel()
    endpoint.close()
    context.destroy(linger=0)


async def _echo(router: zmq.asyncio.Socket) -> None:
    answer = pack(HEADER, ANSWER)
    while True:
        frames = await router.recv_multipart()
        await router.send_multipart([frames[0], *answer])


if __name__ == "__main__":
    uvloop.run(_answer_both())
