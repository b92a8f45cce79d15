"""What a client sent and got, recorded like what a node hears and decides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Generic, TypeVar

from .messages import FetchTokenizerReply, Generate, Message, StatusReply, Token
from .recorder import Recorder
from .wire import Declared, Header, replace

M_co = TypeVar("M_co", bound=Message, covariant=True)  # so that it is read back with its message typed


class ClientBegan(Declared, tag_field="t", tag=True):
    """At the head of a client's recording. `role`: client, gateway. `tokens`: prompts and answers are kept."""

    address: str
    version: str
    tokens: bool = False
    role: str = "client"


class Sent(Declared, Generic[M_co], tag_field="t", tag=True):
    link: str
    header: Header
    message: M_co


class Got(Declared, Generic[M_co], tag_field="t", tag=True):
    link: str
    header: Header
    message: M_co


class ClientRecorder:
    """One client's recording. Without `tokens` no prompt, text or token is in it, but how many tokens came."""

    def __init__(
        self, directory: Path, name: str, incarnation: bytes, began: ClientBegan, *, setting: str = "record"
    ) -> None:
        """Raises ConfigError naming `setting` when the file cannot be made."""
        self._file = Recorder(directory, name, incarnation, began, setting=setting)
        self._incarnation, self._tokens = incarnation, began.tokens

    def saw(self, link: str, header: Header, message: Message) -> None:
        """A message was sent or has come."""
        kind = Sent if header.from_inc == self._incarnation else Got
        if isinstance(message, StatusReply):  # long, often, and the node records more of itself
            message = StatusReply(status={})
        value = kind(link=link, header=header, message=message if self._tokens else without_tokens(message))
        self._file.append(f"{kind.__name__} {message.KIND}", value, time.monotonic_ns())

    def note(self, value: Declared) -> None:
        """Something that is no message: what was decided, and from what."""
        self._file.append(type(value).__name__, value, time.monotonic_ns())

    def close(self) -> None:
        self._file.close()


def without_tokens(message: Message) -> Message:
    """The message without what was asked and answered; tokens become as many zeros."""
    match message:
        case Generate():
            return replace(message, text=None, messages=None, tokens=None)
        case FetchTokenizerReply():
            return replace(message, data=b"")
        case Token(tokens=tokens):
            return replace(message, tokens=bytes(len(tokens)), text="", logprobs=(), pieces=())
    return message
