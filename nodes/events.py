"""What a node's core hears and decides. Inputs carry lengths, hashes and opaque handles, never token values."""

from __future__ import annotations

from typing import Generic, TypeVar

from pdbus.bus.messages import Agent, Geometry, Message, Sampling, Timeline, TryId
from pdbus.bus.wire import Declared, Header
from pdbus.connector.ipc import StepRow
from pdbus.connector.staging import Way

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


class GenerateAsked(NodeEvent):
    """A client's request, tokenized. The shell minted `request`; `stop` strings and ids stay with the shell."""

    request: bytes
    link: str
    client: str  # the client's name and id in one string: what a cancel names
    prompt_tokens: int
    prompt_digest: bytes
    block_hashes: tuple[bytes, ...]
    sampling: Sampling
    deadline_ns: int  # a duration
    credit: int
    local: bool = False  # its prompt is computed here, whatever the policy


class CancelAsked(NodeEvent):
    client: str


class CreditGiven(NodeEvent):
    client: str
    index: int


class ClientGone(NodeEvent):
    """Nothing can be delivered on this link any more."""

    link: str


class FirstTokenTaken(NodeEvent):
    """The shell has sent the first token to the client. `stop`: it ended the answer."""

    request: bytes
    stop: bool


class StepRowEnded(Declared):
    """`tokens`: how many a row that samples has sampled, each computed upon the one before but for the last. `stop`:
    the last of them ended the answer. `payload`: the sampled token, opaque, for a prefill's last chunk. `problem`: the
    engine failed this sequence, or found wrong KV."""

    seq: int
    tokens: int = 1
    stop: bool = False
    payload: bytes | None = None
    problem: str = ""
    digests: bytes = b""  # of KV, for a prefill whose reader wants them
    code: str = "engine"  # of the problem


class StepEnded(NodeEvent):
    step: int
    rows: tuple[StepRowEnded, ...]
    compute_ns: int


class WorkerUp(NodeEvent):
    pass


class WorkerLost(NodeEvent):
    """The worker's process has been reaped."""

    problem: str


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


class KvChecked(NodeEvent):
    """The answer to CheckKv. `problem` is '' when all digests are as they should be."""

    request: bytes
    attempt: int
    problem: str = ""


class CopyEnded(NodeEvent):
    """The fence behind a copy between device and mirror has been passed: all its bytes are in place. `in_step`: a
    forward step was running then."""

    copy: int
    bytes: int = 0
    copy_ns: int = 0
    in_step: bool = False


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


class RemoveAsked(NodeEvent):
    target: str


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


class OpenSequence(NodeEffect):
    """Tell the worker of a sequence: the prompt of this try or of this request, and the tokens taken so far."""

    seq: int
    sampling: Sampling
    try_: TryId | None = None
    request: bytes = b""
    digest_from: int = -1  # KV digests are wanted of tokens from here on; -1: of none


class CloseSequence(NodeEffect):
    seq: int


class RunStep(NodeEffect):
    step: int
    rows: tuple[StepRow, ...]


class TakeFirstToken(NodeEffect):
    """Decode the payload, append the token to the sequence, send it to the client, answer FirstTokenTaken."""

    request: bytes
    seq: int
    payload: bytes


class EmitToken(NodeEffect):
    """Send what this sequence sampled in the step just ended to the request's client."""

    request: bytes
    seq: int


class EndRequest(NodeEffect):
    """The one end. `reason`: stop, length, cancelled, error; then `code` and `problem` say why."""

    request: bytes
    seq: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timeline: Timeline
    code: str = ""
    problem: str = ""
    retry_after_ms: int = 0


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


class CheckKv(NodeEffect):
    """Compare the digests of what was read with what the prefill node said, and answer KvChecked. `blocks` hold tokens
    `begin` to `end`; digests are of these as if cut into blocks of `size`. `node` is who prefilled, for people."""

    request: bytes
    attempt: int
    node: str
    blocks: tuple[int, ...]
    begin: int
    end: int
    size: int
    digests: bytes


class StartCopy(NodeEffect):
    """Copy these blocks beside the steps, after all copies before: `way` down, from the device into its mirror, or up.
    Answered by CopyEnded. `request` tells people whose copy it is."""

    copy: int
    way: Way
    blocks: tuple[int, ...]
    request: bytes = b""


class AdvertiseLeases(NodeEffect):
    leases: int


class RestartMover(NodeEffect):
    """End the mover, if one runs, as soon as its reads allow, and answer MoverLost; if none runs, start one whose
    agent name carries `epoch`, and answer MoverUp."""

    epoch: int


class RestartWorker(NodeEffect):
    """Start another worker in the place of the one that was reaped."""


class Publish(NodeEffect):
    """What may be lost: node, request and lease events."""

    topic: str
    event: str
    data: dict[str, object]


class Drained(NodeEffect):
    """Nothing is left that anyone waits for: the node may exit."""
