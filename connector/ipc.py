"""What control, workers and movers of one node say to each other, over ZMQ PAIR on ipc://.

The sequence of a request inside a worker is named by `seq`, a counter of control's. A worker keeps each
sequence's token ids (prompt, then what was sampled or forced) and its block table; steps say only what is new.
"""

from __future__ import annotations

from pdbus.bus.messages import Agent, Geometry, KVLayout, Sampling, TokenLogprob
from pdbus.bus.wire import Declared

from .staging import Way

# ---------------------------------------------------------------- control to worker


class ToWorker(Declared, tag_field="t", tag=True):
    """Base of what control tells a worker."""


class SeqOpen(ToWorker):
    """A sequence begins: its prompt, and how to sample after it."""

    seq: int
    prompt: bytes  # u32
    sampling: Sampling
    digest_from: int = -1  # report KV digests of the prompt's blocks, of the tokens from here on; -1: of none


class SeqForce(ToWorker):
    """Append tokens that were decided elsewhere (the first token, from the prefill node)."""

    seq: int
    tokens: bytes  # u32
    draft: int = -1  # what may come after them, as FirstToken says


class SeqClose(ToWorker):
    seq: int


class StepRow(Declared):
    """Compute positions `start` to `start + count` of one sequence, writing their KV into its blocks.

    `new_blocks` are appended to the sequence's block table (u32); `reset` empties the table first
    (after a preemption). With `sample`, one token is sampled after the last position and appended.
    """

    seq: int
    start: int
    count: int
    new_blocks: bytes = b""
    reset: bool = False
    sample: bool = False


class Step(ToWorker):
    step: int
    rows: tuple[StepRow, ...]


class Warm(ToWorker):
    """A step is on its way. Until it comes: touch what it will need, for a rest has taken that from the caches."""


class DigestKv(ToWorker):
    """Digest what stands in `blocks` (u32) of tokens `begin` to `end`, the first of them the one that holds `begin`, as
    if blocks were of `size` tokens. Answered by KvDigested."""

    check: int
    blocks: bytes
    begin: int
    end: int
    size: int


class Copy(ToWorker):
    """Copy `blocks` (u32) between the device's memory and its mirror, down or up. Answered by Copied, in order."""

    copy: int
    way: Way
    blocks: bytes


class ProbeWorker(ToWorker):
    """Asks for a WorkerAlive: /health/ready is a round trip through the worker."""

    probe: int


class StopWorker(ToWorker):
    pass


# ---------------------------------------------------------------- worker to control


class FromWorker(Declared, tag_field="t", tag=True):
    """Base of what a worker tells control."""


class WorkerReady(FromWorker):
    """The model is loaded and one warm-up step has run."""

    pid: int
    vocab_size: int
    load_ns: int


class SampledToken(Declared):
    token: int
    logprob: TokenLogprob | None = None


class RowResult(Declared):
    """`token` is -1 when the row did not sample; `more` came with it, since so many of `drafted` tokens were right.
    `wrong_kv` names the first wrong byte found (coded KV), else ''; `problem` says what in the request keeps it from
    going on. `digests` are of the prompt's blocks that this row has filled (nodes/digests.py), if wanted."""

    seq: int
    token: int = -1
    logprob: TokenLogprob | None = None
    more: tuple[SampledToken, ...] = ()
    drafted: int = 0
    draft: int = -1  # what a draft layer expects after the last of them
    wrong_kv: str = ""
    problem: str = ""
    digests: bytes = b""
    prompt_from: int = 0  # where in the prompt the tokens stand whose log-probabilities follow, if they are wanted
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class StepDone(FromWorker):
    step: int
    rows: tuple[RowResult, ...]
    compute_ns: int


class KvDigested(FromWorker):
    check: int
    digests: bytes


class Copied(FromWorker):
    """The fence behind that copy has been passed. `in_step`: a step was running then."""

    copy: int
    bytes: int
    copy_ns: int
    in_step: bool


class WorkerAlive(FromWorker):
    probe: int


class WorkerFailed(FromWorker):
    """The worker cannot go on; it exits after this. `setting` is the option at fault, if one is."""

    problem: str
    setting: str = ""


# ---------------------------------------------------------------- control to mover


class ToMover(Declared, tag_field="t", tag=True):
    """Base of what control tells a mover."""


class PeerAdd(ToMover):
    """A peer's agents, one for each of its ranks. `peer` names node, incarnation and epoch, and is never reused."""

    peer: str
    geometry: Geometry
    agents: tuple[Agent, ...]


class PeerRemove(ToMover):
    """The peer has left for good. Its outstanding reads end as NIXL ends them."""

    peer: str


class Read(ToMover):
    """Read tokens `begin` to `end`: `source` and `target` are the peer's blocks and ours that hold them, in order.
    Answered once by ReadEnded."""

    read: int
    peer: str
    begin: int
    end: int
    source: bytes  # u32
    target: bytes  # u32


class Advertise(ToMover):
    """How many leases peers may be reading under: the mover polls fast while any are."""

    leases: int


class ProbeMover(ToMover):
    probe: int


class StopMover(ToMover):
    """Wait for outstanding reads (a reader that leaves in mid-read can kill the owner), then exit."""

    wait_ms: int = 2000


# ---------------------------------------------------------------- mover to control


class FromMover(Declared, tag_field="t", tag=True):
    """Base of what a mover tells control."""


class MoverReady(FromMover):
    pid: int
    agent_name: str
    metadata: bytes
    base_address: int
    region_bytes: int


class PeerAdded(FromMover):
    """`problem` is '' when the peer's metadata was loaded and a warm-up read has been tried."""

    peer: str
    problem: str = ""


class ReadEnded(FromMover):
    """Terminal. `problem` '' : all bytes are in place. `posted` false: the post gave no handle.

    A failure that proves nothing (the handle may still write) is not reported here but by ReadDoubtful.
    """

    read: int
    problem: str = ""
    posted: bool = True
    bytes: int = 0
    transfer_ns: int = 0  # from post to terminal status
    posts: int = 0
    runs: int = 0  # contiguous ones, in all posts together
    post_ns: int = 0  # spent in posting


class ReadDoubtful(FromMover):
    """An exception that does not prove the end: the handle stays alive and is polled on; ReadEnded may yet follow."""

    read: int
    problem: str


class MoverAlive(FromMover):
    probe: int
    reads: int


class MoverFailed(FromMover):
    """The mover cannot go on; it exits after this. `setting` is the option at fault, if one is."""

    problem: str
    setting: str = ""


# ---------------------------------------------------------------- start-up


class WorkerArgs(Declared):
    """Everything a worker needs, handed over as one JSON string at spawn."""

    endpoint: str  # ipc://...
    slab_path: str  # /proc/<control pid>/fd/<n>, the memfd
    slab_bytes: int
    blocks: int
    geometry: Geometry
    engine: str  # torch, coded
    model: str  # folder or file
    rank: int = 0  # of geometry.ranks
    group: str = ""  # a file that does not exist yet, where the ranks' workers meet
    threads: int = 1
    cpus: tuple[int, ...] = ()
    device: str = "cpu"
    staged: bool = False  # the slab is the mirror of a device memory of the worker's own
    dtype: str = "float32"
    weights: str = "auto"  # how matrices are held: auto, float32, fp16
    deterministic: bool = False
    skip_sampling: bool = False
    speculate: int = 0  # drafts for a row that decodes, at most
    speculate_method: str = "ngram"  # mtp, draft: the KV of a draft layer or a draft model stands behind the others'
    draft_model: str = ""  # its folder, for draft
    max_model_len: int = 0
    max_batch_tokens: int = 0
    coded_step_us: int = 0
    coded_token_us: int = 0
    coded_vocab: int = 256


class MoverArgs(Declared):
    endpoint: str
    slab_path: str
    slab_bytes: int  # the layout's region, and scratch behind it
    layout: KVLayout
    rank: int
    agent_name: str  # node, rank, incarnation, epoch: never used twice
    cpus: tuple[int, ...] = ()
