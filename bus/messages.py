"""The whole protocol: every message that crosses the bus, as a declared type. docs/protocol.md is its normative text.

Rules of evolution: keys are never renamed, a new key has a default, a retired name stays reserved.
Durations travel, never clock readings. Long lists of block or token ids are little-endian u32 bytes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .wire import Declared, Id, Names, Reason, Word


class Message(Declared):
    """Base of all messages. `KIND` is what stands in frame 0 after the major version."""

    KIND: ClassVar[str] = ""


# ---------------------------------------------------------------- identity


class TryId(Declared):
    """One decode node's try at one prefill node for one request. One try has one lease, ever."""

    node: Word
    incarnation: Id
    request: Id  # 128 bits, minted by the decode node, unique over all its lives
    attempt: int  # counts from 1


class LeaseId(Declared):
    """One prefill node's promise to keep blocks. `generation` is one counter per incarnation, never reused."""

    node: Word
    incarnation: Id
    epoch: int
    generation: int


class Geometry(Declared):
    """The shape of a model's KV cache on a node, from which follows whether another node can read it."""

    layout: Word = "native"  # order of dimensions: native (block outermost), NHD, HND
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_parts: int = 2  # K and V; 1 for a latent
    block_size: int = 16  # tokens
    dtype: Word = "float32"
    block_bytes: int = 0  # of the whole model
    tp: int = 1  # ranks that share the KV heads; more ranks than heads hold copies
    layer_names: Names = ()  # (): "0", "1", ...
    pp: int = 1  # stages that share the layers, of `tp` ranks each

    @property
    def ranks(self) -> int:
        """Of all stages, those of the first stage first."""
        return self.pp * self.tp


class KVLayout(Declared):
    """One rank's KV memory. Strides, starts and sizes are in bytes, counted from the region's first one.

    The row of (block, layer, part, head, token slot), `head_dim` channels side by side, begins at
    starts[layer] + block * block_stride + part * part_stride + head * head_stride + slot * slot_stride,
    where layer, part and head are places in `layers`, `parts` and `heads`.
    """

    dtype: str
    head_dim: int  # channels of one head, or of the latent
    kv_heads: int  # of the whole model, over all ranks; 1 for a latent
    heads: tuple[int, ...]  # which of them this rank holds, rising; () for a rank that holds none
    layers: tuple[str, ...]  # those that this rank holds
    starts: tuple[int, ...]  # where each layer begins
    parts: tuple[str, ...]  # ("k", "v") or ("latent",)
    block_size: int  # tokens
    blocks: int
    block_stride: int
    part_stride: int
    head_stride: int
    slot_stride: int
    region_bytes: int


class Sampling(Declared):
    """How the next token is chosen, and when to stop. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are
    off. Penalties count tokens of the answer, `repetition_penalty` (1: off) those of the prompt, too."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # the decode node draws one when the client gives none, so that P and D agree
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token, 0 to 20; None: no logprobs at all
    min_p: float = 0.0  # the share of the likeliest token's probability that a token must have
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    json_schema: str = ""  # as JSON text: the answer is JSON that follows it; '': anything
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens but the first; computed on D
    prompt_logprobs_from: int = 0  # of tokens from this one on; KV of what they follow may come from cache or P


class TokenLogprob(Declared):
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


# ---------------------------------------------------------------- any pair: membership


class Member(Declared):
    name: Word
    address: Word
    role: Word = ""
    public_key: Word = ""


class Hello(Message):
    """First on every connection. The receiver compares field by field and answers welcome or refused."""

    KIND = "hello"
    role: Word  # prefill, decode, both, gateway, tool
    address: Word = ""  # advertised bus address; empty for those that cannot be called back
    http: Word = ""
    events: Word = ""
    version: Word = ""
    epoch: int = 0
    geometry: Geometry | None = None  # None for tools and clients
    fingerprint: Word = ""  # weights
    model: Word = ""
    max_model_len: int = 0
    deterministic: bool = False


class Welcome(Message):
    """The receiver's own hello, and whom it knows."""

    KIND = "welcome"
    hello: Hello
    members: tuple[Member, ...] = ()


class Refused(Message):
    """The pair cannot work. Every field that differs, with both values as text: (field, yours, mine)."""

    KIND = "refused"
    reason: str
    fields: tuple[tuple[str, str, str], ...] = ()


class Agent(Message):
    """The NIXL agent of one rank: sent after welcome, and again under every new epoch."""

    KIND = "agent"
    epoch: int
    rank: int = 0
    name: str = ""
    metadata: bytes = b""
    metadata_digest: bytes = b""  # xxh3_128: NIXL accepts flipped bits and may crash on them
    base_address: int = 0  # of the KV region in the owner's mover
    region_bytes: int = 0
    blocks: int = 0
    layout: KVLayout | None = None  # None: dense, as the geometry of hello says


class Heartbeat(Message):
    KIND = "heartbeat"
    waiting_prefill_tokens: int = 0
    running: int = 0
    free_blocks: int = 0
    reply: bool = False
    epoch: int = 0  # of the agents that the sender has announced, 0 before any: who missed them says hello again
    prefill_tokens_per_s: int = 0  # lately; 0: not measured
    prefill_step_us: int = 0  # a step of these beside its tokens


class Goodbye(Message):
    KIND = "goodbye"
    reason: Reason = ""


class Drain(Message):
    """Asks a node to drain, or tells peers that the sender drains: nothing new is sent to it."""

    KIND = "drain"


class Error(Message):
    """The answer to what could not be understood or done. Names the kind and the field at fault."""

    KIND = "error"
    message: str
    kind: str = ""
    field: str = ""
    code: str = "invalid_request"
    client_id: str = ""
    retry_after_ms: int = 0


class StalePeer(Message):
    """`to_inc` or `from_inc` of something just said is not current. Never answered by stale_peer."""

    KIND = "stale_peer"
    current: bytes  # the receiver's own incarnation
    try_: TryId | None = None


# ---------------------------------------------------------------- tool to node


class Connect(Message):
    """Join these: bus addresses of members."""

    KIND = "connect"
    addresses: tuple[str, ...]


class Outcome(Declared):
    target: str
    ok: bool
    detail: str = ""


class ConnectReply(Message):
    KIND = "connect.reply"
    outcomes: tuple[Outcome, ...]


class Disconnect(Message):
    """End the link to these members (name or address) after their last lease, and keep them removed."""

    KIND = "disconnect"
    targets: tuple[str, ...]


class DisconnectReply(Message):
    KIND = "disconnect.reply"
    outcomes: tuple[Outcome, ...]


class Status(Message):
    KIND = "status"


class StatusReply(Message):
    """`status` is plain maps and lists, documented in docs/operating.md; keys are only ever added."""

    KIND = "status.reply"
    status: dict[str, Any]


class Ledger(Message):
    KIND = "ledger"


class LedgerReply(Message):
    """Every block and lease accounted for. `clean`: free + cached = all and no lease, read or quarantine is left."""

    KIND = "ledger.reply"
    clean: bool
    ledger: dict[str, Any]


class FetchTokenizer(Message):
    """Asks for what turns text into this node's tokens, one part after the other."""

    KIND = "tokenizer"
    part: int = 0


class FetchTokenizerReply(Message):
    """`tokenizer`: bytes, or hf for files of a Hugging Face folder; `digest` and `parts` are of all its data."""

    KIND = "tokenizer.reply"
    tokenizer: str
    vocab_size: int
    digest: bytes = b""  # xxh3_128
    parts: int = 0
    data: bytes = b""  # of the part: all parts, joined, are a msgpack map of file names and contents


# ---------------------------------------------------------------- client to decode node and back


class Generate(Message):
    """Exactly one of text, messages, tokens. `client_id` is only echoed."""

    KIND = "generate"
    client_id: str
    model: str = ""
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tokens: bytes | None = None  # u32
    sampling: Sampling = Sampling()
    deadline_ms: int = 300_000
    credit: int = 1024  # tokens the client is willing to have unacknowledged
    tools: tuple[dict[str, Any], ...] | None = None  # with messages: what the chat template is given as its tools
    traceparent: str = ""  # W3C's: the span that this is a part of


class Token(Message):
    """Tokens `index` to `index + len(tokens)` of the answer, and the text that they complete."""

    KIND = "token"
    client_id: str
    request: bytes
    index: int
    tokens: bytes  # u32
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    pieces: tuple[tuple[bytes, ...], ...] = ()  # with logprobs, per token: its own bytes, then those of each in `top`
    prompt: bytes = b""  # u32, the prompt's tokens: with the first message, if their logprobs were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of these but the first
    prompt_pieces: tuple[tuple[bytes, ...], ...] = ()  # of all of these


class Credit(Message):
    """The client has consumed the answer up to `index`."""

    KIND = "credit"
    client_id: str
    index: int


class Timeline(Declared):
    """Where a request's time went, in nanoseconds on the decode node's clock; 0 where a phase did not happen."""

    remote: bool = False
    prefill_node: str = ""
    attempts: int = 0
    queue_ns: int = 0  # arrival to admission
    prefill_ns: int = 0  # admission to the first token
    read_ns: int = 0  # first post to last terminal status
    confirm_ns: int = 0  # transfer.done to lease.released
    handover_ns: int = 0  # prefill.done to the decode node's first own token
    ttft_ns: int = 0
    itl_ns: int = 0  # median gap between tokens
    total_ns: int = 0
    read_bytes: int = 0
    mover_ns: int = 0  # time the reads took in the mover, from post to terminal status, summed
    first_step_ns: int = 0  # lease.released to the decode node's first own token: its decode step within the handover


class Finished(Message):
    """The one end of a request. `reason`: stop, length, cancelled, error."""

    KIND = "finished"
    client_id: str
    request: bytes
    reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: Error | None = None
    timeline: Timeline = Timeline()


class Cancel(Message):
    KIND = "cancel"
    client_id: str


class Cancelled(Message):
    """The answer to cancel, whether or not anything was still running."""

    KIND = "cancelled"
    client_id: str


# ---------------------------------------------------------------- the hand-off


class PrefillRequest(Message):
    """Raw frame 0: the prompt's token ids as u32. Repeated on timeout; idempotent by try."""

    KIND = "prefill.request"
    try_: TryId
    sampling: Sampling
    have: int  # tokens that the decode node already holds
    deadline_ms: int
    prompt_tokens: int
    prompt_digest: bytes  # xxh3_128 of the ids
    digests: bool = False  # whether block_digests are wanted
    pair: bytes = b""  # in the prompt's place: names the request that another server was given together with this one
    traceparent: str = ""  # W3C's: the span that this is a part of


class PrefillAccepted(Message):
    """Also the snapshot that answers a repeated request. Block ids start at token `have`, rounded down to a block."""

    KIND = "prefill.accepted"
    try_: TryId
    lease: LeaseId
    ready: int = 0  # tokens of the prompt whose KV may be read
    blocks: bytes = b""  # u32, cumulative: exactly those that hold tokens have..ready
    finished: bool = False
    first_token: bytes | None = None
    block_digests: bytes = b""


class PrefillProgress(Message):
    KIND = "prefill.progress"
    try_: TryId
    lease: LeaseId
    ready: int
    blocks: bytes


class PrefillDone(Message):
    """`first_token` is an encoded FirstToken, none under skip-sampling; opaque to the machines.

    `block_digests`, if they were asked for: for each of `blocks` and each layer in it 8 bytes, little-endian, of its
    tokens from `have` on: the exclusive or, over parts and heads, of the xxh3_64 of the tokens' rows in order, with the
    seed 2 * head + part. It does not depend on how the rows lie.
    """

    KIND = "prefill.done"
    try_: TryId
    lease: LeaseId
    ready: int
    blocks: bytes
    first_token: bytes | None = None
    prefill_ns: int = 0  # how long the prefill node computed
    block_digests: bytes = b""


class FirstToken(Declared):
    """What the prefill node sampled. Carried as opaque bytes so that no machine sees token values."""

    token: int
    logprob: TokenLogprob | None = None
    draft: int = -1  # what the draft layer expects after it; -1: nothing


class PrefillFailed(Message):
    KIND = "prefill.failed"
    try_: TryId
    cause: str  # no_room, draining, conflict, superseded, stale, too_long, expired, deadline, cancelled, ...
    lease: LeaseId | None = None
    retry_after_ms: int = 0


class PrefillCancel(Message):
    KIND = "prefill.cancel"
    try_: TryId
    lease: LeaseId | None = None


class PrefillCancelled(Message):
    KIND = "prefill.cancelled"
    try_: TryId


class TransferDone(Message):
    """The claim: all reads are terminal. Asks whether the lease was held throughout."""

    KIND = "transfer.done"
    try_: TryId
    lease: LeaseId


class LeaseReleased(Message):
    KIND = "lease.released"
    try_: TryId
    lease: LeaseId
    valid: bool
    cause: str = ""


class RenewEntry(Declared):
    try_: TryId
    lease: LeaseId | None = None


class LeaseRenew(Message):
    KIND = "lease.renew"
    entries: tuple[RenewEntry, ...]


class RenewedEntry(Declared):
    """`held` false is not_held. The rest is a snapshot, by which a lost progress or done is found."""

    try_: TryId
    held: bool
    lease: LeaseId | None = None
    ready: int = 0
    blocks: bytes = b""
    finished: bool = False
    first_token: bytes | None = None
    block_digests: bytes = b""


class LeaseRenewed(Message):
    KIND = "lease.renewed"
    entries: tuple[RenewedEntry, ...]


# ---------------------------------------------------------------- snapshots and published events


class EventsSnapshot(Message):
    """Asks a publisher for all it would take to rebuild a topic: the answer carries its present sequence."""

    KIND = "events.snapshot"
    topic: str


class EventsSnapshotReply(Message):
    KIND = "events.snapshot.reply"
    topic: str
    sequence: int
    state: dict[str, Any]


class Published(Message):
    """One event on PUB. Topic `<group>@<node>`; header.seq counts per topic, so that a hole shows."""

    KIND = "published"
    topic: str
    event: str
    data: dict[str, Any] = {}


MESSAGES: dict[str, type[Message]] = {
    m.KIND: m
    for m in (
        Hello, Welcome, Refused, Agent, Heartbeat, Goodbye, Drain, Error, StalePeer,
        Connect, ConnectReply, Disconnect, DisconnectReply, Status, StatusReply, Ledger, LedgerReply,
        FetchTokenizer, FetchTokenizerReply,
        Generate, Token, Credit, Finished, Cancel, Cancelled,
        PrefillRequest, PrefillAccepted, PrefillProgress, PrefillDone, PrefillFailed, PrefillCancel, PrefillCancelled,
        TransferDone, LeaseReleased, LeaseRenew, LeaseRenewed,
        EventsSnapshot, EventsSnapshotReply, Published,
    )
}  # fmt: skip
