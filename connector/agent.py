"""What a mover needs of a transport: NIXL (nixl_agent.py) or memory of this process (loopback.py)."""

from __future__ import annotations

from typing import Any, Protocol

from pdbus.bus.errors import Broken

from .apply import Runs


class ReadFailed(Broken):
    """The read has ended without all its bytes, and will write no more."""


class ReadDoubtful(Broken):
    """Something went wrong that does not prove the read's end: keep the handle and ask again."""


class Agent(Protocol):
    """One agent over one region. Peers and handles are opaque; a released handle is never asked.

    Nothing progresses, neither our reads nor those of others from us, but in post, check and pump.
    """

    metadata: bytes

    def add_peer(self, name: str, metadata: bytes, base_address: int, region_bytes: int) -> Any:
        """Load a peer's agent. Raises Broken when its metadata cannot be used or is not that of `name`."""
        ...

    def remove_peer(self, peer: Any) -> None:
        """Forget a peer to which no handle is left. Raises Broken."""
        ...

    def make_warm_up(self, peer: Any) -> Any:
        """A handle that reads a few bytes into memory of no meaning. Raises ReadFailed."""
        ...

    def make_read(self, peer: Any, runs: Runs) -> Any:
        """A handle that reads runs of the peer's region into ours; nothing is posted. Raises ReadFailed."""
        ...

    def post(self, handle: Any) -> bool:
        """Start it; True when it is already done. Raises ReadFailed (terminal) or ReadDoubtful."""
        ...

    def check(self, handle: Any) -> bool:
        """True when done. Raises ReadFailed (terminal) or ReadDoubtful."""
        ...

    def release(self, handle: Any) -> None:
        """Give up a terminal handle. Raises Broken."""
        ...

    def pump(self) -> None:
        """Let the transport progress. Raises Broken when it cannot any more."""
        ...

    def close(self) -> None:
        """End the agent, with no handle left: nothing is written or read afterwards."""
        ...
