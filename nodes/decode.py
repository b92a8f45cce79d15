"""The life of a client's request on the decode node: admission, where it is prefilled, retries, its one end.

Theory of operation.

    waiting   --blocks, and a prefill node to ask-->            fetching
    waiting   --blocks, none to ask or nothing to transfer-->   running (its prompt is computed here)
    fetching  --fetched-->                                      running, or, with a mirror to copy it from, staging
    staging   --staged up-->                                    running
    fetching  --attempt failed-->                               waiting (for other blocks, another node or none)
    running   --preempted, worker lost-->                       waiting (computed again here, no second transfer)
    staging   --worker lost, and the prompt's beginning-->      waiting (likewise)
    any       --last token, cancel, deadline, problem-->        ended

`waiting` is served strictly by age and only its head is looked at, so a step costs the same however long it is.
The first token is taken once, from whichever attempt was first, and stays at the head of the answer: what is
computed again is the prompt and every token taken so far.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdbus.bus.messages import Sampling
from pdbus.bus.wire import Declared, replace
from pdbus.connector.handoff import AttemptFailed, FetchAsked, Holder
from pdbus.connector.pool import BlockPool
from pdbus.connector.staging import StageUp
from pdbus.connector.tally import Tally
from pdbus.connector.timers import Timers

from .events import EmitToken, EndRequest, GenerateAsked, NodeEffect, TakeFirstToken
from .scheduler import Scheduler, Sequence
from .timeline import Marks

WORKER_LOSSES_MAX = 2


class State(StrEnum):
    WAITING = "waiting"
    FETCHING = "fetching"
    STAGING = "staging"
    RUNNING = "running"
    ENDED = "ended"


class Source(Declared):
    """A prefill node that can be asked now."""

    node: str
    incarnation: bytes
    epoch: int
    link: str
    block_size: int  # of its KV, in tokens


@dataclass(slots=True)
class Request:
    request: bytes
    link: str
    client: str
    prompt_tokens: int
    prompt_digest: bytes
    block_hashes: tuple[bytes, ...]
    sampling: Sampling
    order: int
    seq: int
    deadline_ns: int
    credit: int
    marks: Marks
    state: State = State.WAITING
    blocks: tuple[int, ...] = ()  # while fetching or staging; a running one's are its sequence's
    cached_tokens: int = 0
    have: int = 0  # tokens that were here before its last attempt
    attempts: int = 0
    tried: tuple[str, ...] = ()
    local_only: bool = False  # for good: asked for, it has run here, or no attempt is left
    kept: int = 0  # positions of its prompt, from the first on, that need not be computed here
    generated: int = 0
    acknowledged: int = 0
    worker_losses: int = 0  # while it was in the step
    node: str = ""  # who prefilled, or is asked to; '' for this node itself


class Requests:
    """All requests of the node that have not ended."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        running_max: int,
        choose: Callable[[Request, int, int], Source | None],
    ) -> None:
        """`choose(request, cached, now)` names the prefill node for its next attempt, or None for computing it here,
        where so many tokens are cached."""
        self._pool = pool
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._running_max = running_max
        self._choose = choose
        self._requests: dict[bytes, Request] = {}
        self._waiting: list[Request] = []  # by age
        self._no_room: tuple[int, int] | None = None  # for the request of that sequence, as the pool was then
        self._fetching = Tally()  # from each prefill node
        self._by_seq: dict[int, Request] = {}
        self._by_client: dict[str, Request] = {}
        self._deadlines: Timers[bytes] = Timers()
        self._orders = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> list[Request]:
        return list(self._requests.values())

    def get(self, request: bytes) -> Request | None:
        return self._requests.get(request)

    def of_client(self, client: str) -> Request | None:
        return self._by_client.get(client)

    def of_link(self, link: str) -> list[Request]:
        return [r for r in self._requests.values() if r.link == link]

    def of_seq(self, seq: int) -> Request | None:
        return self._by_seq.get(seq)

    def fetching_from(self) -> Mapping[str, int]:
        """How many requests fetch from each prefill node that any fetches from, now."""
        return self._fetching

    def asked_tokens(self) -> dict[str, int]:
        """By prefill node that is asked for any: tokens of prompts that it has not finished."""
        asked: dict[str, int] = {}
        for r in self._requests.values():
            if r.state is State.FETCHING and not r.marks.prefill_done:
                asked[r.node] = asked.get(r.node, 0) + r.prompt_tokens
        return asked

    @property
    def running(self) -> int:
        """Those whose answers are being computed here."""
        return sum(r.state is State.RUNNING for r in self._requests.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def next_deadline(self) -> int | None:
        return self._deadlines.next_deadline()

    def overdue(self, now: int) -> Request | None:
        """The next request whose deadline has passed, for the caller to end."""
        request = self._deadlines.pop_due(now)
        return self._requests[request] if request is not None else None

    # ------------------------------------------------------------ in

    def arrive(self, event: GenerateAsked, seq: int, now: int) -> Request:
        self._orders += 1
        r = Request(
            request=event.request,
            link=event.link,
            client=event.client,
            prompt_tokens=event.prompt_tokens,
            prompt_digest=event.prompt_digest,
            block_hashes=event.block_hashes,
            sampling=event.sampling,
            order=self._orders,
            seq=seq,
            deadline_ns=now + event.deadline_ns,
            credit=event.credit,
            marks=Marks(arrived=now),
            local_only=event.whole,
            kept=0 if event.whole else _kept(event.sampling, event.prompt_tokens),
        )
        self._requests[r.request] = self._by_seq[seq] = self._by_client[r.client] = r
        self._waiting.append(r)
        self._deadlines.set(r.request, r.deadline_ns)
        return r

    def admit(self, now: int) -> list[FetchAsked]:
        """Serve the waiting, oldest first, while there are blocks. Returns the fetches to start."""
        fetches: list[FetchAsked] = []
        while self._waiting and len(self._requests) - len(self._waiting) < self._running_max:
            r = self._waiting[0]
            if self._no_room == (r.seq, self._pool.changes):
                break
            shared = r.block_hashes[: r.kept // self._pool.block_size]
            reservation = self._pool.reserve(r.prompt_tokens + r.generated, shared, Holder.HELD)
            if reservation is None:
                self._no_room = r.seq, self._pool.changes
                break
            del self._waiting[0]
            r.blocks = reservation.blocks
            cached = reservation.cached_tokens
            if not r.marks.admitted:
                r.marks.admitted, r.cached_tokens = now, cached
            source = None if self._stays_local(r, cached) else self._choose(r, cached, now)
            if source is None:
                self._run(r, cached)
            else:
                fetches.append(self._fetch(r, source, cached))
        return fetches

    def _stays_local(self, r: Request, cached: int) -> bool:
        """Nothing to transfer: what is left of a warm prompt fits into one block."""
        return r.local_only or (cached > 0 and r.kept - cached <= self._pool.block_size)

    def _fetch(self, r: Request, source: Source, have: int) -> FetchAsked:
        self._enter(r, State.FETCHING, source.node)
        r.attempts += 1
        r.have = have
        r.tried += (source.node,)
        return FetchAsked(
            request=r.request,
            attempt=r.attempts,
            node=source.node,
            incarnation=source.incarnation,
            epoch=source.epoch,
            link=source.link,
            source_size=source.block_size,
            prompt_tokens=r.prompt_tokens,
            have=have,
            prompt_digest=r.prompt_digest,
            sampling=replace(r.sampling, prompt_logprobs=None, prompt_logprobs_from=0),
            blocks=r.blocks[: -(-r.prompt_tokens // self._pool.block_size)],
            deadline_ns=r.deadline_ns,
        )

    def _run(self, r: Request, computed: int) -> None:
        """Its sequence decodes from here on; whatever of prompt and tokens is not yet computed comes first."""
        self._enter(r, State.RUNNING, r.node)
        r.local_only = True
        known = r.prompt_tokens + r.generated
        self._scheduler.add(
            Sequence(
                seq=r.seq,
                order=r.order,
                prompt_tokens=r.prompt_tokens,
                blocks=list(r.blocks),
                block_hashes=r.block_hashes,
                computed=min(computed, r.kept, known - 1),
                known=known,
                growing=True,
                sample_prompt=True,
                reset=True,
            )
        )
        r.blocks = ()

    # ------------------------------------------------------------ the hand-off's word

    def fetched(self, request: bytes, now: int) -> None:
        """Valid: all of the prompt's KV is here. Without a first token its last position is computed again."""
        r = self._requests[request]
        r.marks.confirmed = now
        self._run(r, r.prompt_tokens)

    def fetched_into_mirror(self, request: bytes, now: int) -> StageUp:
        """Valid, but no step can compute upon it where it is."""
        r = self._requests[request]
        r.marks.confirmed = now
        self._enter(r, State.STAGING, r.node)
        return self._stage_up(r)

    def staging(self) -> list[StageUp]:
        """What is in the mirror alone."""
        return [self._stage_up(r) for r in self.all() if r.state is State.STAGING]

    def _stage_up(self, r: Request) -> StageUp:
        size = self._pool.block_size
        return StageUp(request=r.request, blocks=r.blocks[r.have // size : -(-r.prompt_tokens // size)])

    def staged(self, request: bytes) -> None:
        """On the device, where it can be computed upon. A request that has left meanwhile needs it no more."""
        r = self._requests.get(request)
        if r is not None and r.state is State.STAGING:
            self._run(r, r.prompt_tokens)

    def attempt_failed(self, failed: AttemptFailed) -> None:
        """Back to waiting, for other blocks: the old ones may still be written to by reads in flight."""
        r = self._requests.get(failed.request)
        if r is None or r.state is not State.FETCHING or r.attempts != failed.attempt:
            return
        self._pool.drop(r.blocks, Holder.HELD)
        r.blocks = ()
        r.marks.attempt_failed()
        self._wait(r, "")

    def prefill_finished(self, request: bytes, now: int) -> None:
        self._requests[request].marks.prefill_done = now

    def read_posted(self, request: bytes, now: int) -> None:
        r = self._requests[request]
        r.marks.first_read = r.marks.first_read or now

    def read_ended(self, request: bytes, attempt: int, size: int, transfer_ns: int, now: int) -> None:
        """A read of an attempt that is over says nothing of the present one."""
        r = self._requests.get(request)
        if r is not None and r.state is State.FETCHING and r.attempts == attempt:
            r.marks.read(now, size, transfer_ns)

    def claimed(self, request: bytes, now: int) -> None:
        self._requests[request].marks.claimed = now

    def first_token_known(self, request: bytes, payload: bytes, now: int) -> list[NodeEffect]:
        """Counted at once: whatever becomes of the attempt, the worker's sequence has this token from now on.

        Where the prompt's last tokens are scored here, so is this one sampled: the same, and not before they are."""
        r = self._requests.get(request)
        if r is None or r.kept < r.prompt_tokens:
            return []
        self._count(r, now, own=False)
        return [TakeFirstToken(request=r.request, seq=r.seq, payload=payload)]

    def first_token_taken(self, request: bytes, stop: bool, now: int) -> list[NodeEffect]:
        r = self._requests.get(request)
        return [] if r is None else self._ends(r, stop, now)

    def acknowledged(self, client: str, index: int) -> None:
        """The client has consumed its answer up to `index`."""
        r = self._by_client.get(client)
        if r is not None:
            r.acknowledged = max(r.acknowledged, min(index, r.generated))

    # ------------------------------------------------------------ the scheduler's word

    def sampled(self, seq: int, stop: bool, now: int, tokens: int = 1) -> list[NodeEffect]:
        """A step sampled so many more tokens of this sequence."""
        r = self._by_seq.get(seq)
        if r is None:
            return []
        self._count(r, now, own=True, tokens=tokens)
        emit = EmitToken(request=r.request, seq=seq)
        return [emit, *ends] if (ends := self._ends(r, stop, now)) else [emit]

    def preempted(self, sequence: Sequence) -> None:
        self.counters["preempted"] += 1
        r = self._by_seq[sequence.seq]
        self._wait(r, r.node)

    def worker_lost(self, in_step: Collection[int], now: int) -> list[NodeEffect]:
        """The sequences that ran are computed again; what is being fetched stays, for the slab outlives a worker. So
        does what was to be staged, unless its beginning was on the device.

        One that was in the step (`in_step`) both times may be what ends workers, and is ended itself.
        """
        effects: list[NodeEffect] = []
        for r in self.all():
            r.worker_losses += r.seq in in_step
            if r.worker_losses >= WORKER_LOSSES_MAX:
                lost = f"the worker was lost {r.worker_losses} times while computing this request"
                effects += self.end(r, "error", now, code="engine", problem=lost)
                continue
            sequence = self._scheduler.remove(r.seq)
            if sequence is not None or (r.state is State.STAGING and r.have):
                self._pool.drop(sequence.blocks if sequence else r.blocks, Holder.HELD)
                r.blocks, r.local_only = (), True
                self._wait(r, r.node)
        return effects

    def _wait(self, r: Request, node: str) -> None:
        self._enter(r, State.WAITING, node)
        bisect.insort(self._waiting, r, key=lambda w: w.order)

    def _enter(self, r: Request, state: State, node: str) -> None:
        """Change state, keeping count of who fetches from where. `node` is who prefilled, '' for us."""
        if r.state is State.FETCHING:
            self._fetching.less(r.node)
        r.state, r.node = state, node
        if state is State.FETCHING:
            self._fetching.more(node)

    def _count(self, r: Request, now: int, *, own: bool, tokens: int = 1) -> None:
        r.generated += tokens
        r.marks.token(now, own=own, tokens=tokens)

    def _ends(self, r: Request, stop: bool, now: int) -> list[NodeEffect]:
        """Whether the token just taken was the last."""
        if stop:
            return self.end(r, "stop", now)
        if r.generated >= r.sampling.max_tokens or r.prompt_tokens + r.generated >= self._max_model_len:
            return self.end(r, "length", now)
        if r.generated - r.acknowledged > r.credit:
            unread = f"the client left {r.generated - r.acknowledged} tokens unread: its credit is {r.credit}"
            return self.end(r, "error", now, code="slow_client", problem=unread)
        return []

    # ------------------------------------------------------------ out

    def end(
        self, r: Request, reason: str, now: int, *, code: str = "", problem: str = "", retry_after_ms: int = 0
    ) -> list[NodeEffect]:
        """The one end. The caller tells the hand-off (FetchLeft) of a request that was fetching."""
        del self._requests[r.request], self._by_seq[r.seq], self._by_client[r.client]
        self._deadlines.clear(r.request)
        if r.state is State.WAITING:
            self._waiting.remove(r)
        node = r.node
        self._enter(r, State.ENDED, "")
        sequence = self._scheduler.remove(r.seq)
        self._pool.drop(sequence.blocks if sequence else r.blocks, Holder.HELD)
        return [
            EndRequest(
                request=r.request,
                seq=r.seq,
                reason=reason,
                prompt_tokens=r.prompt_tokens,
                cached_tokens=r.cached_tokens,
                completion_tokens=r.generated,
                timeline=r.marks.timeline(now, node=node, attempts=r.attempts),
                code=code,
                problem=problem,
                retry_after_ms=retry_after_ms,
            )
        ]


def _kept(sampling: Sampling, prompt_tokens: int) -> int:
    """Of positions whose logits nobody asked for, the KV is enough. The one before a token tells how likely it was."""
    return prompt_tokens if sampling.prompt_logprobs is None else max(0, sampling.prompt_logprobs_from - 1)
