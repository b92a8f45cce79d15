"""A fake beside the real node: answers the bus as a script says, over real sockets, with no engine behind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.messages import (
    Cancel,
    Cancelled,
    Connect,
    ConnectReply,
    Credit,
    EventsSnapshot,
    FetchTokenizer,
    FetchTokenizerReply,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Outcome,
    StalePeer,
    Status,
    StatusReply,
    Token,
    Welcome,
)
from pdbus.bus.publisher import Publisher
from pdbus.bus.wire import pack_u32

REQUEST = bytes(16)


class FakeNode:
    """Welcomes everyone. `on_generate(node, received)` decides what is answered to a generate."""

    def __init__(self, on_generate: Callable[[FakeNode, Received], None] | None = None, name: str = "fake") -> None:
        self.name = name
        self.incarnation = os.urandom(16)
        self.endpoint = Endpoint(name, self.incarnation, self._on_message)
        self.publisher = Publisher(name, self.incarnation)
        self.address = ""
        self.events = ""
        self.status: dict[str, Any] = {"name": name}
        self.tokenizer: FetchTokenizerReply | None = FetchTokenizerReply(tokenizer="bytes", vocab_size=256)
        self.heard: list[Message] = []
        self.deaf = False  # takes everything, answers nothing: a frozen process
        self._on_generate = on_generate or answer_words(["hello", " world"])

    def bind(self, address: str = "tcp://127.0.0.1:0") -> str:
        self.address = self.endpoint.bind(address)
        self.events = self.publisher.bind("tcp://127.0.0.1:0")
        return self.address

    def close(self) -> None:
        self.endpoint.close()
        self.publisher.close()

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(m, kind) for m in self.heard)

    def tell(self, received: Received, message: Message) -> None:
        header = received.header
        self.endpoint.send(received.link, message, cause=header.seq, to=header.from_, to_inc=header.from_inc)

    def tokens(self, received: Received, index: int, words: list[str]) -> None:
        assert isinstance(received.message, Generate)
        for i, word in enumerate(words, index):
            token = Token(
                client_id=received.message.client_id, request=REQUEST, index=i, tokens=pack_u32([i]), text=word
            )
            self.tell(received, token)

    def finish(self, received: Received, reason: str = "stop", **fields: Any) -> None:
        assert isinstance(received.message, Generate | Cancel)
        self.tell(received, Finished(client_id=received.message.client_id, request=REQUEST, reason=reason, **fields))

    def leave(self, received: Received) -> None:
        self.tell(received, Goodbye(reason="shutdown"))

    def _on_message(self, received: Received) -> None:
        message = received.message
        self.heard.append(message)
        if self.deaf:
            return
        if received.header.to_inc not in (b"", self.incarnation):
            self.tell(received, StalePeer(current=self.incarnation))
            return
        match message:
            case Hello():
                hello = Hello(role="decode", address=self.address, events=self.events)
                self.tell(received, Welcome(hello=hello))
            case Heartbeat(reply=True):
                self.tell(received, Heartbeat())
            case Status():
                self.tell(received, StatusReply(status=self.status))
            case FetchTokenizer() if self.tokenizer is not None:
                self.tell(received, self.tokenizer)
            case Connect():
                self.tell(received, ConnectReply(outcomes=tuple(Outcome(target=a, ok=True) for a in message.addresses)))
            case Generate():
                self._on_generate(self, received)
            case Cancel():
                self.finish(received, "cancelled")
                self.tell(received, Cancelled(client_id=message.client_id))
            case EventsSnapshot():
                self.tell(received, self.publisher.snapshot(message))
            case Credit():
                pass


def answer_words(words: list[str]) -> Callable[[FakeNode, Received], None]:
    """Say all the words at once, then finish."""

    def answer(node: FakeNode, received: Received) -> None:
        node.tokens(received, 0, words)
        node.finish(received, completion_tokens=len(words))

    return answer


def silent(node: FakeNode, received: Received) -> None:
    """Take a generate and never answer it."""
