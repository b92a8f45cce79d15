"""`python -m pdbus.nodes.bench.busy_clients URL CLIENTS`: streams one answer after the other, for `pd bench http`.

A process of its own, so that what it computes delays no measurement elsewhere. Says `busy` once every client has had a
token; when its standard input ends, says `TOKENS FAILED`: how many tokens came, and how many answers were cut short.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing

import uvloop

from pdbus.bus import wire
from pdbus.connector.channel import end_with_parent

from .serve import random_prompts

PROMPT_TOKENS, ANSWER_TOKENS = 64, 200


class Clients:
    def __init__(self, url: str, clients: int) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._clients = clients
        self._answering: set[int] = set()
        self.all_busy = asyncio.Event()
        self.tokens = self.failed = 0

    async def client(self, number: int) -> None:
        """Until it is cancelled. A bare connection: what a library would add is not ours."""
        while True:
            (prompt,) = random_prompts(1, PROMPT_TOKENS, number)
            body = wire.to_json({"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True})
            reader, writer = await asyncio.open_connection(self._host, self._port)
            with closing(writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await self._read(reader, number)

    async def _read(self, reader: asyncio.StreamReader, number: int) -> None:
        done = False
        while line := await reader.readline():
            done = line.startswith(b"data: [DONE]")
            if done:
                break
            if line.startswith(b"data: "):
                self._came(number)
        self.failed += not done

    def _came(self, number: int) -> None:
        self.tokens += 1
        if len(self._answering) < self._clients:
            self._answering.add(number)
            if len(self._answering) == self._clients:
                self.all_busy.set()


async def main(url: str, clients: int) -> None:
    all_of = Clients(url, clients)
    tasks = [asyncio.create_task(all_of.client(number)) for number in range(clients)]
    await all_of.all_busy.wait()
    print("busy", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(all_of.tokens, all_of.failed, flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    end_with_parent()
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
