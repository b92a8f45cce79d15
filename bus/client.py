"""The client SDK: ask a node for text, its status, its events. Needs neither torch nor NIXL nor HTTP.

async with Client("tcp://127.0.0.1:7400") as client:
    async for token in client.generate("Once upon a time", max_tokens=32):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import zmq

from .answers import exception_of
from .curve import call
from .endpoint import FORBIDDEN, Received
from .errors import Broken, Closed, ConfigError, DeadlineExceeded, RequestError
from .generation import CREDIT_TOKENS, DEADLINE_MS, Generation, Prompt, generate_message, listed, sampling_of
from .keyring import Keyring, client_keyring
from .messages import (
    Cancel,
    Cancelled,
    Connect,
    ConnectReply,
    Disconnect,
    DisconnectReply,
    Drain,
    Error,
    FetchTokenizer,
    FetchTokenizerReply,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Ledger,
    LedgerReply,
    Message,
    Outcome,
    Refused,
    Sampling,
    StalePeer,
    Status,
    StatusReply,
    Token,
    Welcome,
)
from .ports import parse_address
from .station import Station
from .subscription import Subscription

__all__ = ["Client", "Generation", "Node", "Subscription"]

M = TypeVar("M", bound=Message)

HEARTBEAT_S = 1.0  # how often a silent node is asked whether it is there, while a generation is live
SILENCE_S = 5.0  # after which it counts as gone, like a dead peer among nodes
LAST_WORDS_MS = 100  # for a cancel to leave when the client is closed


class Node(NamedTuple):
    """The node that answered, in the life that answered."""

    link: str
    name: str
    incarnation: bytes
    hello: Hello


class Client:
    """One connection to one node; any number of generations share it. Use it on one event loop, within `async with`.

    Raises ConfigError for what is no address, DeadlineExceeded or Broken naming the address when nobody answers there,
    and what the node's `error` answers stand for: RequestError, Overloaded and so on. A node that was restarted is
    greeted anew by the next call.
    With `keys`, a folder made by `pd keys` or one NAME.key in it, it speaks only with who has the key that is said to
    listen at `address`, and encrypted.
    With `record`, a folder, all that it sends and gets is recorded there for `pd-replay`; prompts and answers only with
    `record_tokens`. Clients of several nodes may share a `station`, which has the keys, records, and is closed by who
    made it.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        credit: int = CREDIT_TOKENS,
        keys: str | os.PathLike[str] | Keyring | None = None,
        record: str | os.PathLike[str] | None = None,
        record_tokens: bool = False,
        station: Station | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called whenever `reachable` may have changed."""
        self.address = _address(address)
        self.timeout_s = _seconds(timeout_s)
        self._credit = credit
        self._keyring = client_keyring(keys) if keys else None
        self._record, self._record_tokens = record, record_tokens
        self._shared, self._station = station, station
        self._on_change = on_change
        self._node: Node | None = None
        self._cut: int | None = None  # the connection was, and what was sent under this seq has no answer yet
        self._greeting = asyncio.Lock()
        self._live: dict[str, Generation] = {}
        self._subscriptions: list[Subscription] = []
        self._heard_s = 0.0
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        if self._shared is None:
            self._station = Station(
                address=self.address, keyring=self._keyring, record=self._record, record_tokens=self._record_tokens
            )
        try:
            await self.node()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every generation (the node is told), every subscription, and the connection."""
        if self._station is None or self._station.closed:
            return
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
        for generation in list(self._live.values()):
            self._send_cancel(generation)
        self._drop_node(Closed("the client was closed"), linger_ms=LAST_WORDS_MS)
        if self._shared is None:
            self._station.close(linger_ms=LAST_WORDS_MS)

    @property
    def reachable(self) -> bool:
        """Whether the node has been greeted, and its connection not cut since it was last heard."""
        return self._node is not None and self._cut is None

    async def node(self) -> Node:
        """The node at the other end, greeted if it has not been."""
        async with self._greeting:
            if self._node is None:
                self._node = await self._greet()
                self._changed()
            return self._node

    # ------------------------------------------------------------ generate

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling | None = None,
        deadline_ms: int = DEADLINE_MS,
        traceparent: str = "",
        **options: Any,
    ) -> Generation:
        """Start a generation: text, chat messages or token ids. `options` are fields of Sampling, instead of it.
        `traceparent`: W3C's, of the span that it is a part of.

        It starts at once. Iterate over it for its messages.Token; see Generation. Raises RequestError for what no
        node would take.
        """
        name = self._station.take_id() if self._station is not None else ""
        message = generate_message(
            name, prompt, model, sampling_of(sampling, options), deadline_ms, self._credit, traceparent
        )
        generation = Generation(self, message)
        self._live[message.client_id] = generation
        if self._node is not None:
            self.submit(generation, self._node)
        return generation

    def submit(self, generation: Generation, node: Node) -> None:
        """For Generation: send what it asks."""
        generation.submitted = self._send(node, generation.message)
        if not generation.submitted:
            generation.fail(Broken(f"{self.address} does not take messages any more"))
        elif self._watch is None:
            self._heard_s = time.monotonic()
            self._watch = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._look, time.monotonic() + HEARTBEAT_S)

    def tell(self, message: Message) -> None:
        """For Generation: credit and cancel, to the node that runs it."""
        if self._node is not None:
            self._send(self._node, message)

    def forget(self, generation: Generation) -> None:
        """For Generation: it has ended."""
        self._live.pop(generation.client_id, None)

    # ------------------------------------------------------------ tools

    async def status(self) -> dict[str, Any]:
        """What the node says of itself, its peers, requests and blocks (docs/operating.md)."""
        return (await self._ask(Status(), StatusReply)).status

    async def ledger(self) -> LedgerReply:
        """Every block and lease accounted for."""
        return await self._ask(Ledger(), LedgerReply)

    async def tokenizer(self, part: int = 0) -> FetchTokenizerReply:
        """One part of what turns text into the node's tokens."""
        return await self._ask(FetchTokenizer(part=part), FetchTokenizerReply)

    async def connect(self, addresses: Sequence[str]) -> tuple[Outcome, ...]:
        """Ask the node to join these bus addresses: one outcome each. Waits as long as its handshakes may take."""
        return (
            await self._ask(Connect(addresses=listed(addresses, "addresses")), ConnectReply, 2 * self.timeout_s)
        ).outcomes

    async def disconnect(self, targets: Sequence[str], *, timeout_s: float = 130.0) -> tuple[Outcome, ...]:
        """Ask the node to remove these members (name or address), each after its last lease: one outcome each."""
        return (await self._ask(Disconnect(targets=listed(targets, "targets")), DisconnectReply, timeout_s)).outcomes

    async def drain(self) -> None:
        """Ask the node to drain: to take nothing new, let what runs end, and stop."""
        node = await self.node()
        if self._open().endpoint.keyring is not None:
            await self._unless_forbidden(node, Drain())
        elif not self._send(node, Drain()):
            raise Broken(f"{self.address} does not take messages any more")

    async def _unless_forbidden(self, node: Node, message: Message) -> None:
        """Send what only a refusal answers: what is asked after it is answered after that. Raises RequestError."""
        asking = self._open().endpoint.ask(
            node.link, message, (), self.timeout_s, to=node.name, to_inc=node.incarnation
        )
        refused = asyncio.ensure_future(asking)
        await asyncio.sleep(0)  # so that it is sent first
        with suppress(Broken, Closed):  # it may end before it answers
            await self.ledger()
        refused.cancel()
        for outcome in await asyncio.gather(refused, return_exceptions=True):
            if isinstance(outcome, RequestError):
                raise outcome

    def subscribe(self, topics: Sequence[str] = ("",)) -> Subscription:
        """Follow events whose topic begins with one of `topics` (`<group>@<node>`, '' for all).

        `async with client.subscribe(["request@decode-1"]) as events: async for published in events: ...`
        Within `async with` it is in force: nothing that happens from then on is missed. Entering raises RequestError
        for a topic that the node does not have, DeadlineExceeded when its port for events does not answer.
        """
        subscription = Subscription(self, topics)
        self._subscriptions = [*(s for s in self._subscriptions if not s.closed), subscription]
        return subscription

    async def ask_any(self, message: Message, reply_type: type[M]) -> tuple[bytes, M]:
        """For Subscription: an answer, and the incarnation that gave it."""
        node = await self.node()
        received = await self._open().endpoint.ask(
            node.link, message, (reply_type,), self.timeout_s, to=node.name, to_inc=node.incarnation
        )
        assert isinstance(received.message, reply_type)
        return received.header.from_inc, received.message

    async def _ask(self, message: Message, reply_type: type[M], timeout_s: float | None = None) -> M:
        node = await self.node()
        try:
            received = await self._open().endpoint.ask(
                node.link, message, (reply_type,), timeout_s or self.timeout_s, to=node.name, to_inc=node.incarnation
            )
        except DeadlineExceeded as e:
            self._forget_silent(node)
            raise DeadlineExceeded(f"{self.address}: {e}") from None
        if node is self._node:
            self._heard(received.header.cause)
        assert isinstance(received.message, reply_type)
        return received.message

    # ------------------------------------------------------------ the connection

    def _open(self) -> Station:
        if self._station is None or self._station.closed:
            raise Closed("the client is not open: use it within `async with`")
        return self._station

    def securing(self, node: Node) -> Callable[[zmq.Socket[bytes]], None] | None:
        """For Subscription: what makes a socket speak with that node alone; None without keys."""
        endpoint = self._open().endpoint
        if endpoint.keyring is None:
            return None
        return partial(call, keyring=endpoint.keyring, public=endpoint.public_of(node.link))

    async def _greet(self) -> Node:
        """With each key that its address may have, while one is being replaced."""
        for _ in range(self._open().key_choices(self.address) - 1):
            try:
                return await self._greet_once()
            except RequestError as e:
                if e.code != FORBIDDEN:
                    raise
        return await self._greet_once()

    async def _greet_once(self) -> Node:
        station = self._open()
        link = station.connect(self.address, self)
        try:
            received = await station.endpoint.ask(link, Hello(role="tool"), (Welcome, Refused), self.timeout_s)
        except DeadlineExceeded:
            station.close_link(link)
            problem = f"no node answered at {self.address} within {self.timeout_s:g} s: is one listening there?"
            raise DeadlineExceeded(problem) from None
        except BaseException:
            station.close_link(link)
            raise
        if isinstance(received.message, Welcome):
            return Node(link, received.header.from_, received.header.from_inc, received.message.hello)
        assert isinstance(received.message, Refused)
        station.close_link(link)
        raise RequestError(f"{self.address} refused this client: {received.message.reason}", code="refused")

    def _send(self, node: Node, message: Message) -> int:
        return self._open().endpoint.send(node.link, message, to=node.name, to_inc=node.incarnation)

    def _send_cancel(self, generation: Generation) -> None:
        if generation.submitted:
            self.tell(Cancel(client_id=generation.client_id))

    def _drop_node(self, problem: Exception, linger_ms: int = 0) -> None:
        """This life of the node is lost to us: end what ran there, and greet anew at the next call."""
        node, self._node, self._cut = self._node, None, None
        for generation in list(self._live.values()):
            generation.fail(problem)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if node is not None and self._station is not None:
            self._station.close_link(node.link, linger_ms=linger_ms)
        self._changed()

    def _forget_silent(self, node: Node) -> None:
        if node is self._node and not self._live:
            self._drop_node(Broken(f"{self.address} was silent"))

    # ------------------------------------------------------------ what comes

    def hear(self, received: Received) -> None:
        """For Station: what came on our link."""
        node = self._node
        if node is None or received.link != node.link or received.header.from_inc != node.incarnation:
            if isinstance(received.message, StalePeer) and node is not None and received.link == node.link:
                self._drop_node(Broken(f"{node.name} at {self.address} was restarted"))
            return
        self._heard(received.header.cause)
        match received.message:
            case Token(client_id=client_id) | Finished(client_id=client_id) | Cancelled(client_id=client_id):
                self._on_answer(client_id, received.message)
            case Error() as error:
                if not self._on_error(error, received.header.cause) and error.code == FORBIDDEN:
                    self._drop_node(exception_of(error))  # not even a heartbeat is taken from us any more
            case Goodbye(reason=reason):
                self._drop_node(Broken(f"{node.name} at {self.address} has left: {reason or 'no reason given'}"))
            case StalePeer():
                self._drop_node(Broken(f"{node.name} at {self.address} no longer knows this client"))

    def _on_answer(self, client_id: str, message: Message) -> None:
        generation = self._live.get(client_id)
        if generation is not None:
            generation.hear(message)
        elif isinstance(message, Token):
            self.tell(Cancel(client_id=client_id))  # nobody reads it any more

    def _on_error(self, error: Error, cause: int) -> bool:
        """Whether it is a generation's."""
        generation = self._live.get(error.client_id)
        for candidate in self._live.values() if generation is None and cause else ():
            if candidate.submitted == cause:
                generation = candidate
        if generation is not None:
            generation.hear(error)
        return generation is not None

    # ------------------------------------------------------------ is it still there?

    def link_lost(self) -> None:
        """For Station: the connection was cut."""
        node = self._node
        if node is None:
            return
        if self._live:
            self._cut = self._send(node, Heartbeat(reply=True))  # whoever comes back will tell who it is
            self._changed()
        else:
            self._drop_node(Broken(f"the connection to {self.address} was cut"))

    def _heard(self, cause: int) -> None:
        """The node has said something, in answer to that. What it said before the connection was cut is still read."""
        self._heard_s = time.monotonic()
        if self._cut is not None and cause >= self._cut:
            self._cut = None
            self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _look(self, due_s: float) -> None:
        """While generations are live: ask a silent node, give up one that stays silent."""
        self._watch = None
        if not self._live or self._node is None:
            return
        now_s = time.monotonic()
        if now_s - due_s > HEARTBEAT_S:
            self._heard_s = now_s  # it was us who paused
        silent_s = now_s - self._heard_s
        if silent_s > SILENCE_S:
            self._drop_node(Broken(f"{self._node.name} at {self.address} has been silent for {silent_s:.1f} s"))
            return
        if silent_s > HEARTBEAT_S / 2:
            self._send(self._node, Heartbeat(reply=True))
        self._watch = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._look, now_s + HEARTBEAT_S)


def _address(address: Any) -> str:
    if isinstance(address, str) and address.startswith("ipc://"):
        return address
    if not isinstance(address, str):
        raise ConfigError("address", f"must be text like tcp://host:port, got {address!r:.80}")
    return str(parse_address(address, "address"))


def _seconds(timeout_s: Any) -> float:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ConfigError("timeout_s", f"must be a number of seconds above 0, got {timeout_s!r:.80}")
    return timeout_s
