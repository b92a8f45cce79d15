"""What a client sent and got, recorded like what a node hears and decides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Generic, TypeVar

from .messages import Generate, Message, Token
from .recorder import Recorder
from .wire import Declared, Header, replace

M_co = TypeVar("M_co", bound=Message, covariant=True)  # so that it is read back with its message typed


class ClientBegan(Declared, tag_field="t", tag=True):
    """At the head of a client's recording. `tokens`: prompts and answers are kept."""

    address: str
    version: str
    tokens: bool = False


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

    def __init__(self, directory: Path, name: str, incarnation: bytes, began: ClientBegan) -> None:
        """Raises ConfigError (`record`) when the file cannot be made."""
        self._file = Recorder(directory, name, incarnation, began, setting="record")
        self._incarnation, self._tokens = incarnation, began.tokens

    def saw(self, link: str, header: Header, message: Message) -> None:
        """A message was sent or has come."""
        kind = Sent if header.from_inc == self._incarnation else Got
        value = kind(link=link, header=header, message=message if self._tokens else without_tokens(message))
        self._file.append(f"{kind.__name__} {message.KIND}", value, time.monotonic_ns())

    def close(self) -> None:
        self._file.close()


def without_tokens(message: Message) -> Message:
    """The message without what was asked and answered; tokens become as many zeros."""
    match message:
        case Generate():
            return replace(message, text=None, messages=None, tokens=None)
        case Token(tokens=tokens):
            return replace(message, tokens=bytes(len(tokens)), text="", logprobs=(), pieces=())
    return message
