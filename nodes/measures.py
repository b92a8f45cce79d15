"""What a node measures of reads, leases and requests: counters and histograms with labels, for /metrics.

The shell tells it what was heard and decided. It decides nothing itself and is in nobody's way: whatever goes wrong in
here is counted, logged once, and never raised.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdbus.bus.messages import LeaseReleased, PrefillFailed
from pdbus.connector.attempt import Why
from pdbus.connector.handoff import Cause
from pdbus.connector.ipc import ReadEnded, RowResult

from . import events as ev
from .report import PREFIX, Family, Sample

PEERS_MAX = 64  # with series of their own, the latest; a node that restarts under ever new names must not fill memory
RECENT_READS = 64  # of a peer: what its goodput is taken from

READ_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
POST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
CONFIRM_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 6)  # up to the last repeat
LEASE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # up to a deadline
BYTES = tuple(4**power for power in range(6, 18))  # 4 KiB to 16 GiB
RUNS = tuple(4**power for power in range(9))

# Reasons of refusals and ends as nodes say them. Another may say anything: that is one label for all.
CAUSES = frozenset(
    ("no_room", "draining", "not_ready", "too_long", "conflict", "stale", "invalid", "ended", "unknown", "valid",
     *(why.value for why in Why), *(cause.value for cause in Cause))
)  # fmt: skip
OTHER = "other"

Told = Callable[[Any], None]

log = logging.getLogger("pdbus.metrics")


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """For whatever the data path calls."""

    @functools.wraps(method)
    def wrapped(self: Measures, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception:
            if not self.mistakes:
                log.exception("metrics: %s failed; said once", method.__name__)
            self.mistakes += 1

    return wrapped


class Measures:
    """Of one node, since it started."""

    def __init__(self) -> None:
        self.mistakes = 0
        self._registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self._reads = counter("reads", "Reads that ended, by how.", "peer", "outcome")
        self._posts = counter("read_posts", "Posts that these took.", "peer")
        self._read_s = histogram("read_seconds", "A read, from its first post to its end.", READ_S, "peer")
        self._post_s = histogram("read_post_seconds", "Posting a read, all its posts together.", POST_S, "peer")
        self._bytes = histogram("read_bytes", "What a read brought.", BYTES, "peer")
        self._runs = histogram("read_runs", "Contiguous runs (descriptors) of a read.", RUNS, "peer")
        self._failed = counter("attempts_failed", "Attempts at prefill nodes that failed, by cause.", "cause")
        self._confirms = counter("confirms", "Answers to claims: valid, or why not.", "answer")
        self._nodes_refused = counter("nodes_refused", "Nodes that called and were refused, each reason once.")
        self._agents_refused = counter("agents_refused", "Peers whose memory the mover could not read from.")
        self._placed = counter("prefills_placed", "Prompts that --prefill-policy auto placed, by where.", "where")
        self._opened = counter("circuits_opened", "How often a peer's circuit opened.", "peer")
        self._confirm_s = histogram("confirm_seconds", "From the claim to its answer.", CONFIRM_S)
        self._leases = counter("leases_ended", "Leases that ended, by cause.", "cause")
        self._lease_s = histogram("lease_seconds", "How long a lease was held.", LEASE_S)
        self._refused = counter("prefill_refused", "Prompts of decode nodes that were refused, by cause.", "cause")
        self._ended = counter("requests_ended", "Requests that ended, by reason.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._cached = counter("cached_tokens", "Those of them that the prefix cache here held.")
        self._generated = counter("generation_tokens", "Tokens of answers of requests that ended.")
        self._request_s = histogram("request_seconds", "Arrival to the end.", REQUEST_S)
        self._queue_s = histogram("request_queue_seconds", "Arrival to admission.", REQUEST_S)
        self._prefill_s = histogram("request_prefill_seconds", "Admission to the first token.", REQUEST_S)
        self._first_s = histogram("request_first_token_seconds", "Arrival to the first token.", REQUEST_S)
        self._handover_s = histogram("request_handover_seconds", "Prefill done to the first own token.", REQUEST_S)
        self._drafted = counter("spec_decode_draft_tokens", "Tokens that were drafted.")
        self._accepted = counter("spec_decode_accepted_tokens", "Those of them that were right.")
        self._open_reads: dict[int, str] = {}  # whom from
        self._peers: OrderedDict[str, deque[tuple[int, int]]] = OrderedDict()  # bytes and ns of the latest reads
        self._told: dict[type[Any], Told] = {
            ev.MessageCame: self._message_came,
            ev.PeerAddEnded: self._peer_added,
            ev.MoverLost: lambda _: self._open_reads.clear(),
            ev.StartRead: self._read_started,
            ev.EndRequest: self._request_ended,
            ev.Publish: self._published,
            ev.Send: self._sent,
        }

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, meaning, labels, buckets=buckets, registry=self._registry)

    # ------------------------------------------------------------ told by the shell

    @_harmless
    def turn(self, event: ev.NodeEvent, effects: Sequence[ev.NodeEffect]) -> None:
        """What the core has heard and decided."""
        for said in (event, *effects):
            if (told := self._told.get(type(said))) is not None:
                told(said)

    @_harmless
    def read_ended(self, read: ReadEnded) -> None:
        """What the mover says of a read beyond what concerns the core."""
        peer = self._open_reads.pop(read.read, None)
        if peer is None:
            return
        recent = self._of_peer(peer)
        self._reads.labels(peer, "failed" if read.problem else "done").inc()
        self._posts.labels(peer).inc(read.posts)
        if read.problem:
            return
        recent.append((read.bytes, read.transfer_ns))
        self._read_s.labels(peer).observe(read.transfer_ns / 1e9)
        self._post_s.labels(peer).observe(read.post_ns / 1e9)
        self._bytes.labels(peer).observe(read.bytes)
        self._runs.labels(peer).observe(read.runs)

    @_harmless
    def step_ended(self, rows: Sequence[RowResult]) -> None:
        """What the worker says of a step beyond what concerns the core."""
        self._drafted.inc(sum(row.drafted for row in rows))
        self._accepted.inc(sum(len(row.more) for row in rows))

    def _of_peer(self, peer: str) -> deque[tuple[int, int]]:
        """Its latest reads; the peer that has been silent for longest makes room for one too many."""
        recent = self._peers.setdefault(peer, deque(maxlen=RECENT_READS))
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_MAX:
            gone, _ = self._peers.popitem(last=False)
            for outcome in ("done", "failed"):
                _forget(self._reads, gone, outcome)
            for family in (self._posts, self._read_s, self._post_s, self._bytes, self._runs, self._opened):
                _forget(family, gone)
        return recent

    # ------------------------------------------------------------ of one thing

    def _read_started(self, effect: ev.StartRead) -> None:
        self._open_reads[effect.read] = effect.peer.partition("/")[0]

    def _peer_added(self, event: ev.PeerAddEnded) -> None:
        self._agents_refused.inc(bool(event.problem))

    def _message_came(self, event: ev.MessageCame[Any]) -> None:
        message = event.message
        if isinstance(message, LeaseReleased):
            self._confirms.labels("valid" if message.valid else known(message.cause)).inc()

    def _sent(self, effect: ev.Send[Any]) -> None:
        message = effect.message
        if isinstance(message, PrefillFailed) and message.lease is None:
            self._refused.labels(known(message.cause)).inc()

    def _published(self, effect: ev.Publish) -> None:
        data: Any = effect.data
        match effect.event:
            case "attempt.failed":
                self._failed.labels(known(data["cause"])).inc()
            case "prefill.placed":
                self._placed.labels("remote" if data["node"] else "local").inc()
            case "node.refused":
                self._nodes_refused.inc()
            case "circuit.opened":
                self._of_peer(data["node"])
                self._opened.labels(data["node"]).inc()
            case "lease.ended":
                self._leases.labels(known(data["cause"])).inc()
                self._lease_s.observe(data["held_ns"] / 1e9)

    def _request_ended(self, e: ev.EndRequest) -> None:
        self._ended.labels(e.reason).inc()
        self._prompt.inc(e.prompt_tokens)
        self._cached.inc(e.cached_tokens)
        self._generated.inc(e.completion_tokens)
        t = e.timeline
        self._request_s.observe(t.total_ns / 1e9)
        marked = ((self._queue_s, t.queue_ns), (self._prefill_s, t.prefill_ns), (self._first_s, t.ttft_ns))
        remote = ((self._confirm_s, t.confirm_ns), (self._handover_s, t.handover_ns)) if t.remote else ()
        for histogram, ns in (*marked, *remote):
            if ns:  # it came so far
                histogram.observe(ns / 1e9)

    # ------------------------------------------------------------ asked

    def families(self) -> list[Family]:
        """All of it, as it stands."""
        out = [
            (metric.name, metric.type, metric.documentation, [
                (sample.name.removeprefix(metric.name), dict(sample.labels), sample.value)
                for sample in metric.samples if not sample.name.endswith("_created")
            ])
            for metric in self._registry.collect()
        ]  # fmt: skip
        goodput: list[Sample] = [
            ("", {"peer": peer}, sum(size for size, _ in recent) * 1e9 / ns)
            for peer, recent in self._peers.items()
            if (ns := sum(ns for _, ns in recent))
        ]
        mistakes: list[Sample] = [("_total", {}, self.mistakes)]
        out.append((f"{PREFIX}metrics_mistakes", "counter", "Measurements that failed.", mistakes))
        meaning = f"Bytes a second of the last {RECENT_READS} reads, each from its first post to its end."
        return [*out, (f"{PREFIX}read_goodput_bytes_per_second", "gauge", meaning, goodput)]


def _forget(family: Counter | Histogram, *labels: str) -> None:
    with suppress(KeyError):  # it had none
        family.remove(*labels)


def known(cause: str) -> str:
    """The cause's first words, without what it says of this one case."""
    head = cause.partition(":")[0]
    return head if head in CAUSES else OTHER
