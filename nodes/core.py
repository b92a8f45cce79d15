"""The node's decisions, all behind one door: `NodeCore.handle(event, now) -> effects`.

It composes the machines (membership, both halves of the hand-off, requests, scheduler, block pool) and lets each
hear what concerns it. Whatever happened, it ends by serving those who wait and by planning the next step, so that
no event can leave work lying. The same events at the same times give the same effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pdbus.bus import members as ms
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Heartbeat, Message, PrefillFailed, PrefillRequest
from pdbus.bus.wire import Declared, to_plain
from pdbus.connector import handoff as ho
from pdbus.connector import staging as st
from pdbus.connector.fetch import Fetches
from pdbus.connector.offer import Offers
from pdbus.connector.own_mover import OwnMover, Told
from pdbus.connector.peer_agents import OF_MEMBERSHIP, start_read
from pdbus.connector.pool import BlockPool
from pdbus.connector.timers import earliest

from . import events as ev
from .decode import Request, Requests, Source
from .kv_checks import KvChecks
from .peers import Peers, key_of
from .places import Places
from .prefill import Prefills
from .scheduler import Limits, Scheduler

ATTEMPTS_MAX = 3  # remote ones, each at another prefill node
NOT_READY_RETRY_MS = 1000
OVERLOADED_RETRY_MS = 1000
DRAIN_NS = 120_000_000_000  # then whatever is left ends with cause shutdown


class CoreConfig(Declared):
    name: str
    incarnation: bytes
    decodes: bool
    blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    limits: Limits = Limits()
    prefill_policy: str = "remote"  # placing.POLICIES
    running_max: int = 64
    waiting_max: int = 1024  # requests; one more is answered overloaded
    skip_sampling: bool = False
    handoff: ho.HandoffConfig = ho.HandoffConfig()


class NodeCore:
    """One node. Everything it may do is an effect; everything it knows came in by `handle`."""

    def __init__(self, config: CoreConfig, membership: Membership) -> None:
        self.config = config
        self.worker_up = False
        self.drain_until: int | None = None
        self.pool = BlockPool(config.blocks, config.block_size)
        self.scheduler = Scheduler(self.pool, config.limits)
        self.fetches = Fetches(config.name, config.incarnation, self.pool, config.handoff)
        self.peers = Peers(membership, reads=config.decodes)
        self.mover = OwnMover(self.peers, self.fetches.transfers, config.blocks)
        self.offers = Offers(config.name, config.incarnation, self.mover.epoch, self.pool, config.handoff)
        self.checks = KvChecks()
        self.staging = st.Staging(self.pool)
        self.prefills = Prefills(
            self.offers,
            self.scheduler,
            block_size=config.block_size,
            skip_sampling=config.skip_sampling,
            stage=self._stage if config.handoff.staged else None,
        )
        self.places = Places(
            self.scheduler,
            block_size=config.block_size,
            block_bytes=config.block_bytes,
            chunk_tokens=min(config.limits.prefill_chunk, config.limits.max_batch_tokens),
        )
        self._placed: list[ev.Publish] = []  # said when admission is over
        self.requests = Requests(
            self.pool,
            self.scheduler,
            max_model_len=config.max_model_len,
            running_max=config.running_max,
            choose=self._choose,
        )
        self._seqs = 0
        self._drained = False

    # ------------------------------------------------------------ the door

    def handle(self, event: ev.NodeEvent, now: int) -> list[ev.NodeEffect]:
        out: list[ev.NodeEffect] = []
        _HANDLERS[type(event)](self, event, now, out)
        self._serve(now, out)
        return out

    def next_deadline(self) -> int | None:
        """When to come back with a Tick at the latest."""
        return earliest(
            self.peers.next_deadline(),
            self.offers.next_deadline(),
            self.fetches.next_deadline(),
            self.requests.next_deadline(),
            self.drain_until,
        )

    def _serve(self, now: int, out: list[ev.NodeEffect]) -> None:
        """After anything: admit who waits, plan a step if none is out, say what has become true."""
        if self.peers.drain_asked and self.drain_until is None:
            self._drain(ev.DrainAsked(), now, out)
        self._pass_on(self.mover.look(), now, out)
        fetches = self.requests.admit(now)
        placed, self._placed = self._placed, []
        out += placed
        for fetch in fetches:
            self._fetch(fetch, now, out)
        if self.worker_up and not self.scheduler.busy:
            self._plan(out)
        busy = self.requests.fetching_from().keys() | self.prefills.readers().keys()
        self._pass_on(self.peers.busy_changes(busy), now, out)
        if cache := self.pool.take_events():
            out.append(ev.Publish(topic="kv", event="blocks", data={"events": to_plain(cache)}))
        if self.drain_until is not None and not self._drained and self._idle():
            self._say_goodbye(now, out)

    def _plan(self, out: list[ev.NodeEffect]) -> None:
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self.requests.preempted(sequence)
        if plan.rows:
            out.append(ev.RunStep(step=self.scheduler.step, rows=tuple(plan.rows)))

    def _idle(self) -> bool:
        return not (self.requests or self.offers.held() or self.fetches.transfers or self.staging)

    def _pass_on(self, told: Iterable[Told], now: int, out: list[ev.NodeEffect]) -> None:
        """To whom each of it concerns."""
        for item in told:
            match item:
                case ho.FetchEvent():
                    self._fetch(item, now, out)
                case ho.OfferEvent():
                    out += self.prefills.handle(item, now)
                case ms.MembershipEvent():
                    self._membership(item, now, out)
                case ev.NodeEffect():
                    out.append(item)

    # ------------------------------------------------------------ messages

    def _message(self, event: ev.MessageCame[Message], now: int, out: list[ev.NodeEffect]) -> None:
        message, header = event.message, event.header
        if isinstance(message, Heartbeat) and message.reply:  # what the answer says is true now
            self._membership(self._load(now), now, out)
        if not self._membership(ms.event_of(event.link, header, message), now, out):
            return
        if isinstance(message, PrefillRequest) and (failed := self._unfit(message)):
            out.append(ev.Send(link=event.link, to=header.from_, to_inc=header.from_inc, message=failed))
        elif isinstance(message, PrefillRequest):
            asked = ho.PrefillAsked(link=event.link, message=message, block_hashes=event.block_hashes)
            out += self.prefills.handle(asked, now)
        match ho.said(event.link, header, message):
            case ho.ReaderSaid() as said:
                out += self.prefills.handle(said, now)
            case ho.OwnerSaid() as heard:
                self._fetch(heard, now, out)

    def _unfit(self, message: PrefillRequest) -> PrefillFailed | None:
        """What the engine behind the offers cannot do, now or ever."""
        if message.prompt_tokens > self.config.max_model_len:
            return PrefillFailed(try_=message.try_, cause="too_long")
        if not (self.worker_up and self.mover.up):
            return PrefillFailed(try_=message.try_, cause="not_ready", retry_after_ms=NOT_READY_RETRY_MS)
        return None

    def _membership(self, event: ms.MembershipEvent, now: int, out: list[ev.NodeEffect]) -> bool:
        """Let membership hear it, and the halves of the hand-off its news. False: it was rejected."""
        effects, news, accepted = self.peers.handle(event, now)
        out += effects
        self._pass_on(news, now, out)
        return accepted

    # ------------------------------------------------------------ requests

    def _generate(self, event: ev.GenerateAsked, now: int, out: list[ev.NodeEffect]) -> None:
        """Refused at once: what can never fit, what is one too many, and anything while draining."""
        self._seqs += 1
        request = self.requests.arrive(event, self._seqs, now)
        refusal = self._refusal(request)
        if refusal is not None:
            code, problem = refusal
            retry_ms = OVERLOADED_RETRY_MS if code == "overloaded" else 0
            self._end(request, "error", now, out, code=code, problem=problem, retry_after_ms=retry_ms)
            return
        out.append(_request_event("arrived", event.request, prompt_tokens=event.prompt_tokens))
        out.append(ev.OpenSequence(seq=request.seq, sampling=event.sampling, request=event.request))

    def _refusal(self, r: Request) -> tuple[str, str] | None:
        if self.drain_until is not None:
            return "draining", f"node {self.config.name} is draining: ask another one"
        if self.requests.waiting > self.config.waiting_max:
            return "overloaded", f"{self.config.waiting_max} requests are waiting already"
        most = min(r.prompt_tokens + r.sampling.max_tokens, self.config.max_model_len)
        if -(-most // self.config.block_size) > self.config.blocks:
            return "too_long", (
                f"prompt and answer may take {most} tokens, more than the node's {self.config.blocks} KV blocks of "
                f"{self.config.block_size} hold: ask for fewer tokens, or raise --kv-blocks"
            )
        return None

    def _cancel(self, event: ev.CancelAsked, now: int, out: list[ev.NodeEffect]) -> None:
        request = self.requests.of_client(event.client)
        if request is not None:
            self._end(request, "cancelled", now, out)

    def _client_gone(self, event: ev.ClientGone, now: int, out: list[ev.NodeEffect]) -> None:
        for request in self.requests.of_link(event.link):
            self._end(request, "cancelled", now, out)

    def _credit(self, event: ev.CreditGiven, now: int, out: list[ev.NodeEffect]) -> None:
        self.requests.acknowledged(event.client, event.index)

    def _first_token_taken(self, event: ev.FirstTokenTaken, now: int, out: list[ev.NodeEffect]) -> None:
        self._ended(self.requests.first_token_taken(event.request, event.stop, now), now, out)

    def _end(
        self, r: Request, reason: str, now: int, out: list[ev.NodeEffect], *, code: str = "", problem: str = "",
        retry_after_ms: int = 0,
    ) -> None:  # fmt: skip
        ends = self.requests.end(r, reason, now, code=code, problem=problem, retry_after_ms=retry_after_ms)
        self._ended(ends, now, out)

    def _ended(self, effects: list[ev.NodeEffect], now: int, out: list[ev.NodeEffect]) -> None:
        """Pass on what became of a request; the hand-off hears of its end, wherever it stood."""
        out += effects
        for effect in effects:
            if isinstance(effect, ev.EndRequest):
                self.checks.forget(effect.request)
                self.peers.circuits.undecided(effect.request)
                self._fetch(ho.FetchLeft(request=effect.request), now, out)
                out.append(_request_event("ended", effect.request, reason=effect.reason, code=effect.code))

    # ------------------------------------------------------------ fetching

    def _choose(self, r: Request, cached: int, now: int) -> Source | None:
        """The prefill node for a request's next attempt, or None: computed here."""
        if self.mover.healing or self.config.prefill_policy == "local":
            return None
        if r.attempts >= ATTEMPTS_MAX or (r.attempts and r.deadline_ns - now < self.config.handoff.attempt_ns):
            return None
        if self.config.prefill_policy == "remote":
            return self.peers.next_source(r.request, now, lambda p: self._can_prefill(p, r))
        peers = self.peers.good_sources(now, lambda p: self._can_prefill(p, r))
        if not peers:
            return None
        asked = self.requests.asked_tokens()
        peer, placed = self.places.choose(r, cached, peers, asked, self.requests.running, now)
        self._placed.append(placed)
        return self.peers.ask(r.request, peer) if peer else None

    def _can_prefill(self, p: ms.Peer, r: Request) -> bool:
        longest = p.hello.max_model_len if p.hello else 0
        fits = not longest or r.prompt_tokens <= longest
        return fits and p.name not in r.tried and not self.fetches.peer_blocked(p.name, p.incarnation)

    def _fetch(self, event: ho.FetchEvent, now: int, out: list[ev.NodeEffect]) -> None:
        for effect in self.fetches.handle(event, now):
            self._carry_out(effect, now, out)

    def _carry_out(self, effect: ho.FetchEffect, now: int, out: list[ev.NodeEffect]) -> None:
        match effect:
            case ho.Ask() | ho.Say():
                out.append(ev.Send(link=effect.link, to=effect.to, to_inc=effect.to_inc, message=effect.message))
            case ho.PostRead():
                self._post_read(effect, now, out)
            case ho.CheckKv():
                self._check_kv(effect, out)
            case ho.FirstTokenKnown():
                out += self.requests.first_token_known(effect.request, effect.payload, now)
            case ho.PrefillFinished():
                self.requests.prefill_finished(effect.request, now)
            case ho.ReadsFinished():
                self.requests.claimed(effect.request, now)
            case ho.Fetched():
                self._fetched(effect.request, now, out)
            case ho.AttemptFailed():
                self._attempt_failed(effect, now, out)

    def _fetched(self, request: bytes, now: int, out: list[ev.NodeEffect]) -> None:
        r = self.requests.get(request)
        assert r is not None
        out += self.peers.fetched(request, r.node)
        if (peer := self.peers.get(r.node)) is not None:
            self.places.fetched(key_of(peer), r, now)
        if not self.config.handoff.staged:
            self.requests.fetched(request, now)
            return
        up = self.requests.fetched_into_mirror(request, now)
        out += self._stage(up, now) if self.worker_up else []

    def _post_read(self, read: ho.PostRead, now: int, out: list[ev.NodeEffect]) -> None:
        """Without a mover nobody would ever report it: `mover.look` ends it."""
        self.requests.read_posted(read.request, now)
        if self.mover.up:
            out.append(start_read(read))

    def _check_kv(self, check: ho.CheckKv, out: list[ev.NodeEffect]) -> None:
        request = self.requests.get(check.request)
        asked = self.checks.ask(check, request.node if request else "")
        out += [asked] if self.worker_up else []

    def _kv_checked(self, event: ev.KvChecked, now: int, out: list[ev.NodeEffect]) -> None:
        self._fetch(self.checks.answered(event), now, out)

    def _attempt_failed(self, failed: ho.AttemptFailed, now: int, out: list[ev.NodeEffect]) -> None:
        out += self.peers.attempt_failed(failed, now)
        self.requests.attempt_failed(failed)
        self.checks.forget(failed.request)
        data: dict[str, object] = {"attempt": failed.attempt, "node": failed.node, "cause": failed.cause}
        out.append(_request_event("attempt.failed", failed.request, **data))

    # ------------------------------------------------------------ staging

    def _stage(self, event: st.StagingEvent, now: int) -> list[ev.NodeEffect]:
        out: list[ev.NodeEffect] = []
        for effect in self.staging.handle(event, now):
            match effect:
                case st.StartCopy(copy=copy, way=way, blocks=blocks, request=request):
                    out.append(ev.StartCopy(copy=copy, way=way, blocks=blocks, request=request))
                case st.StagedDown(chunk=chunk):
                    out += self.prefills.handle(chunk, now)
                case st.StagedUp(request=request):
                    self.requests.staged(request)
        return out

    def _copy_ended(self, event: ev.CopyEnded, now: int, out: list[ev.NodeEffect]) -> None:
        out += self._stage(st.CopyEnded(copy=event.copy, bytes=event.bytes, in_step=event.in_step), now)

    # ------------------------------------------------------------ worker

    def _step_ended(self, event: ev.StepEnded, now: int, out: list[ev.NodeEffect]) -> None:
        self.places.step_ended(event, now)
        rows = {row.seq: row for row in event.rows}
        failed = [row.seq for row in event.rows if row.problem]
        several = {row.seq: row.tokens for row in event.rows if row.tokens != 1}
        for p in self.scheduler.end_step(event.step, failed, several):
            row = rows[p.seq]
            if self.prefills.owns(p.seq):
                out += self.prefills.progressed(p, row, now)
            elif row.problem:
                request = self.requests.of_seq(p.seq)
                assert request is not None
                self._end(request, "error", now, out, code=row.code, problem=row.problem)
            elif p.sampled:
                self._ended(self.requests.sampled(p.seq, row.stop, now, p.sampled), now, out)
        out += self.prefills.step_ended(now)

    def _worker_came(self, event: ev.WorkerUp, now: int, out: list[ev.NodeEffect]) -> None:
        """A new worker knows no sequence: it is told of every request's, and to copy up what waits in the mirror."""
        self.worker_up = True
        for up in self.requests.staging():
            out += self._stage(up, now)
        self._pass_on(self.mover.announce(), now, out)
        out += [ev.OpenSequence(seq=r.seq, sampling=r.sampling, request=r.request) for r in self.requests.all()]
        out += self.checks.all()

    def _worker_lost(self, event: ev.WorkerLost, now: int, out: list[ev.NodeEffect]) -> None:
        """Its step counts for nothing. Leases end before anything else; what ran here is computed again."""
        self.worker_up = False
        in_step = self.scheduler.abandon_step()
        out += self._stage(st.CopierGone(), now)
        self._pass_on([self.mover.next_epoch(pool_reset=True)], now, out)
        self.pool.reset()
        if self.config.handoff.staged:
            self._fetch(ho.PrefixesLost(), now, out)
        out += self.prefills.step_ended(now)
        self._ended(self.requests.worker_lost(in_step, now), now, out)
        out.append(ev.RestartWorker())
        self._pass_on(self.mover.restart(), now, out)

    # ------------------------------------------------------------ mover

    def _mover_came(self, event: ev.MoverUp, now: int, out: list[ev.NodeEffect]) -> None:
        """Its agents are announced once there is a worker that can compute what peers ask for."""
        self._pass_on(self.mover.came(event.agents, self.offers.held(), announce=self.worker_up), now, out)

    def _mover_lost(self, event: ev.MoverLost, now: int, out: list[ev.NodeEffect]) -> None:
        self._pass_on(self.mover.lost(asked=event.asked), now, out)

    def _peer_added(self, event: ev.PeerAddEnded, now: int, out: list[ev.NodeEffect]) -> None:
        self.peers.added(event.peer, event.problem, now)

    def _read_ended(self, event: ev.ReadEnded, now: int, out: list[ev.NodeEffect]) -> None:
        if (transfer := self.fetches.transfers.get(event.read)) is not None:
            self.requests.read_ended(transfer.request, transfer.attempt, event.bytes, event.transfer_ns, now)
            self._read_measured(transfer.request, event, now)
        if event.problem:
            self._fetch(ho.ReadFailed(read=event.read, problem=event.problem), now, out)
        else:
            self._fetch(ho.ReadDone(read=event.read), now, out)

    def _read_measured(self, request: bytes, event: ev.ReadEnded, now: int) -> None:
        r = self.requests.get(request)
        peer = self.peers.get(r.node) if r is not None else None
        if peer is not None and not event.problem:
            self.places.read_ended(key_of(peer), event.bytes, event.transfer_ns, now)

    def _read_doubtful(self, event: ev.ReadDoubtful, now: int, out: list[ev.NodeEffect]) -> None:
        self._fetch(ho.ReadOverdue(read=event.read, problem=event.problem), now, out)

    # ------------------------------------------------------------ links, time, the end

    def _of_membership(self, event: ev.NodeEvent, now: int, out: list[ev.NodeEffect]) -> None:
        """What membership alone decides about."""
        self._membership(_OF_MEMBERSHIP[type(event)](event), now, out)

    def _drain(self, event: ev.DrainAsked, now: int, out: list[ev.NodeEffect]) -> None:
        """Nothing new is taken in; what is under way goes on, at most DRAIN_NS."""
        if self.drain_until is not None:
            return
        self.drain_until = now + DRAIN_NS
        self._membership(ms.DrainStarted(), now, out)
        out += self.prefills.handle(ho.DrainBegan(), now)

    def _leave(self, event: ev.LeaveAsked, now: int, out: list[ev.NodeEffect]) -> None:
        """End now: every request and lease hears of it, and peers are told goodbye."""
        self.drain_until = now
        for request in self.requests.all():
            self._end(request, "error", now, out, code="shutdown", problem=f"node {self.config.name} is shutting down")
        out += self.prefills.handle(ho.ShutdownBegan(), now)
        if not self._drained:
            self._say_goodbye(now, out)

    def _say_goodbye(self, now: int, out: list[ev.NodeEffect]) -> None:
        self._drained = True
        self._membership(ms.Leaving(reason="shutdown"), now, out)
        out.append(ev.Drained())

    def _tick(self, event: ev.Tick, now: int, out: list[ev.NodeEffect]) -> None:
        self._membership(self._load(now), now, out)
        self._membership(ms.Tick(), now, out)
        out += self.peers.tick(now)
        out += self.prefills.handle(ho.OfferTick(), now)
        self._fetch(ho.FetchTick(), now, out)
        while (request := self.requests.overdue(now)) is not None:
            problem = f"not finished within its deadline (state: {request.state.value})"
            self._end(request, "error", now, out, code="deadline", problem=problem)
        if self.drain_until is not None and self.drain_until <= now and not self._drained:
            self._leave(ev.LeaveAsked(), now, out)

    def _load(self, now: int) -> ms.OwnLoadChanged:
        tokens_per_s, step_us = self.places.steps.said(now)
        return ms.OwnLoadChanged(
            waiting_prefill_tokens=self.scheduler.waiting_tokens(),
            running=len(self.requests) - self.requests.waiting,
            free_blocks=self.pool.available(),
            prefill_tokens_per_s=tokens_per_s,
            prefill_step_us=step_us,
        )


def _request_event(event: str, request: bytes, **data: object) -> ev.Publish:
    return ev.Publish(topic="request", event=event, data={"request": request.hex(), **data})


_OF_MEMBERSHIP: dict[type[ev.NodeEvent], Callable[[Any], ms.MembershipEvent]] = {
    **OF_MEMBERSHIP,
    ev.RemoveAsked: lambda e: ms.RemoveAsked(target=e.target),
}

_Handler = Callable[[NodeCore, Any, int, list[ev.NodeEffect]], None]

_HANDLERS: dict[type[ev.NodeEvent], _Handler] = {
    ev.MessageCame: NodeCore._message,
    ev.GenerateAsked: NodeCore._generate,
    ev.CancelAsked: NodeCore._cancel,
    ev.ClientGone: NodeCore._client_gone,
    ev.CreditGiven: NodeCore._credit,
    ev.FirstTokenTaken: NodeCore._first_token_taken,
    ev.StepEnded: NodeCore._step_ended,
    ev.WorkerUp: NodeCore._worker_came,
    ev.WorkerLost: NodeCore._worker_lost,
    ev.MoverUp: NodeCore._mover_came,
    ev.MoverLost: NodeCore._mover_lost,
    ev.PeerAddEnded: NodeCore._peer_added,
    ev.ReadEnded: NodeCore._read_ended,
    ev.ReadDoubtful: NodeCore._read_doubtful,
    ev.KvChecked: NodeCore._kv_checked,
    ev.CopyEnded: NodeCore._copy_ended,
    ev.LinkOpened: NodeCore._of_membership,
    ev.LinkFailed: NodeCore._of_membership,
    ev.LinkLost: NodeCore._of_membership,
    ev.JoinAsked: NodeCore._of_membership,
    ev.RemoveAsked: NodeCore._of_membership,
    ev.WatchChanged: NodeCore._of_membership,
    ev.DrainAsked: NodeCore._drain,
    ev.LeaveAsked: NodeCore._leave,
    ev.Tick: NodeCore._tick,
}
