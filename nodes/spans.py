"""What a node tells of requests as spans, when they are over: of its own what it decoded, of others' what it prefilled.

generate              D: from arrival to the end, under whatever the client said
  queue               until it was admitted
  load                until the KV cache was there: read from a prefill node, or computed here
    offer             P: while the lease was held
      prefill         P: while the prompt was computed
  decode              from then on
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pdbus.bus.messages import PrefillDone, PrefillFailed, Timeline, TryId

from . import events as ev
from .tracing import Context, Tracer, Value

ASKED_MAX = 4096  # tries with a trace whose lease has not ended; as many as there can be leases
PROVIDER = "pdbus"


class NodeSpans:
    """Of one node."""

    def __init__(self, tracer: Tracer, name: str, model: str) -> None:
        self._tracer = tracer
        self._node: dict[str, Value] = {"pdbus.node": name}
        self._model = model
        self._own: dict[bytes, tuple[Context, Context]] = {}  # by request: generate, load
        self._asked: OrderedDict[tuple[str, int], Context] = OrderedDict()  # by request and attempt: offer
        self._prefills: dict[tuple[str, int], tuple[int, int]] = {}  # when it was done, how long it took

    def close(self) -> None:
        self._tracer.close()

    # ------------------------------------------------------------ D

    def began(self, request: bytes, traceparent: str) -> str:
        """A request of a client's. Returns what prefill nodes are told."""
        generate = self._tracer.begin(traceparent, "generate")
        load = generate.child()
        self._own[request] = generate, load
        return load.traceparent

    def _ended(self, e: ev.EndRequest) -> None:
        own = self._own.pop(e.request, None)
        if own is None:
            return
        (generate, load), t, now = own, e.timeline, time.monotonic_ns()
        problem = e.problem or e.reason if e.reason in ("error", "cancelled") else ""
        arrived = now - t.total_ns
        for name, begin_ns, end_ns in phases(t):
            context = load if name == "load" else generate.child()
            attributes = {**self._node, **(_load(t) if name == "load" else {})}
            self._tracer.over(context, name, arrived + begin_ns, arrived + end_ns, attributes)
        self._tracer.over(generate, "generate", arrived, now, self._request(e), serves=True, problem=problem)

    def _request(self, e: ev.EndRequest) -> dict[str, Value]:
        first_s = {"gen_ai.response.time_to_first_chunk": e.timeline.ttft_ns / 1e9} if e.timeline.ttft_ns else {}
        return {
            **self._node,
            **first_s,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": (e.reason,),
            "gen_ai.response.id": e.request.hex(),
            "gen_ai.usage.input_tokens": e.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": e.cached_tokens,
            "gen_ai.usage.output_tokens": e.completion_tokens,
        }

    # ------------------------------------------------------------ P

    def asked(self, try_: TryId, traceparent: str) -> None:
        """A prefill.request came with a trace, perhaps again."""
        key = try_.request.hex(), try_.attempt
        if key in self._asked:
            return
        self._asked[key] = self._tracer.begin(traceparent, "offer")
        if len(self._asked) > ASKED_MAX:  # a try that is asked again when all is over has no end
            gone, _ = self._asked.popitem(last=False)
            self._prefills.pop(gone, None)

    def decided(self, effects: Sequence[ev.NodeEffect]) -> None:
        """What has become of requests and tries."""
        for effect in effects:
            match effect:
                case ev.EndRequest():
                    self._ended(effect)
                case ev.Send(message=PrefillDone(try_=try_, prefill_ns=prefill_ns)):
                    key = try_.request.hex(), try_.attempt
                    if key in self._asked:
                        self._prefills[key] = time.monotonic_ns(), prefill_ns
                case ev.Send(message=PrefillFailed(try_=try_, lease=None)):
                    self._asked.pop((try_.request.hex(), try_.attempt), None)
                case ev.Publish(event="lease.ended", data=data):
                    self._lease_ended(data)

    def _lease_ended(self, data: dict[str, Any]) -> None:
        key = data["request"], data["attempt"]
        offer, prefill = self._asked.pop(key, None), self._prefills.pop(key, None)
        if offer is None:
            return
        now = time.monotonic_ns()
        ids: dict[str, Value] = {"gen_ai.response.id": key[0], "pdbus.attempt": key[1]}
        attributes = {**self._node, **ids, "pdbus.decode_node": data["decode_node"], "pdbus.cause": data["cause"]}
        problem = "" if data["cause"] == "done" else data["cause"]
        self._tracer.over(offer, "offer", now - data["held_ns"], now, attributes, problem=problem)
        if prefill is not None:
            done_ns, took_ns = prefill
            self._tracer.over(offer.child(), "prefill", done_ns - took_ns, done_ns, {**self._node, **ids})


def phases(t: Timeline) -> list[tuple[str, int, int]]:
    """Those that it came to, each with when it began and ended, in ns from the arrival."""
    if not t.ttft_ns:
        if not t.attempts:
            return [("queue", 0, t.total_ns)]
        return [("queue", 0, t.queue_ns), ("load", t.queue_ns, t.total_ns)]
    loaded_ns = t.ttft_ns
    if t.remote and t.handover_ns:  # reads may go on behind the first token
        loaded_ns = min(t.total_ns, max(t.ttft_ns, t.ttft_ns + t.handover_ns - t.first_step_ns))
    return [("queue", 0, t.queue_ns), ("load", t.queue_ns, loaded_ns), ("decode", loaded_ns, t.total_ns)]


def _load(t: Timeline) -> dict[str, Value]:
    if not t.attempts:
        return {"pdbus.remote": False}
    return {
        "pdbus.remote": t.remote,
        "pdbus.prefill_node": t.prefill_node,
        "pdbus.attempts": t.attempts,
        "pdbus.read.bytes": t.read_bytes,
        "pdbus.read.seconds": t.read_ns / 1e9,
        "pdbus.confirm.seconds": t.confirm_ns / 1e9,
    }
