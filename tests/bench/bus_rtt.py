"""Round trips between two processes: a typed request and reply over Endpoint against bare pyzmq asyncio on uvloop.

Both carry the same bytes in the same frames, and are measured in turns in one run. Prints one JSON line:
median and p99 of a round trip in microseconds, and the ratio of the medians.

    python -m tests.bench.bus_rtt [--rounds 20] [--trips 500]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

import uvloop
import zmq
import zmq.asyncio

from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.frames import pack
from pdbus.bus.messages import Generate, Message, Token
from pdbus.bus.wire import Header, pack_u32

ASK: Message = Generate(client_id="c1", tokens=pack_u32(range(64)))
ANSWER: Message = Token(client_id="c1", request=bytes(16), index=3, tokens=pack_u32([17]), text=" word")
HEADER = Header(from_="bench-1", from_inc=bytes(16), to="bench-2", to_inc=bytes(16), seq=1000, cause=1000)


async def serve() -> None:
    """The other process: one ROUTER of each sort, until its standard input ends."""

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


async def typed_us(endpoint: Endpoint, link: str, trips: int) -> list[float]:
    took: list[float] = []
    for _ in range(trips):
        start = time.perf_counter_ns()
        await endpoint.request(link, ASK, Token, 5, to="bench-2", to_inc=bytes(16))
        took.append((time.perf_counter_ns() - start) / 1000)
    return took


async def bare_us(dealer: zmq.asyncio.Socket, trips: int) -> list[float]:
    frames = pack(HEADER, ASK)
    took: list[float] = []
    for _ in range(trips):
        start = time.perf_counter_ns()
        await dealer.send_multipart(frames)
        await dealer.recv_multipart()
        took.append((time.perf_counter_ns() - start) / 1000)
    return took


async def measure(rounds: int, trips: int) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.bus_rtt", "--serve"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    typed_at, bare_at = json.loads(await child.stdout.readline())
    endpoint = Endpoint("bench-1", os.urandom(16), lambda received: None)
    link = endpoint.connect(typed_at)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(bare_at)
    typed: list[float] = []
    bare: list[float] = []
    for turn in range(rounds + 1):
        one, two = await typed_us(endpoint, link, trips), await bare_us(dealer, trips)
        if turn:  # the first warms up
            typed += one
            bare += two
    endpoint.close()
    context.destroy(linger=0)
    await child.communicate(b"")
    return {
        "rtt_us": round(statistics.median(typed), 1),
        "pyzmq_rtt_us": round(statistics.median(bare), 1),
        "ratio_to_pyzmq": round(statistics.median(typed) / statistics.median(bare), 3),
        "p99_us": round(statistics.quantiles(typed, n=100)[98], 1),
        "pyzmq_p99_us": round(statistics.quantiles(bare, n=100)[98], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trips", type=int, default=500)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve())
    else:
        print(json.dumps(uvloop.run(measure(args.rounds, args.trips))))


if __name__ == "__main__":
    main()
