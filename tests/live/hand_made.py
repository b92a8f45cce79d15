"""A node made by hand: on a real bus, and on a real mover if it is to be read from, but every word is the test's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from pdbus.bus.client import Client
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import (
    Agent,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseId,
    LeaseReleased,
    Message,
    PrefillCancel,
    PrefillCancelled,
    PrefillDone,
    PrefillRequest,
    Sampling,
    TransferDone,
    TryId,
    Welcome,
)
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import Advertise
from pdbus.connector.layout import layout_of
from pdbus.nodes.bench.movers import Movers
from pdbus.nodes.node_process import NodeProcess

from .faults import GEOMETRY, TCP, WAIT_S, prompt

M = TypeVar("M", bound=Message)
BLOCKS = 64  # of a prefill node made by hand


def mostly_long(names: Iterable[str], short: str) -> list[Any]:
    """All of them as parameters, of which `make test` takes one."""
    return [name if name == short else pytest.param(name, marks=pytest.mark.long) for name in names]


class HandMade:
    """Answers pings, and whatever else the test makes it answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = os.urandom(16)
        self.endpoint = Endpoint(name, self.incarnation, self._hear)
        self.heard: list[Received] = []
        self.answers: dict[type[Message], Callable[[Received], None]] = {Heartbeat: self._pong}
        self._news = asyncio.Event()

    def _hear(self, received: Received) -> None:
        self.heard.append(received)
        if answer := self.answers.get(type(received.message)):
            answer(received)
        self._news.set()

    def _pong(self, received: Received) -> None:
        if isinstance(received.message, Heartbeat) and received.message.reply:
            self.tell(received, Heartbeat())

    def tell(self, received: Received, message: Message) -> None:
        header = received.header
        self.endpoint.send(received.link, message, cause=header.seq, to=header.from_, to_inc=header.from_inc)

    async def first(self, kind: type[M], true: Callable[[M], bool] = lambda _: True, *, since: int = 0) -> Received:
        """The first of that kind, heard already or to come, that is so; the first `since` messages do not count."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for received in self.heard[since:]:
                    if isinstance(received.message, kind) and true(received.message):
                        return received
                self._news.clear()
                await self._news.wait()


async def hello_of(node: NodeProcess) -> Hello:
    async with Client(node.address) as client:
        return (await client.node()).hello


# ---------------------------------------------------------------- a decode node


class Reader(HandMade):
    """Asks a real prefill node, and claims what it likes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._requests = 0

    async def join(self, p: NodeProcess) -> None:
        self.link = self.endpoint.connect(p.address)
        hello = replace(await hello_of(p), role="decode", address="", http="", events="")
        welcome = await self.endpoint.ask(self.link, hello, (Welcome,), WAIT_S)
        self.p, self.p_incarnation = welcome.header.from_, welcome.header.from_inc

    async def asks(self, tokens: int, salt: int, attempt: int = 1, request: bytes = b"") -> PrefillDone:
        """A prompt of so many tokens, computed there: the lease is held, and ready to be read."""
        self._requests += 1
        request = request or self._requests.to_bytes(16, "big")
        asked = pack_u32(prompt(tokens, salt))
        try_ = TryId(node=self.name, incarnation=self.incarnation, request=request, attempt=attempt)
        message = PrefillRequest(
            try_=try_, sampling=Sampling(), have=0, deadline_ms=60_000, prompt_tokens=tokens,
            prompt_digest=prompt_digest(asked),
        )  # fmt: skip
        self.endpoint.send(self.link, message, (asked,), to=self.p, to_inc=self.p_incarnation)
        done = (await self.first(PrefillDone, lambda done: done.try_ == try_)).message
        assert isinstance(done, PrefillDone)
        return done

    async def claims(self, try_: TryId, lease: LeaseId) -> LeaseReleased:
        return await self.requests(TransferDone(try_=try_, lease=lease), LeaseReleased)

    async def requests(self, message: Message, answer: type[M]) -> M:
        """What it says next of that kind: answers of the hand-off name no cause."""
        since = len(self.heard)
        self.endpoint.send(self.link, message, to=self.p, to_inc=self.p_incarnation)
        answered = (await self.first(answer, since=since)).message
        assert isinstance(answered, answer)
        return answered


@asynccontextmanager
async def reader_of(p: NodeProcess, name: str = "odd") -> AsyncIterator[Reader]:
    """A decode node that p has welcomed."""
    reader = Reader(name)
    try:
        await reader.join(p)
        yield reader
        reader.endpoint.send(reader.link, Goodbye())
    finally:
        reader.endpoint.close(linger_ms=1000)


# ---------------------------------------------------------------- a prefill node


class Owner(HandMade):
    """Welcomes a real decode node, and says `agent` of its memory. That is there, and has no KV in it."""

    def __init__(self, name: str, hello: Hello, agent: Agent | None) -> None:
        super().__init__(name)
        self.agent = agent
        self.address = self.endpoint.bind("tcp://127.0.0.1:0")
        self.hello = replace(hello, role="prefill", address=self.address, http="", events="", epoch=1)
        self.answers |= {Hello: self._welcome, PrefillCancel: self._cancelled}

    def _welcome(self, received: Received) -> None:
        self.tell(received, Welcome(hello=self.hello))
        if self.agent is not None:
            self.tell(received, self.agent)

    def _cancelled(self, received: Received) -> None:
        assert isinstance(received.message, PrefillCancel)
        self.tell(received, PrefillCancelled(try_=received.message.try_))

    def lease(self, generation: int = 1, **changes: object) -> LeaseId:
        lease = LeaseId(node=self.name, incarnation=self.incarnation, epoch=1, generation=generation)
        return replace(lease, **changes)


@asynccontextmanager
async def owner_for(d: NodeProcess, name: str, **changes: object) -> AsyncIterator[Owner]:
    """A prefill node that d can be asked to join, over TCP. `changes`: what it says wrong of its agent."""
    layout = layout_of(GEOMETRY, BLOCKS)
    async with Movers() as movers:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in TCP.items():
                patch.setenv(key, value)
            mover = await movers.start(f"{name}-{os.getpid()}", layout.region_bytes, layout.region_bytes // BLOCKS)
        mover.say(Advertise(leases=1))
        (agent,) = mover.as_peer().agents
        owner = Owner(name, await hello_of(d), replace(agent, **changes))
        try:
            yield owner
        finally:
            owner.endpoint.close()
