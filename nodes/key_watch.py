"""What a node does about its keys while it runs: reads the allow-list again, and parts from whose key was revoked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdbus.bus.endpoint import FORBIDDEN, Received
from pdbus.bus.errors import RequestError
from pdbus.bus.keyring import Keyring
from pdbus.bus.keys import Key
from pdbus.bus.messages import Drain, Error, Goodbye
from pdbus.bus.wire import Header

from . import events as ev

if TYPE_CHECKING:
    from .control import Control

LOOK_S = 1.0  # how often, like heartbeats
REVOKED = "its key was revoked"
PARTED = "your key was revoked here"
LAST_WORD_MS = 100  # for it to leave

log = logging.getLogger("pdbus")


class KeyWatch:
    def __init__(self, control: Control, keyring: Keyring) -> None:
        self._control = control
        self._keyring = keyring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        own = self._keyring.allowed.get(self._keyring.own.public)
        if own is not None and self._control.address not in own.addresses:
            said = " ".join(own.addresses) or "nowhere"
            log.warning("others do not find this node at %s: its line on their lists must say so, here it says %s",
                        self._control.address, said)  # fmt: skip
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, received: Received) -> Received:
        """What it is to us. A peer's drain says that it drains; whoever is no peer asks us to, and needs the right to.
        A peer that does not take what we say has parted from us. Raises RequestError."""
        name, message = received.header.from_, received.message
        is_peer = self._control.core.peers.get(name) is not None
        if isinstance(message, Error) and message.code == FORBIDDEN and is_peer:
            return received._replace(message=Goodbye(reason=message.message))
        if isinstance(message, Drain) and not is_peer:
            public = self._control.endpoint.public_of(received.link)
            if not self._keyring.may_operate(public):
                raise RequestError(f"the key of {name} may not drain this node", code=FORBIDDEN)
        return received

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        revoked = self._keyring.reload()
        if revoked:
            self._part(revoked)

    def _part(self, revoked: Sequence[Key]) -> None:
        """Their links are closed; what they wanted of us ends as if they had said goodbye."""
        endpoint, control = self._control.endpoint, self._control
        for key in revoked:
            links = endpoint.links_of((key.public,))
            log.warning("the key of %s was revoked; links closed: %d", key.name, len(links))
            for link in links:
                endpoint.send(link, Goodbye(reason=PARTED))
                endpoint.close_link(link, linger_ms=LAST_WORD_MS)
                control.post(ev.ClientGone(link=link))
            peer = control.core.peers.get(key.name)
            if peer is None:
                continue
            for link in links:
                header = Header(from_=key.name, from_inc=peer.incarnation)
                control.post(ev.MessageCame(link=link, header=header, message=Goodbye(reason=REVOKED)))
        control.publisher.turn_out()
