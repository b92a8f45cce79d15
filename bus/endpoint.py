"""The shell that owns the bus sockets of one process: one ROUTER that is bound, one DEALER for each link opened.

Messages come in through one callback, with the link that they came on, and go out on a link. It knows what a
message is, not what it means: who is alive, current or welcome is Membership's to say.

A link is named by an opaque string. Every connection that an endpoint opens gives the ROUTER at the other end an
identity of its own: `pd`, the opener's incarnation (16 bytes), a 4 byte counter. So a new connection is always
seen as new, the incarnation may begin with a zero byte (which ZeroMQ reserves at the start of an identity), and
a connection that ZeroMQ re-makes by itself keeps its name: ROUTER_HANDOVER gives it what the old one had.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from .answers import error_of, exception_of
from .errors import Broken, Closed, ConfigError, DeadlineExceeded, PdError
from .frames import Unreadable, pack, unpack
from .messages import Error, Message
from .ports import parse_address
from .pump import Pump
from .wire import FRAME_BYTES_MAX, FRAMES_MAX, Header

QUEUE_MESSAGES = 4096  # high-water mark of each connection; a peer that is so far behind has stopped reading
INBOUND_LINKS_MAX = 16_384  # ROUTER never says that a peer has left: the longest unused are forgotten
SOCKETS_MAX = 8192  # of one context; each link takes two, one of them its monitor
RECONNECT_MS, RECONNECT_MS_MAX = 50, 5000  # ZeroMQ's own back-off; it jitters
HANDSHAKE_MS = 5000  # a connection that says nothing of ZMTP in this time is closed
BACKLOG = 1024
LOCAL = ("ipc://", "inproc://")  # for tests: anything else must be a TCP address

M = TypeVar("M", bound=Message)
Tap = Callable[[str, Header, Message], None]  # link, header, message


class Received(NamedTuple):
    """One message and the link that it came on, where its answer goes."""

    link: str
    header: Header
    message: Message
    raw: tuple[bytes, ...]


@dataclass(slots=True)
class Counters:
    """What one endpoint has seen since it was made, in messages."""

    received: int = 0
    sent: int = 0
    unsent: int = 0  # the peer has vanished, or its queue is full
    errors_answered: int = 0
    other_major: int = 0
    unknown_kind: int = 0
    bad_header: int = 0
    bad_body: int = 0
    too_many_frames: int = 0
    oversize: int = 0
    disconnects: int = 0  # of links that we opened

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class _Link:
    """One connection: where to send, and how many messages went there."""

    __slots__ = ("identity", "key", "monitor", "pump", "seq")

    def __init__(self, key: str, pump: Pump, identity: bytes | None, monitor: Pump | None = None) -> None:
        self.key = key
        self.pump = pump
        self.identity = identity  # what ROUTER wants in front; None on a DEALER
        self.monitor = monitor
        self.seq = 0


class Endpoint:
    """Bus sockets of one process. All calls from the thread of the running loop.

    `on_message(received)` is called for every message that could be read. A PdError that it raises is answered
    with an `error`; any other exception is a bug: it ends `serve()`. `on_link_lost(link)` tells that a connection
    which we opened has been cut; ZeroMQ re-makes it by itself, maybe to another life of the peer. `tap` sees every
    message that was sent or has come; the header tells which.
    """

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        on_message: Callable[[Received], None],
        *,
        on_link_lost: Callable[[str], None] | None = None,
        tap: Tap | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.counters = Counters()
        self._on_message = on_message
        self._on_link_lost = on_link_lost
        self._tap = tap
        self._context = context or _context()
        self._owns_context = context is None
        self._router: Pump | None = None
        self._links: dict[str, _Link] = {}  # those that we opened
        self._inbound: dict[bytes, _Link] = {}  # by identity, longest unused first
        self._inbound_by_key: dict[str, _Link] = {}
        self._opened = 0
        self._waiting: dict[tuple[str, int], tuple[tuple[type[Message], ...], asyncio.Future[Received]]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False

    # ------------------------------------------------------------ connections

    def bind(self, address: str, *, setting: str = "--listen") -> str:
        """Listen on `address` (port 0: any free one) and return the real one. Raises ConfigError naming `setting`."""
        if self._router is not None:
            raise ConfigError(setting, "this endpoint is bound already")
        socket = self._socket(zmq.ROUTER, address, setting)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.BACKLOG, BACKLOG)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot listen on {address}: {e.strerror}") from None
        self._router = Pump(socket, self._on_router, frames_max=FRAMES_MAX + 1)
        return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def connect(self, address: str, *, setting: str = "address") -> str:
        """Open a link to the peer bound at `address` and return its name. Raises ConfigError for what is no address.

        Returns at once: what is sent before the peer answers is queued.
        """
        self._opened += 1
        key = f"out:{self._opened}"
        socket = self._socket(zmq.DEALER, address, setting)
        socket.set(zmq.IDENTITY, b"pd" + self.incarnation + self._opened.to_bytes(4, "big"))
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        try:
            watch = socket.get_monitor_socket(zmq.Event.DISCONNECTED)
            socket.connect(address)
        except zmq.ZMQError as e:
            socket.disable_monitor()
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot connect to {address}: {e.strerror}") from None
        pump = Pump(socket, lambda frames: self._on_frames(link, frames), frames_max=FRAMES_MAX)
        link = _Link(key, pump, None, Pump(watch, lambda frames: self._on_monitor(key, frames)))
        self._links[key] = link
        return key

    def close_link(self, link: str, *, linger_ms: int = 0) -> None:
        """End a link that we opened; what is queued gets `linger_ms` to leave. An inbound one is only forgotten."""
        opened = self._links.pop(link, None)
        if opened is not None:
            _close(opened, linger_ms)
        forgotten = self._inbound_by_key.pop(link, None)
        if forgotten is not None and forgotten.identity is not None:
            del self._inbound[forgotten.identity]
        for key in [k for k in self._waiting if k[0] == link]:
            self._waiting[key][1].set_exception(Closed("the link was closed while waiting for an answer"))
            del self._waiting[key]

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything. With `linger_ms`, waits that long at most for what is queued (a goodbye) to leave."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links):
            self.close_link(link, linger_ms=linger_ms)
        if self._router is not None:
            self._router.close(linger_ms)
        for _, future in self._waiting.values():
            future.set_exception(Closed("the endpoint was closed while waiting for an answer"))
        self._waiting.clear()
        if self._owns_context:
            self._context.term()
        if not self._ended.done():
            self._ended.set_result(None)

    async def serve(self) -> None:
        """Wait until closed. Raises what a callback raised by mistake, so that the node ends loudly."""
        await asyncio.shield(self._ended)

    # ------------------------------------------------------------ out

    def send(
        self,
        link: str,
        message: Message,
        raw: Sequence[bytes] = (),
        *,
        cause: int = 0,
        to: str = "",
        to_inc: bytes = b"",
    ) -> int:
        """Send on `link` and return the message's seq; 0 when it could not be sent (counted in `unsent`).

        `cause` is the seq of the message that it answers. Raises LocalProtocolError for what no peer would accept.
        """
        found = self._links.get(link) or self._inbound_by_key.get(link)
        if found is None or self._closed:
            self.counters.unsent += 1
            return 0
        seq = found.seq + 1
        header = Header(from_=self.name, from_inc=self.incarnation, to=to, to_inc=to_inc, seq=seq, cause=cause)
        frames = pack(header, message, raw)
        if found.identity is not None:
            frames.insert(0, found.identity)
        if not found.pump.send(frames):
            self.counters.unsent += 1
            return 0
        found.seq = seq
        self.counters.sent += 1
        if self._tap is not None:
            self._tap(link, header, message)
        return seq

    async def request(
        self,
        link: str,
        message: Message,
        reply_type: type[M],
        timeout_s: float,
        raw: Sequence[bytes] = (),
        *,
        to: str = "",
        to_inc: bytes = b"",
    ) -> M:
        """Send `message` and wait for the answer of `reply_type` that names it as its cause.

        Raises what an `error` answer stands for (RequestError, RemoteProtocolError, Overloaded ...),
        DeadlineExceeded after `timeout_s`, Broken when it cannot be sent, Closed when the link is closed.
        """
        received = await self.ask(link, message, (reply_type,), timeout_s, raw, to=to, to_inc=to_inc)
        assert isinstance(received.message, reply_type)
        return received.message

    async def ask(
        self,
        link: str,
        message: Message,
        reply_types: tuple[type[Message], ...],
        timeout_s: float,
        raw: Sequence[bytes] = (),
        *,
        to: str = "",
        to_inc: bytes = b"",
    ) -> Received:
        """Like `request`, where more than one kind is an answer (welcome or refused), or its header matters."""
        seq = self.send(link, message, raw, to=to, to_inc=to_inc)
        if not seq:
            raise Broken(f"{message.KIND} could not be sent: the peer has gone or does not read")
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._waiting[link, seq] = (reply_types, future)
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of 3.11 may swallow that the caller was cancelled
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {message.KIND} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop((link, seq), None)

    # ------------------------------------------------------------ in

    def _on_router(self, frames: list[bytes]) -> None:
        identity = frames[0]
        link = self._inbound.pop(identity, None)
        if link is None:
            assert self._router is not None
            link = _Link(f"in:{identity.hex()}", self._router, identity)
            self._inbound_by_key[link.key] = link
            if len(self._inbound) >= INBOUND_LINKS_MAX:
                oldest = self._inbound.pop(next(iter(self._inbound)))
                del self._inbound_by_key[oldest.key]
        self._inbound[identity] = link
        self._on_frames(link, frames[1:] or [b""])

    def _on_frames(self, link: _Link, frames: list[bytes]) -> None:
        self.counters.received += 1
        try:
            header, message, raw = unpack(frames)
        except Unreadable as e:
            setattr(self.counters, e.why, getattr(self.counters, e.why) + 1)
            if not e.is_error:
                self._answer(link.key, e, "", e.header)
            return
        if self._tap is not None:
            self._tap(link.key, header, message)
        received = Received(link.key, header, message, raw)
        if header.cause and self._waiting and self._resolve(received):
            return
        try:
            self._on_message(received)
        except PdError as e:
            if not isinstance(message, Error):
                self._answer(link.key, e, message.KIND, header)
        except Exception as e:
            self._fail(e)

    def _resolve(self, received: Received) -> bool:
        """Hand an awaited answer to who waits for it."""
        reply_types, future = self._waiting.get((received.link, received.header.cause), ((), None))
        message = received.message
        if future is None or not isinstance(message, (*reply_types, Error)):
            return False
        if not future.done():
            if isinstance(message, Error):
                future.set_exception(exception_of(message))
            else:
                future.set_result(received)
        return True

    def _answer(self, link: str, problem: PdError, kind: str, asked: Header | None) -> None:
        error = error_of(problem, kind=kind)
        if asked is None:
            sent = self.send(link, error)
        else:
            sent = self.send(link, error, cause=asked.seq, to=asked.from_, to_inc=asked.from_inc)
        self.counters.errors_answered += bool(sent)

    def _on_monitor(self, link: str, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] != zmq.Event.DISCONNECTED or link not in self._links:
            return
        self.counters.disconnects += 1
        if self._on_link_lost is not None:
            try:
                self._on_link_lost(link)
            except Exception as e:
                self._fail(e)

    def _fail(self, problem: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(problem)

    # ------------------------------------------------------------ sockets

    def _socket(self, kind: int, address: str, setting: str) -> zmq.Socket[bytes]:
        if self._closed:
            raise Closed("the endpoint is closed")
        if not address.startswith(LOCAL):
            parse_address(address, setting, port_zero=kind == zmq.ROUTER)
        socket = self._context.socket(kind)
        configure(socket, address)
        return socket


def configure(socket: zmq.Socket[bytes], address: str) -> None:
    """What every socket of the bus needs, whatever its type."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.set(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.IPV6, int(_needs_ipv6(address)))


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
    return context


def _needs_ipv6(address: str) -> bool:
    """IPv6 takes IPv4 names in too, but would turn 127.0.0.1 into ::ffff:127.0.0.1 and localhost into ::1 alone."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host == "localhost":
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return True


def _close(link: _Link, linger_ms: int) -> None:
    link.pump.socket.disable_monitor()
    if link.monitor is not None:
        link.monitor.close()
    link.pump.close(linger_ms)
