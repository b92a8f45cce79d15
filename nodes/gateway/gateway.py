"""What the gateway is behind its HTTP app: a whole cluster that answers like one node."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError
from pdbus.bus.generation import Prompt
from pdbus.bus.messages import Outcome, Sampling
from pdbus.bus.station import Station
from pdbus.nodes.tokenizer import Tokenizer
from pdbus.nodes.tokenizer_files import fetch_tokenizer
from pdbus.nodes.tracing import Tracer, Value, parse

from .answering import Routed
from .choices import Chose
from .fleet import Fleet
from .fleet_node import FleetNode
from .flights import Flight, Flights
from .prefixes import Prefixes, Read
from .routing import KNOWS_PREFIXES, Ask, choose
from .waiting import Waiting

QUEUE = 256  # requests that wait for room; one more is told when to come back
ALONE_S = 5.0  # without a node that can be asked, before those that wait for room hear of it: one may just be slow


class Gateway:
    """Implements nodes/http/upstream.py over the nodes that `joins`, bus addresses, lead to. Within `async with`."""

    def __init__(
        self, station: Station, joins: Sequence[str], *, policy: str, queue: int = QUEUE, tracer: Tracer | None = None
    ) -> None:
        self.policy = policy
        self._tracer = tracer
        self.counters: Counter[str] = Counter()
        self.waiting = Waiting(queue)
        self.flights = Flights()
        self.fleet = Fleet(station, joins, on_look=self._looked, on_gone=self._gone, on_lost=self._lost)
        self._watchers: list[Callable[[FleetNode], None]] = []
        self._station = station
        self.prefixes = Prefixes() if policy in KNOWS_PREFIXES else None
        if self.prefixes is not None:
            self.looked_by(self.prefixes.looked)

    async def __aenter__(self) -> Gateway:
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.prefixes is not None:
            self.prefixes.close()
        await self.fleet.__aexit__()

    def generate(
        self, prompt: Prompt, *, model: str, sampling: Sampling, deadline_ms: int, stream: bool, traceparent: str
    ) -> Routed:
        self.counters["requests"] += 1
        return Routed(
            self,
            self.counters["requests"],
            prompt,
            model=model,
            sampling=sampling,
            deadline_ms=deadline_ms,
            stream=stream,
            traceparent=traceparent,
        )

    async def read(self, prompt: Prompt) -> Read:
        """The prompt's tokens, where the policy asks for them."""
        return await self.prefixes.read(prompt) if self.prefixes is not None else Read()

    def choose(self, request: Routed, read: Read, nodes: Sequence[FleetNode]) -> tuple[FleetNode, int]:
        """One of these for the request's next try, and how many tokens of the prompt are not cached there. It is
        recorded with what it was chosen from."""
        request.attempt += 1
        self.counters["choices"] += 1
        ask = Ask(turn=self.counters["choices"], prompt_tokens=read.length)
        matched = self.prefixes.matched(read, nodes) if self.prefixes is not None else [0] * len(nodes)
        views = tuple(node.view(tokens) for node, tokens in zip(nodes, matched, strict=True))
        choice = choose(self.policy, ask, views)
        self._station.note(
            Chose(
                client_id=self._station.next_id,
                number=request.number,
                attempt=request.attempt,
                policy=self.policy,
                ask=ask,
                nodes=views,
                choice=choice,
            )
        )
        place = next(i for i, node in enumerate(nodes) if node.name == choice.node)
        return nodes[place], read.length - matched[place]

    def ended(self, request: Routed, flight: Flight, how: str) -> None:
        """A request is over; its ways to nodes are told as spans, where traces are made."""
        self.flights.ends(flight, how, self.now_ns())
        above = parse(request.traceparent) if self._tracer is not None else None
        if self._tracer is None or above is None:
            return
        for attempt, (begin_ns, end_ns, node) in enumerate(flight.waits(), 1):
            said: dict[str, Value] = {"pdbus.policy": self.policy, "pdbus.attempt": attempt, "pdbus.node": node}
            self._tracer.over(above.child(), "route", begin_ns, end_ns, said, problem="" if node else "no node")

    @property
    def name(self) -> str:
        return self._station.name

    @staticmethod
    def now_ns() -> int:
        """What `flights` counts in."""
        return time.monotonic_ns()

    def looked_by(self, watcher: Callable[[FleetNode], None]) -> None:
        """Call it after every look at a node that can be asked."""
        self._watchers.append(watcher)

    def _gone(self, node: FleetNode) -> None:
        if self.prefixes is not None:
            self.prefixes.gone(node)

    def _lost(self, node: FleetNode) -> None:
        self.flights.failed(node.why, self.now_ns(), node=node.name)
        if len(self.waiting) and not self.fleet.ready():
            asyncio.get_running_loop().call_later(ALONE_S, self._alone)

    def _alone(self) -> None:
        """Who waits for room would wait until its deadline, and all who come later behind it."""
        while len(self.waiting) and not self.fleet.ready():
            self.waiting.room()

    def _looked(self, node: FleetNode) -> None:
        self.waiting.room()
        for watcher in self._watchers:
            watcher(node)

    # ------------------------------------------------------------ what it says of itself

    async def status(self) -> dict[str, Any]:
        """Like a node's; `nodes` are those that it knows."""
        ready = self.fleet.ready()
        lengths = [node.longest for node in ready]
        return {
            "name": self._station.name,
            "incarnation": self._station.incarnation.hex(),
            "role": "gateway",
            "policy": self.policy,
            "model": self.fleet.model,
            "max_model_len": max(lengths, default=0),
            "ready": bool(ready),
            "not_ready": [] if ready else [str(self.fleet.none_ready())],
            "nodes": [{**_row(node), **self._cached(node)} for node in self.fleet.nodes.values()],
            "peers": _prefill_peers(self.fleet.decode()),
            "metrics": self._metrics(len(ready)),
        }

    async def tokenizer(self) -> Tokenizer:
        """Of any node that can be asked: all serve one model."""
        nodes = self.fleet.ready()
        if not nodes:
            raise self.fleet.none_ready()
        return await fetch_tokenizer(nodes[0].client)

    def _cached(self, node: FleetNode) -> dict[str, int]:
        """How many blocks in its cache are known here."""
        return {"cached_blocks": len(self.prefixes.index(node))} if self.prefixes is not None else {}

    def _metrics(self, ready: int) -> dict[str, float]:
        return {
            "gateway_nodes": len(self.fleet.decode()),
            "gateway_nodes_ready": ready,
            "gateway_requests_waiting": len(self.waiting),
            "gateway_requests_total": self.counters["requests"],
            "gateway_choices_total": self.counters["choices"],
            "gateway_retries_total": self.counters["retries"],
        }

    # ------------------------------------------------------------ prefill nodes

    async def connect(self, addresses: Sequence[str]) -> tuple[Outcome, ...]:
        """Every decode node that can be asked joins these."""
        return await self._all(addresses, lambda client, address: client.connect([address]))

    async def disconnect(self, targets: Sequence[str]) -> tuple[Outcome, ...]:
        """Every decode node that can be asked removes these."""
        return await self._all(targets, lambda client, target: client.disconnect([target]))

    async def _all(
        self, targets: Sequence[str], ask: Callable[[Client, str], Awaitable[tuple[Outcome, ...]]]
    ) -> tuple[Outcome, ...]:
        nodes = self.fleet.ready()
        if not nodes:
            raise self.fleet.none_ready()
        return tuple([_together(target, [await _told(node, target, ask) for node in nodes]) for target in targets])


async def _told(node: FleetNode, target: str, ask: Callable[[Client, str], Awaitable[tuple[Outcome, ...]]]) -> Outcome:
    try:
        return (await ask(node.client, target))[0]
    except PdError as e:
        return Outcome(target=target, ok=False, detail=f"{node.name}: {e}")


def _together(target: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Good when all are; else the first that is not."""
    bad = next((outcome for outcome in outcomes if not outcome.ok), None)
    return bad or Outcome(target=target, ok=True, detail=outcomes[0].detail)


def _row(node: FleetNode) -> dict[str, Any]:
    view = node.view()
    return {
        "name": node.name,
        "address": node.address,
        "role": node.role,
        "ready": node.ready,
        "detail": "" if node.ready else node.why,
        "running": view.running,
        "queued": view.queued,
        "queued_tokens": view.queued_tokens,
        "free_blocks": view.free_blocks,
    }


def _prefill_peers(nodes: Sequence[FleetNode]) -> list[dict[str, Any]]:
    """The peers of all decode nodes, each once, as the node sees it that is worst off with it."""
    peers: dict[tuple[Any, Any], dict[str, Any]] = {}
    for peer in (peer for node in nodes for peer in node.status.get("peers", ())):
        node_at = peer.get("name"), peer.get("address")  # two may have one name
        if node_at not in peers or (peers[node_at].get("state") == "up" and peer.get("state") != "up"):
            peers[node_at] = peer
    return list(peers.values())
