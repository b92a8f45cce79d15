"""What a node's core hears and decides. Inputs carry lengths, hashes and opaque handles, never token values."""

from __future__ import annotations

from pdbus.bus.messages import Sampling, Timeline, TryId
from pdbus.bus.wire import Declared
from pdbus.connector.events import (
    AddPeer,
    AdvertiseLeases,
    CloseLink,
    DrainAsked,
    Drained,
    JoinAsked,
    LeaveAsked,
    LinkFailed,
    LinkLost,
    LinkOpened,
    MessageCame,
    MoverLost,
    MoverUp,
    NodeEffect,
    NodeEvent,
    OpenLink,
    PeerAddEnded,
    Publish,
    ReadDoubtful,
    ReadEnded,
    RemovePeer,
    RestartMover,
    Send,
    StartRead,
    Tick,
    WatchChanged,
)
from pdbus.connector.ipc import StepRow
from pdbus.connector.staging import Way

__all__ = [
    "AddPeer",
    "AdvertiseLeases",
    "CancelAsked",
    "CheckKv",
    "ClientGone",
    "CloseLink",
    "CloseSequence",
    "CopyEnded",
    "CreditGiven",
    "DrainAsked",
    "Drained",
    "EmitToken",
    "EndRequest",
    "FirstTokenTaken",
    "GenerateAsked",
    "JoinAsked",
    "KvChecked",
    "LeaveAsked",
    "LinkFailed",
    "LinkLost",
    "LinkOpened",
    "MessageCame",
    "MoverLost",
    "MoverUp",
    "NodeEffect",
    "NodeEvent",
    "OpenLink",
    "OpenSequence",
    "PeerAddEnded",
    "Publish",
    "ReadDoubtful",
    "ReadEnded",
    "RemoveAsked",
    "RemovePeer",
    "RestartMover",
    "RestartWorker",
    "RunStep",
    "Send",
    "StartCopy",
    "StartRead",
    "StepEnded",
    "StepRowEnded",
    "TakeFirstToken",
    "Tick",
    "WatchChanged",
    "WorkerLost",
    "WorkerUp",
]

# ---------------------------------------------------------------- heard


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
    whole: bool = False  # each position of its prompt is computed, and here: nothing cached will do, nor another node


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


class RemoveAsked(NodeEvent):
    target: str


# ---------------------------------------------------------------- decided


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


class RestartWorker(NodeEffect):
    """Start another worker in the place of the one that was reaped."""
