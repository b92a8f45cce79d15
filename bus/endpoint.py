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
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from .answers import error_of, exception_of
from .counters import Counters
from .curve import HANDSHAKE_FAILED, Doorkeeper, call, handshake_problem, serve
from .door import EVENTS as DOOR_EVENTS
from .door import Door, check_descriptors
from .errors import Broken, Closed, ConfigError, DeadlineExceeded, LocalProtocolError, PdError, RequestError
from .frames import Unreadable, pack, unpack
from .keyring import Grants, Keyring
from .messages import Error, Message
from .ports import parse_address
from .pump import Pump
from .sockets import configure, new_context
from .wire import FRAMES_MAX, Header

INBOUND_LINKS_MAX = 16_384  # ROUTER never says that a peer has left: the longest unused are forgotten
RECONNECT_MS, RECONNECT_MS_MAX = 50, 1000  # ZeroMQ's own back-off, within one handshake; it jitters
BACKLOG = 1024
SAID_S = 0.01  # for the word of a failed handshake, which is already there, to be read
SECRET_BYTES = 16  # of a connection's identity, with keys: who knew it could take over its answers
FORBIDDEN = "forbidden"  # code of what a key may not do
LOCAL = ("ipc://", "inproc://")  # for tests: anything else must be a TCP address

M = TypeVar("M", bound=Message)
Tap = Callable[[str, Header, Message], None]  # link, header, message


class Received(NamedTuple):
    """One message and the link that it came on, where its answer goes."""

    link: str
    header: Header
    message: Message
    raw: tuple[bytes, ...]


class _Link:
    """One connection: where to send, and how many messages went there."""

    __slots__ = ("address", "grants", "identity", "key", "monitor", "problem", "public", "pump", "seq")

    def __init__(
        self,
        key: str,
        pump: Pump,
        identity: bytes | None,
        monitor: Pump | None = None,
        *,
        address: str = "",
        public: str = "",
    ) -> None:
        self.key = key
        self.address = address  # of one that we opened
        self.public = public  # the peer's key; '' without keys
        self.grants = Grants()
        self.pump = pump
        self.identity = identity  # what ROUTER wants in front; None on a DEALER
        self.monitor = monitor
        self.problem = ""  # why its handshake failed, if it did
        self.seq = 0


class Endpoint:
    """Bus sockets of one process. All calls from the thread of the running loop.

    `on_message(received)` is called for every message that could be read. A PdError that it raises is answered
    with an `error`; any other exception is a bug: it ends `serve()`. `on_link_lost(link)` tells that a connection
    which we opened has been cut; ZeroMQ re-makes it by itself, maybe to another life of the peer. `tap` sees every
    message that was sent or has come; the header tells which.

    With a `keyring` every connection is encrypted and every message held against its sender's key: what that may not
    say is answered with an `error` and not heard. `on_link_refused(link, problem)` tells of a handshake that failed;
    ZeroMQ gives such a link up, or tries for ever. Without it that is a lost link.
    `on_door(problem)` tells that nobody else is let in for want of descriptors, '' that they are again.
    """

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        on_message: Callable[[Received], None],
        *,
        on_link_lost: Callable[[str], None] | None = None,
        on_link_refused: Callable[[str, str], None] | None = None,
        on_door: Callable[[str], None] | None = None,
        keyring: Keyring | None = None,
        tap: Tap | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.counters = Counters()
        self._on_message = on_message
        self._on_link_lost = on_link_lost
        self._on_link_refused = on_link_refused
        self._on_door = on_door or (lambda problem: None)
        self._door: Door | None = None
        self._tap = tap
        self.context = context or new_context()
        self._owns_context = context is None
        self.keyring = keyring
        self._doorkeeper: Doorkeeper | None = None
        self._key_turns: dict[str, int] = {}  # by address: how many of its keys have failed
        self._router: Pump | None = None
        self._watch: Pump | None = None  # the router's monitor
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
        if self.keyring is not None:
            self._doorkeeper = self._doorkeeper or Doorkeeper(self.context, self._lets_in)
            serve(socket, self.keyring)
        watch = socket.get_monitor_socket(DOOR_EVENTS | (HANDSHAKE_FAILED if self.keyring is not None else 0))
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.disable_monitor()
            watch.close(linger=0)
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot listen on {address}: {e.strerror}") from None
        if not address.startswith(LOCAL):
            self._door = Door(self._on_door)
        self._watch = Pump(watch, self._on_router_monitor)
        self._router = Pump(socket, self._on_router, frames_max=FRAMES_MAX, routed=True, users=self.keyring is not None)
        return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def connect(self, address: str, *, setting: str = "address") -> str:
        """Open a link to the peer bound at `address` and return its name. Raises ConfigError for what is no address,
        and when descriptors are scarce.

        Returns at once: what is sent before the peer answers is queued.
        """
        check_descriptors(address, setting)
        keys = self._keys_at(address, setting)
        public = keys[self._key_turns.get(address, 0) % len(keys)] if keys else ""
        self._opened += 1
        key = f"out:{self._opened}"
        socket = self._socket(zmq.DEALER, address, setting)
        secret = os.urandom(SECRET_BYTES) if self.keyring is not None else b""
        socket.set(zmq.IDENTITY, b"pd" + self.incarnation + self._opened.to_bytes(4, "big") + secret)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        if self.keyring is not None:
            call(socket, self.keyring, public)
        try:
            watch = socket.get_monitor_socket(zmq.Event.DISCONNECTED | HANDSHAKE_FAILED)
            socket.connect(address)
        except zmq.ZMQError as e:
            socket.disable_monitor()
            socket.close(linger=0)
            raise ConfigError(setting, f"cannot connect to {address}: {e.strerror}") from None
        pump = Pump(socket, lambda frames: self._on_frames(link, frames), frames_max=FRAMES_MAX)
        monitor = Pump(watch, lambda frames: self._on_monitor(key, frames))
        link = _Link(key, pump, None, monitor, address=address, public=public)
        self._links[key] = link
        return key

    def key_choices(self, address: str) -> int:
        """How many keys may answer at an address: more than one while its node's is being replaced. Each call after a
        failed handshake tries the next."""
        return max(1, len(self._keys_at(address, "address")))

    def _keys_at(self, address: str, setting: str) -> tuple[str, ...]:
        return self.keyring.keys_at(address, setting) if self.keyring is not None else ()

    @property
    def door_problem(self) -> str:
        """Why nobody else is let in; '' while all are."""
        return self._door.problem if self._door is not None else ""

    @property
    def public(self) -> str:
        """Our own key, in hexadecimal; '' without keys."""
        return self.keyring.own.public if self.keyring is not None else ""

    def public_of(self, link: str) -> str:
        """The key of who is at the other end, in hexadecimal; '' for nobody, and without keys."""
        found = self._links.get(link) or self._inbound_by_key.get(link)
        return found.public if found is not None else ""

    def links_of(self, publics: Collection[str]) -> list[str]:
        """All links to these keys."""
        links = (*self._links.values(), *self._inbound_by_key.values())
        return [link.key for link in links if link.public in publics]

    def close_link(self, link: str, *, linger_ms: int = 0) -> None:
        """End a link that we opened; what is queued gets `linger_ms` to leave. An inbound one is only forgotten."""
        opened = self._links.pop(link, None)
        if opened is not None:
            _close(opened, linger_ms)
        forgotten = self._inbound_by_key.pop(link, None)
        if forgotten is not None and forgotten.identity is not None:
            del self._inbound[forgotten.identity]
        self._give_up([key for key in self._waiting if key[0] == link], "the link")

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything. With `linger_ms`, waits that long at most for what is queued (a goodbye) to leave."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links):
            self.close_link(link, linger_ms=linger_ms)
        if self._router is not None:
            self._router.socket.disable_monitor()
            self._router.close(linger_ms)
        for part in (self._door, self._watch, self._doorkeeper):
            if part is not None:
                part.close()
        self._give_up(list(self._waiting), "the endpoint")
        if self._owns_context:
            self.context.term()
        if not self._ended.done():
            self._ended.set_result(None)

    def _give_up(self, waiting: Sequence[tuple[str, int]], what: str) -> None:
        for key in waiting:
            if not (future := self._waiting.pop(key)[1]).done():  # else who waits is just about to hear
                future.set_exception(Closed(f"{what} was closed while waiting for an answer"))

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

    def tell(self, link: str, message: Message, raw: Sequence[bytes] = (), **about: Any) -> int:
        """`send` of what may echo a peer: where that is too large for the bus, an `error` says so instead."""
        try:
            return self.send(link, message, raw, **about)
        except LocalProtocolError as e:
            return self.send(link, error_of(e), **about)

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
        opened = self._links.get(link)
        refused = opened is not None and opened.problem  # what is queued there now may be dropped without a word
        seq = 0 if refused else self.send(link, message, raw, to=to, to_inc=to_inc)
        if not seq:
            raise await self._unsent(link, message)
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._waiting[link, seq] = (reply_types, future)
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of 3.11 may swallow that the caller was cancelled
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {message.KIND} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop((link, seq), None)

    async def _unsent(self, link: str, message: Message) -> PdError:
        """Why. A handshake that fails before anything was sent leaves nobody to send to."""
        await asyncio.sleep(SAID_S)
        opened = self._links.get(link)
        if opened is not None and opened.problem:
            return RequestError(opened.problem, code=FORBIDDEN)
        return Broken(f"{message.KIND} could not be sent: the peer has gone or does not read")

    # ------------------------------------------------------------ in

    def _on_router(self, frames: list[bytes]) -> None:
        assert self._router is not None
        identity = frames[0]
        link = self._inbound.pop(identity, None)
        if link is None:
            link = _Link(f"in:{identity.hex()}", self._router, identity, public=self._router.user)
            self._inbound_by_key[link.key] = link
            if len(self._inbound) >= INBOUND_LINKS_MAX:
                oldest = self._inbound.pop(next(iter(self._inbound)))
                del self._inbound_by_key[oldest.key]
        self._inbound[identity] = link
        if link.public != self._router.user:
            self.counters.forbidden += 1
            return
        self._on_frames(link, frames[1:])

    def _on_frames(self, link: _Link, frames: list[bytes]) -> None:
        self.counters.received += 1
        link.problem = ""
        try:
            header, message, raw = unpack(frames)
        except Unreadable as e:
            setattr(self.counters, e.why, getattr(self.counters, e.why) + 1)
            if not e.is_error:
                self._answer(link.key, e, "", e.header)
            return
        if self.keyring is not None and (problem := self.keyring.refusal(link.public, header, message, link.grants)):
            self._forbid(link, problem, header, message)
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

    def _forbid(self, link: _Link, problem: str, header: Header, message: Message) -> None:
        assert self.keyring is not None
        self.counters.forbidden += 1
        self.keyring.say(link.public, problem)
        if not isinstance(message, Error):
            self._answer(link.key, RequestError(problem, code=FORBIDDEN), message.KIND, header)

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
        if link not in self._links:
            return
        said = parse_monitor_message(frames)
        event, value = said["event"], said["value"]
        if event == zmq.Event.DISCONNECTED or value == zmq.PROTOCOL_ERROR_ZMTP_INVALID_SEQUENCE:
            # the latter after the handshake: someone on the way replays, and ZeroMQ hears nothing more there
            self.counters.disconnects += 1
            self._lost(link)
        elif problem := handshake_problem(event, value, self._links[link].address, self.keyring):
            self._refused(link, problem, of_key=event != zmq.Event.HANDSHAKE_FAILED_AUTH)

    def _refused(self, link: str, problem: str, *, of_key: bool) -> None:
        """Whoever waits hears it at once. `of_key`: the key that we expected there; the next one's turn."""
        self._links[link].problem = problem
        if of_key:
            address = self._links[link].address
            self._key_turns[address] = self._key_turns.get(address, 0) + 1
        for (waiting_on, _), (_, future) in list(self._waiting.items()):
            if waiting_on == link and not future.done():
                future.set_exception(RequestError(problem, code=FORBIDDEN))
        if self._on_link_refused is None:
            self._lost(link)
            return
        try:
            self._on_link_refused(link, problem)
        except Exception as e:
            self._fail(e)

    def _lost(self, link: str) -> None:
        if self._on_link_lost is not None:
            try:
                self._on_link_lost(link)
            except Exception as e:
                self._fail(e)

    def _lets_in(self, public: str) -> bool:
        assert self.keyring is not None
        if self.keyring.is_allowed(public):
            return True
        self.counters.keys_refused += 1
        self.keyring.say(public, "it is not on the allow-list")
        return False

    def _on_router_monitor(self, frames: list[bytes]) -> None:
        said = parse_monitor_message(frames)
        if said["event"] & DOOR_EVENTS:
            if self._door is not None:
                self._door.heard(said["event"], said["value"])
        elif said["event"] != zmq.Event.HANDSHAKE_FAILED_AUTH:  # counted by key
            self.counters.handshakes_failed += 1

    def _fail(self, problem: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(problem)

    # ------------------------------------------------------------ sockets

    def _socket(self, kind: int, address: str, setting: str) -> zmq.Socket[bytes]:
        if self._closed:
            raise Closed("the endpoint is closed")
        if not address.startswith(LOCAL):
            parse_address(address, setting, port_zero=kind == zmq.ROUTER)
        socket = self.context.socket(kind)
        configure(socket, address)
        return socket


def _close(link: _Link, linger_ms: int) -> None:
    link.pump.socket.disable_monitor()
    if link.monitor is not None:
        link.monitor.close()
    link.pump.close(linger_ms)
