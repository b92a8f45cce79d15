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
from pdbus.bus.messages import Drain, Goodbye
from pdbus.bus.wire import Header

from . import events as ev

if TYPE_CHECKING:
    from .control import Control

LOOK_S = 1.0  # how often, like heartbeats
REVOKED = "its key was revoked"

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

    def check(self, received: Received) -> None:
        """A peer's drain says that it drains; whoever is no peer asks us to, and needs the right to. Raises
        RequestError."""
        name = received.header.from_
        if isinstance(received.message, Drain) and self._control.core.peers.get(name) is None:
            public = self._control.endpoint.public_of(received.link)
            if not self._keyring.may_operate(public):
                raise RequestError(f"the key of {name} may not drain this node", code=FORBIDDEN)

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
            log.warning("the key of %s was revoked, %d links closed", key.name, len(links))
            for link in links:
                endpoint.close_link(link)
                control.post(ev.ClientGone(link=link))
            peer = control.core.peers.get(key.name)
            if peer is None:
                continue
            for link in links:
                header = Header(from_=key.name, from_inc=peer.incarnation)
                control.post(ev.MessageCame(link=link, header=header, message=Goodbye(reason=REVOKED)))
        control.publisher.turn_out()
