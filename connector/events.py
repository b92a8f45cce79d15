"""What any owner of a bus endpoint and a mover hears and decides about them: links, messages, reads, leases.

A node's core adds requests and steps to it (nodes/events.py), an engine that brings its own scheduler what that needs
(vllm/events.py). Inputs carry lengths, hashes and opaque handles, never token values.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pdbus.bus.messages import Agent, Geometry, Message
from pdbus.bus.wire import Declared, Header

from .handoff import LeaseBegan, LeaseEnded

M_co = TypeVar("M_co", bound=Message, covariant=True)  # so that a recording is read back with its message typed

# ---------------------------------------------------------------- heard


class NodeEvent(Declared, tag_field="t", tag=True):
    pass


class MessageCame(NodeEvent, Generic[M_co]):
    """Any message but generate. `block_hashes` for a prefill.request only: of its prompt's full blocks."""

    link: str
    header: Header
    message: M_co
    block_hashes: tuple[bytes, ...] = ()


class MoverUp(NodeEvent):
    """The mover of every rank is ready; the shell built their agents from what they reported, under the present
    epoch."""

    agents: tuple[Agent, ...]


class MoverLost(NodeEvent):
    """The mover's process has been reaped: none of its reads writes any more. `asked`: by RestartMover."""

    problem: str
    asked: bool


class PeerAddEnded(NodeEvent):
    """The mover has loaded a peer's agent, or could not."""

    peer: str
    problem: str = ""


class ReadEnded(NodeEvent):
    read: int
    problem: str = ""
    bytes: int = 0
    transfer_ns: int = 0


class ReadDoubtful(NodeEvent):
    read: int
    problem: str


class LinkOpened(NodeEvent):
    address: str
    link: str


class LinkFailed(NodeEvent):
    """The address cannot even be tried."""

    address: str
    problem: str


class LinkLost(NodeEvent):
    """The connection under a link that we opened was cut."""

    link: str
    reason: str = ""


class JoinAsked(NodeEvent):
    address: str


class WatchChanged(NodeEvent):
    """Whether the shell itself watches this peer (bus/members.py): no heartbeats and renewals go along that link."""

    peer: str
    watched: bool


class DrainAsked(NodeEvent):
    pass


class LeaveAsked(NodeEvent):
    """End at once: a second signal, or the drain's time is up."""


class Tick(NodeEvent):
    pass


# ---------------------------------------------------------------- decided


class NodeEffect(Declared, tag_field="t", tag=True):
    pass


class Send(NodeEffect, Generic[M_co]):
    """Send on this link. For a prefill.request the shell adds the prompt's ids as a raw frame."""

    link: str
    to: str
    to_inc: bytes
    message: M_co
    cause: int = 0


class OpenLink(NodeEffect):
    """Open a link; answered by LinkOpened or LinkFailed."""

    address: str


class CloseLink(NodeEffect):
    """`flush`: let what is queued leave first."""

    link: str
    flush: bool = False


class AddPeer(NodeEffect):
    """Give a peer's agents, one for each of its ranks, to the mover. `peer` names node, incarnation and epoch."""

    peer: str
    geometry: Geometry
    agents: tuple[Agent, ...]


class RemovePeer(NodeEffect):
    peer: str


class StartRead(NodeEffect):
    """Read tokens `begin` to `end`: `source` and `target` are the peer's blocks and ours that hold them, in order.
    `request` tells people whose read it is."""

    read: int
    peer: str
    begin: int
    end: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    request: bytes = b""


class AdvertiseLeases(NodeEffect):
    leases: int


class RestartMover(NodeEffect):
    """End the mover, if one runs, as soon as its reads allow, and answer MoverLost; if none runs, start one whose
    agent name carries `epoch`, and answer MoverUp."""

    epoch: int


class Publish(NodeEffect):
    """What may be lost: node, request and lease events."""

    topic: str
    event: str
    data: dict[str, object]


class Drained(NodeEffect):
    """Nothing is left that anyone waits for: the node may exit."""


def lease_event(event: str, effect: LeaseBegan | LeaseEnded, **data: object) -> Publish:
    """For people and tools."""
    try_, lease = effect.try_, effect.lease
    named = {"request": try_.request.hex(), "attempt": try_.attempt, "decode_node": try_.node}
    return Publish(
        topic="lease", event=event, data={**named, "generation": lease.generation, "epoch": lease.epoch, **data}
    )
