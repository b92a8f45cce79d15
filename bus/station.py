"""One identity on the bus for any number of clients: an endpoint, a recording, the numbers of what was asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from pdbus import __version__

from .client_recorder import ClientBegan, ClientRecorder
from .endpoint import Endpoint, Received
from .errors import Closed
from .keyring import Keyring
from .wire import Declared


class Listener(Protocol):
    """Who opened a link."""

    def hear(self, received: Received) -> None: ...

    def link_lost(self) -> None:
        """The connection was cut; ZeroMQ re-makes it by itself."""
        ...


class Station:
    """What `Client`s share that speak to several nodes as one: to each node, and in the recording, they are one client.

    Make it on an event loop. With `record`, a folder, all that is sent and heard is recorded there, under `role`
    ("client", "gateway") and `name`; `address` is where it was told to call. Raises ConfigError (`setting`) when
    that folder will not do.
    """

    def __init__(
        self,
        *,
        address: str = "",
        role: str = "client",
        name: str = "",
        keyring: Keyring | None = None,
        record: str | os.PathLike[str] | None = None,
        record_tokens: bool = False,
        setting: str = "record",
    ) -> None:
        incarnation = os.urandom(16)
        self.name = name or f"{role}-{incarnation[:4].hex()}"
        self._recorder: ClientRecorder | None = None
        if record:
            began = ClientBegan(address=address, version=__version__, tokens=record_tokens, role=role)
            self._recorder = ClientRecorder(Path(record), self.name, incarnation, began, setting=setting)
        tap = self._recorder.saw if self._recorder else None
        self._endpoint = Endpoint(
            self.name, incarnation, self._on_message, on_link_lost=self._on_link_lost, keyring=keyring, tap=tap
        )
        self._listeners: dict[str, Listener] = {}  # by link
        self._asked = 0
        self.closed = False

    @property
    def incarnation(self) -> bytes:
        return self._endpoint.incarnation

    @property
    def endpoint(self) -> Endpoint:
        """To send and ask on a link. Raises Closed once closed."""
        if self.closed:
            raise Closed("the client is not open: use it within `async with`")
        return self._endpoint

    @property
    def next_id(self) -> str:
        """The client id of the next generation."""
        return f"{self._asked + 1}"

    def take_id(self) -> str:
        self._asked += 1
        return f"{self._asked}"

    def key_choices(self, address: str) -> int:
        """How many keys may answer there, by the allow-list as it is now."""
        if self.endpoint.keyring is not None:
            self.endpoint.keyring.reload()
        return self.endpoint.key_choices(address)

    def has_key_of(self, address: str) -> bool:
        """Whether who listens there is on the allow-list; without keys everyone is."""
        keyring = self.endpoint.keyring
        return keyring is None or bool(keyring.allowed.at(address))

    def connect(self, address: str, listener: Listener) -> str:
        """Open a link whose messages go to `listener`."""
        link = self.endpoint.connect(address)
        self._listeners[link] = listener
        return link

    def close_link(self, link: str, *, linger_ms: int = 0) -> None:
        self._listeners.pop(link, None)
        self._endpoint.close_link(link, linger_ms=linger_ms)

    def note(self, value: Declared) -> None:
        """Record something that is no message, under its type's name."""
        if self._recorder is not None:
            self._recorder.note(value)

    def close(self, *, linger_ms: int = 0) -> None:
        if self.closed:
            return
        self.closed = True
        self._endpoint.close(linger_ms=linger_ms)
        if self._recorder is not None:
            self._recorder.close()

    def _on_message(self, received: Received) -> None:
        listener = self._listeners.get(received.link)
        if listener is not None:
            listener.hear(received)

    def _on_link_lost(self, link: str) -> None:
        listener = self._listeners.get(link)
        if listener is not None:
            listener.link_lost()
