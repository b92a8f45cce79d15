"""Where prompts are computed, as the node's policy has it: measurements in, a place with its scores out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdbus.bus import members as ms
from pdbus.bus.messages import Heartbeat
from pdbus.bus.wire import Declared, to_plain

from .decode import Request
from .events import Publish, StepEnded
from .peers import key_of
from .placing import Here, Placed, There, place
from .rates import StepRates
from .scheduler import Scheduler
from .sources import Sources

UNKNOWN = Heartbeat()


class Places:
    """One node's. What it measures it keeps whatever the policy: heartbeats tell others of it."""

    def __init__(self, scheduler: Scheduler, *, block_size: int, block_bytes: int, chunk_tokens: int) -> None:
        self.steps = StepRates()
        self.sources = Sources()
        self._scheduler = scheduler
        self._block_size = block_size
        self._token_bytes = block_bytes / block_size
        self._chunk_tokens = chunk_tokens

    # ------------------------------------------------------------ measured

    def step_ended(self, event: StepEnded, now: int) -> None:
        """Must come before the scheduler hears of it."""
        if event.step != self._scheduler.step or not self._scheduler.busy:
            return
        prompt_tokens, decodes = self._scheduler.work()
        steps = max((row.tokens for row in event.rows), default=1)
        self.steps.stepped(prompt_tokens, decodes, steps, event.compute_ns, now)

    def read_ended(self, key: str, size: int, transfer_ns: int, now: int) -> None:
        if size and transfer_ns:
            self.sources.of(key).read.add(transfer_ns, size, now)

    def fetched(self, key: str, r: Request, now: int) -> None:
        facts = self.sources.of(key)
        facts.computed(r.block_hashes)
        if r.marks.claimed:
            facts.round.add(now - r.marks.claimed, 1, now)

    # ------------------------------------------------------------ chosen

    def choose(
        self, r: Request, cached: int, peers: Sequence[ms.Peer], asked: Mapping[str, int], running: int, now: int
    ) -> tuple[ms.Peer | None, Publish]:
        """The prefill node for a request of which `cached` tokens are here, or None for this node; and the record of
        it. `asked`: by node, tokens of prompts that this node waits for there."""
        token_ns, chunk_ns = self.steps.prompt_ns(now)
        here = Here(
            missing_tokens=max(1, r.prompt_tokens - cached),
            queued_tokens=self._scheduler.waiting_tokens(before=r.order),
            running=running,
            token_ns=token_ns,
            chunk_ns=chunk_ns,
            step_ns=self.steps.decode_ns(now),
            chunk_tokens=self._chunk_tokens,
        )
        there = tuple(self._there(r, peer, asked.get(peer.name, 0), now) for peer in peers)
        placed = place(here, there)
        chosen = next((peer for peer in peers if peer.name == placed.node), None)
        return chosen, _placed(r, here, there, placed)

    def _there(self, r: Request, peer: ms.Peer, asked: int, now: int) -> There:
        facts, load = self.sources.of(key_of(peer)), peer.load or UNKNOWN
        cached = facts.match(r.block_hashes) * self._block_size
        rate, age_s = max(0, load.prefill_tokens_per_s), (now - peer.load_ns) / 1e9
        return There(
            node=peer.name,
            missing_tokens=max(1, r.prompt_tokens - cached),
            queued_tokens=max(asked, load.waiting_prefill_tokens - int(rate * age_s)),
            token_ns=1e9 / rate if rate else 0.0,
            chunk_ns=1e3 * max(0, load.prefill_step_us),
            read_ns=facts.read.per(now) * self._token_bytes,
            round_ns=facts.round.per(now),
        )


def _placed(r: Request, here: Here, there: Sequence[There], placed: Placed) -> Publish:
    data: dict[str, object] = {
        "request": r.request.hex(),
        "node": placed.node,
        "here": _scored(here, placed.here_ns),
        "there": [_scored(node, ns) for node, ns in zip(there, placed.there_ns, strict=True)],
    }
    return Publish(topic="request", event="prefill.placed", data=data)


def _scored(facts: Declared, estimate_ns: int) -> dict[str, object]:
    return {**to_plain(facts), "estimate_ns": estimate_ns}
