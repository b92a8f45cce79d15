"""What a node does about its keys while it runs: reads the allow-list again, and parts from whose key was revoked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pdbus.bus.endpoint import FORBIDDEN, Endpoint, Received
from pdbus.bus.errors import RequestError
from pdbus.bus.keyring import Keyring
from pdbus.bus.keys import Key
from pdbus.bus.members import Peer
from pdbus.bus.messages import Drain, Error, Goodbye
from pdbus.bus.publisher import Publisher
from pdbus.bus.wire import Header

from . import events as ev

LOOK_S = 1.0  # how often, like heartbeats
REVOKED = "its key was revoked"
PARTED = "your key was revoked here"
LAST_WORD_MS = 100  # for it to leave

log = logging.getLogger("pdbus")


class KeyWatch:
    def __init__(
        self,
        keyring: Keyring,
        endpoint: Endpoint,
        publisher: Publisher,
        *,
        peer: Callable[[str], Peer | None],
        tell: Callable[[ev.NodeEvent], None],
        gone: Callable[[str], None] = lambda link: None,
    ) -> None:
        """`peer` knows members by name; `tell` is the core's; `gone` hears of every link that is closed."""
        self._keyring = keyring
        self._endpoint, self._publisher = endpoint, publisher
        self._peer, self._tell, self._gone = peer, tell, gone
        self._timer: asyncio.TimerHandle | None = None

    def start(self, address: str) -> None:
        """`address`: where others call us."""
        own = self._keyring.allowed.get(self._keyring.own.public)
        if own is not None and address not in own.addresses:
            said = " ".join(own.addresses) or "nowhere"
            log.warning("others do not find this node at %s: its line on their lists must say so, here it says %s",
                        address, said)  # fmt: skip
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, received: Received) -> Received:
        """What it is to us. A peer's drain says that it drains; whoever is no peer asks us to, and needs the right to.
        A peer that does not take what we say has parted from us. Raises RequestError."""
        name, message = received.header.from_, received.message
        is_peer = self._peer(name) is not None
        if isinstance(message, Error) and message.code == FORBIDDEN and is_peer:
            return received._replace(message=Goodbye(reason=message.message))
        if isinstance(message, Drain) and not is_peer:
            public = self._endpoint.public_of(received.link)
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
        endpoint = self._endpoint
        for key in revoked:
            links = endpoint.links_of((key.public,))
            log.warning("the key of %s was revoked; links closed: %d", key.name, len(links))
            for link in links:
                endpoint.send(link, Goodbye(reason=PARTED))
                endpoint.close_link(link, linger_ms=LAST_WORD_MS)
                self._gone(link)
            peer = self._peer(key.name)
            if peer is None:
                continue
            for link in links:
                header = Header(from_=key.name, from_inc=peer.incarnation)
                self._tell(ev.MessageCame(link=link, header=header, message=Goodbye(reason=REVOKED)))
        self._publisher.turn_out()
