"""Who may say what: the kinds of message that each role may send, and in whose name. Pure.

A key has one role and one name. A node speaks in the name of its key and of nobody else; a client calls itself what
it likes, but never by a name on the allow-list. Every message is held against this, however it came.
"""

from __future__ import annotations

from collections.abc import Callable

from .messages import (
    Agent,
    Cancel,
    Cancelled,
    Connect,
    ConnectReply,
    Credit,
    Disconnect,
    DisconnectReply,
    Drain,
    Error,
    EventsSnapshot,
    EventsSnapshotReply,
    FetchTokenizer,
    FetchTokenizerReply,
    Finished,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseReleased,
    LeaseRenew,
    LeaseRenewed,
    Ledger,
    LedgerReply,
    Message,
    PrefillAccepted,
    PrefillCancel,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillProgress,
    PrefillRequest,
    Refused,
    StalePeer,
    Status,
    StatusReply,
    Token,
    TransferDone,
    Welcome,
)

Kinds = frozenset[type[Message]]


def _kinds(*kinds: type[Message]) -> Kinds:
    return frozenset(kinds)


WATCH = _kinds(Hello, Heartbeat, Goodbye, Error, Status, Ledger, EventsSnapshot)
ASK = WATCH | _kinds(Generate, Cancel, Credit, FetchTokenizer)
OPERATE = ASK | _kinds(Connect, Disconnect, Drain)
MEMBER = _kinds(Hello, Welcome, Refused, Agent, Heartbeat, Goodbye, Drain, Error, StalePeer)
ANSWER = _kinds(
    Token,
    Finished,
    Cancelled,
    StatusReply,
    LedgerReply,
    ConnectReply,
    DisconnectReply,
    EventsSnapshotReply,
    FetchTokenizerReply,
)
READ = _kinds(PrefillRequest, PrefillCancel, TransferDone, LeaseRenew)
OWN = _kinds(
    PrefillAccepted, PrefillProgress, PrefillDone, PrefillFailed, PrefillCancelled, LeaseReleased, LeaseRenewed
)

MAY_SEND: dict[str, Kinds] = {
    "observer": WATCH,
    "client": ASK,
    "operator": OPERATE,
    "prefill": MEMBER | ANSWER | OWN,
    "decode": MEMBER | ANSWER | READ,
    "both": MEMBER | ANSWER | OWN | READ,
}
RUNS: dict[str, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "both": ("both", "prefill", "decode"),
}  # what a node with a key of this role may be

LOOKED_INTO = _kinds(Hello, PrefillRequest)  # where it depends on what the message says

ROLES = tuple(MAY_SEND)
NODE_ROLES = tuple(RUNS)


def refusal(name: str, role: str, says: str, message: Message, taken: Callable[[str], bool], *, own: bool) -> str:
    """Why the key called `name` may not send `message` in the name of `says`; '' when it may.

    `taken` tells whether a name is on the allow-list. `own` is the receiver's key: its HTTP process operates it.
    """
    kind = type(message)
    if kind not in MAY_SEND[role] and not (own and kind in OPERATE):
        return f"the key of {name} is {role}: it may not send {message.KIND}"
    if says != name and role in RUNS and not own:
        return f"the key of {name} is {role}: it speaks for {name} alone, not for {says!r:.80}"
    if says != name and taken(says):
        return f"the key of {name} cannot speak for {says!r:.80}"
    if isinstance(message, Hello) and message.geometry is not None and message.role not in RUNS.get(role, ()):
        return f"the key of {name} is {role}: it cannot be a {message.role!r:.20} node"
    if isinstance(message, PrefillRequest) and message.try_.node != says:
        return f"{says} cannot ask for {message.try_.node!r:.80}"
    return ""
