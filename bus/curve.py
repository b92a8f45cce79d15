"""CURVE on ZeroMQ's sockets, and the handler that ZeroMQ asks (ZAP, its RFC 27) before it lets a key in.

ZeroMQ asks once, in the handshake; the answer names the key, which then comes with every message (`User-Id`), so that
the receiver can look again. Without a handler ZeroMQ would let every key in: `serve` needs one in the same context.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from .key_folder import ALLOWED
from .keyring import Keyring
from .pump import Pump
from .wire import FRAME_BYTES_MAX

ZAP_ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"pdbus"
OVERHEAD_BYTES = 64  # what encryption adds to a frame is 33
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
ASKED_FRAMES = 9  # routing id, empty, version, request id, domain, address, identity, mechanism, key


def serve(socket: zmq.Socket[bytes], keyring: Keyring) -> None:
    """Before `bind`: let in only whom the handler lets in."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keyring.own.secret)
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + OVERHEAD_BYTES)


def call(socket: zmq.Socket[bytes], keyring: Keyring, public: str) -> None:
    """Before `connect`: speak only with who has the secret of `public`."""
    socket.set(zmq.CURVE_SERVERKEY, bytes.fromhex(public))
    socket.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(keyring.own.public))
    socket.set(zmq.CURVE_SECRETKEY, keyring.own.secret)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + OVERHEAD_BYTES)


class Doorkeeper:
    """Answers ZeroMQ's question for all sockets of one context. On an event loop, before the first of them binds.
    `lets_in` is asked for each public key, in hexadecimal."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], lets_in: Callable[[str], bool]) -> None:
        self._lets_in = lets_in
        socket = context.socket(zmq.ROUTER)
        socket.bind(ZAP_ADDRESS)
        self._pump = Pump(socket, self._asked, frames_max=ASKED_FRAMES)

    def close(self) -> None:
        self._pump.close()

    def _asked(self, frames: list[bytes]) -> None:
        if len(frames) != ASKED_FRAMES:
            return
        who, _, version, request, domain, _, _, mechanism, key = frames
        public = key.hex()
        allowed = mechanism == b"CURVE" and domain == DOMAIN and self._lets_in(public)
        status, text, user = (b"200", b"OK", public.encode()) if allowed else (b"400", b"not allowed", b"")
        self._pump.send([who, b"", version, request, status, text, user, b""])


def handshake_problem(event: int, value: int, address: str, keyring: Keyring | None) -> str:
    """What a failed handshake of ours means; '' where it may have been a cut connection."""
    if keyring is None:
        mismatch = (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
        return f"{address} asks for a key: give a folder of keys (--keys)" if (event, value) == mismatch else ""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return f"{address} does not allow the key of {keyring.own.name}: its public one is {keyring.own.public}"
    return (
        f"the handshake with {address} failed: it has no key, or not the one that {keyring.folder.path / ALLOWED} says"
    )
