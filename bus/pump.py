"""One ZeroMQ socket on the event loop, without a task: read when its descriptor says so, until empty.

ZeroMQ's descriptor tells of *changes*: whoever receives or sends must look again until nothing is left, or a
message lies unseen until the next one comes. Every place where that matters is in this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

USER = "User-Id"  # the property of a message that holds what the handler answered
BURST_MESSAGES = 64  # read in one go before other callbacks of the loop get their turn


class Pump:
    """Owns `socket`: hands every message to `deliver`, in order; sends without waiting. Used by one thread.

    `deliver` gets at most `frames_max` + 1 frames of a message (one too many shows that there were more), may
    send, and may close the pump. An exception of it goes to the loop's exception handler; reading goes on.
    `routed`: each begins with a routing id, which `frames_max` does not count. With `users`, which needs that, `user`
    is what the handshake's handler called the sender of the message being delivered; '' for none.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        deliver: Callable[[list[bytes]], None],
        *,
        frames_max: int = 64,
        routed: bool = False,
        users: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.socket = socket
        self._deliver = deliver
        self._frames_max = frames_max + routed
        self._routed = routed
        self._users = users
        self.user = ""
        self._fd = int(socket.get(zmq.FD))
        self._draining = False
        self._again: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._drain)
        self._look_again()  # for what came before we listened

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue one message. False when there is no room, or (ROUTER) no such peer; nothing was sent then."""
        socket = self.socket
        last = len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                socket.send(frame, zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            # Sending also takes in what the descriptor told of, so it will not tell again.
            if not self._draining and int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                self._look_again()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. What is still queued is given `linger_ms` to leave, in the background."""
        if self.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
        self.socket.close(linger=linger_ms)

    def _look_again(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._again = None
        if self.socket.closed:
            return  # by another callback of the same round of the loop, after this one was due
        self._draining = True
        empty = False
        try:
            for _ in range(BURST_MESSAGES):
                frames = self._receive()
                if frames is None:
                    empty = True
                    return
                self._deliver(frames)
                if self.socket.closed:
                    return
        finally:
            self._draining = False
            if not empty and not self.socket.closed:
                self._look_again()

    def _receive(self) -> list[bytes] | None:
        """The first frame is received as bytes, since that costs least where there is none; the others as Frames, which
        know whether there are more, and who sent them."""
        socket: Any = self.socket
        try:
            frames = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        more = self._routed or socket.get(zmq.RCVMORE)  # a routing id never comes alone
        frame = None
        while more:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= self._frames_max:
                frames.append(frame.bytes)
            more = frame.more
        if self._users:
            self.user = _user_of(frame)
        return frames


def _user_of(frame: Any) -> str:
    try:
        return frame.get(USER)  # type: ignore[no-any-return]
    except zmq.ZMQError:  # it has none
        return ""
