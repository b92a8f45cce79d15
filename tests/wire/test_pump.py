"""A socket on the event loop: what its owner does must not be upset by what was due before."""

from __future__ import annotations

import asyncio

import zmq

from pdbus.bus.pump import Pump


def test_a_look_that_was_due_when_the_socket_closed_finds_nothing() -> None:
    """The loop runs callbacks that were ready, whoever has removed their descriptor meanwhile in the same round."""

    async def test() -> None:
        with zmq.Context() as context:
            socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
            pump = Pump(socket, lambda frames: None)
            pump.close()
            pump._drain()

    asyncio.run(test())
