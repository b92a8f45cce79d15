"""Model nodes around the real machines: the least that a prefill and a decode node need besides them.

Memory is abstract: the content of a block says which lease's prefill wrote which block of the prompt, so that bytes
of another lease, or of nobody, are seen wherever they end up. A block that is free may be overwritten by others at
any time, so its content counts as lost at once. Blocks are one token long and every chunk is one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from pdbus.bus.messages import LeaseId, Message, PrefillRequest, Sampling, TryId
from pdbus.connector.fetch import Fetches
from pdbus.connector.handoff import (
    Answer,
    Ask,
    AttemptFailed,
    ChunkComputed,
    EpochBegan,
    FetchAsked,
    Fetched,
    FetchEvent,
    FetchLeft,
    FetchTick,
    FirstTokenKnown,
    HandoffConfig,
    Holder,
    LeaseBegan,
    LeaseEnded,
    MoverReaped,
    OfferEvent,
    OfferTick,
    OwnerEpoch,
    OwnerGone,
    OwnerSaid,
    PostRead,
    PrefillAsked,
    PrefillBroke,
    ReadDone,
    ReaderGone,
    ReaderSaid,
    ReadFailed,
    Say,
    StartPrefill,
    StopPrefill,
    WritesEnded,
)
from pdbus.connector.offer import Offers
from pdbus.connector.pool import BlockPool
from pdbus.connector.timers import Timers
from pdbus.nodes.replay.explore.search import Violation

CONFIG = HandoffConfig()
REQUEST = b"request"
PAST = -1  # every event happens at time 0; a timer that is to fire is moved before it

Content = tuple[Any, ...] | None  # (lease, attempt, position), or None for garbage


class Hello(NamedTuple):
    """The proof that an earlier incarnation of the sender is over."""


class NewEpoch(NamedTuple):
    """The agent message of a new epoch."""

    epoch: int


class Packet(NamedTuple):
    """A message on its way."""

    to: str
    to_inc: bytes
    from_: str
    from_inc: bytes
    message: Any

    def __str__(self) -> str:
        kind = getattr(self.message, "KIND", type(self.message).__name__)
        return f"{kind} {self.from_}/{self.from_inc.decode()} -> {self.to}/{self.to_inc.decode()}"


class Read(NamedTuple):
    """An open read: posted, then sampled at the owner, then landed here. `content` is what was sampled."""

    read: int
    owner: str
    incarnation: bytes
    epoch: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    content: tuple[Content, ...] | None = None


class Outputs(NamedTuple):
    packets: tuple[Packet, ...]
    reads: tuple[Read, ...]


@dataclass
class Prompt:
    """A prefill in the model engine: blocks computed so far, and whether a step of it runs."""

    start: StartPrefill
    lease: LeaseId
    computed: int
    stepping: bool = False
    stopped: bool = False


@dataclass
class PrefillNode:
    """Offers over a pool, an engine that computes one block a step, and the blocks' contents."""

    name: str
    incarnation: bytes
    blocks: int
    epoch: int = 1
    prompts: dict[TryId, Prompt] = field(default_factory=dict)
    open_leases: dict[TryId, LeaseId] = field(default_factory=dict)
    memory: dict[int, Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, block_size=1)
        self.offers = Offers(self.name, self.incarnation, self.epoch, self.pool, CONFIG)

    # what can happen

    def deliver(self, packet: Packet) -> Outputs:
        message = packet.message
        if isinstance(message, Hello):
            return self._run(ReaderGone(node=packet.from_, incarnation=_previous(packet.from_inc)))
        if isinstance(message, PrefillRequest):
            return self._run(PrefillAsked(link="", message=message, block_hashes=(), to_inc=packet.to_inc))
        return self._run(
            ReaderSaid(
                link="", node=packet.from_, incarnation=packet.from_inc, to_inc=packet.to_inc, message=packet.message
            )
        )

    def step(self, try_: TryId) -> Outputs:
        """A step that computes one block is queued."""
        prompt = self.prompts[try_]
        prompt.stepping = True
        self.pool.hold((prompt.start.blocks[prompt.computed],), Holder.IN_STEP)
        return Outputs((), ())

    def stepped(self, try_: TryId) -> Outputs:
        """The step has written its block."""
        prompt = self.prompts[try_]
        block = prompt.start.blocks[prompt.computed]
        if not self.pool.holders(block).get(Holder.IN_STEP):
            raise Violation(f"a step wrote block {block} after it was given away")
        self.memory[block] = (prompt.lease, try_.attempt, prompt.computed)
        self.pool.drop((block,), Holder.IN_STEP)
        prompt.stepping = False
        prompt.computed += 1
        if prompt.stopped:
            del self.prompts[try_]
            return self._run(WritesEnded(try_=try_))
        last = prompt.computed == prompt.start.prompt_tokens
        if last:
            del self.prompts[try_]
        token = f"token of {prompt.lease}".encode() if last else None
        return self._run(ChunkComputed(try_=try_, ready=prompt.computed, last=last, first_token=token))

    def broke(self, try_: TryId) -> Outputs:
        return self._run(PrefillBroke(try_=try_, problem="model"))

    def worker_restarted(self) -> Outputs:
        """The worker's memory is worth nothing, and no step of the old one writes any more."""
        for prompt in self.prompts.values():
            if prompt.stepping:
                self.pool.drop((prompt.start.blocks[prompt.computed],), Holder.IN_STEP)
        self.prompts.clear()
        self.memory.clear()
        return self._new_epoch(pool_reset=True)

    def mover_restarted(self) -> Outputs:
        return self._new_epoch(pool_reset=False)

    def _new_epoch(self, pool_reset: bool) -> Outputs:
        self.epoch += 1
        outputs = self._run(EpochBegan(epoch=self.epoch, pool_reset=pool_reset))
        if pool_reset:
            self.pool.reset()
        agent = Packet("d", b"", self.name, self.incarnation, NewEpoch(self.epoch))
        return Outputs((*outputs.packets, agent), ())

    def timers(self) -> dict[tuple[str, Any], int]:
        return {("ledger", key): at for key, at in deadlines(self.offers._ledger._timers).items()}

    def fire(self, timer: tuple[str, Any]) -> Outputs:
        self.offers._ledger._timers.set(timer[1], PAST)
        return self._run(OfferTick())

    def work(self) -> list[tuple[Any, ...]]:
        """What the engine can do next."""
        return [("stepped" if prompt.stepping else "step", try_) for try_, prompt in self.prompts.items()]

    def failures(self) -> list[tuple[Any, ...]]:
        return [("broke", try_) for try_ in self.prompts]

    def quarantined(self) -> list[int]:
        return []

    def clean(self) -> bool:
        left = self.offers.rows() or self.offers.held() or self.open_leases or self.prompts
        return not left and self.pool.counts().free == self.blocks

    # how effects are carried out

    def _run(self, event: OfferEvent) -> Outputs:
        packets: list[Packet] = []
        events = [event]
        while events:
            for effect in self.offers.handle(events.pop(0), 0):
                match effect:
                    case Answer():
                        packets.append(Packet(effect.to, effect.to_inc, self.name, self.incarnation, effect.message))
                    case StartPrefill():
                        lease = self.open_leases[effect.try_]
                        self.prompts[effect.try_] = Prompt(effect, lease, effect.cached_tokens)
                    case StopPrefill():
                        events += self._stop(effect.try_)
                    case LeaseBegan():
                        if effect.try_ in self.open_leases:
                            raise Violation("a try has two leases")
                        self.open_leases[effect.try_] = effect.lease
                    case LeaseEnded():
                        if self.open_leases.pop(effect.try_, None) != effect.lease:
                            raise Violation("a lease was released twice")
        self.pool.check()
        self.memory = {block: content for block, content in self.memory.items() if self.pool.holders(block)}
        return Outputs(tuple(packets), ())

    def _stop(self, try_: TryId) -> list[OfferEvent]:
        prompt = self.prompts.get(try_)
        if prompt is None:
            return []
        if prompt.stepping:
            prompt.stopped = True
            return []
        del self.prompts[try_]
        return [WritesEnded(try_=try_)]


@dataclass
class DecodeNode:
    """Fetches over a pool, one request's life, and the blocks' contents."""

    incarnation: bytes
    blocks: int
    prompt_blocks: int
    attempts_max: int
    owners: dict[str, tuple[bytes, int]]  # prefill nodes: current incarnation and epoch, as far as heard
    have: int = 0
    name: str = "d"
    attempt: int = 0
    held: tuple[int, ...] = ()
    outcome: str = ""
    first_tokens: int = 0
    memory: dict[int, Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks, block_size=1)
        self.fetches = Fetches(self.name, self.incarnation, self.pool, CONFIG)

    # what can happen

    def start(self) -> Outputs:
        return self._run([self._next_attempt()])

    def cancel(self) -> Outputs:
        """By the client, or the first token ended the request."""
        outputs = self._run([FetchLeft(request=REQUEST)])
        self._end("cancelled")
        return outputs

    def deliver(self, packet: Packet) -> Outputs:
        message, node, incarnation = packet.message, packet.from_, packet.from_inc
        if isinstance(message, Hello):
            self.owners[node] = (incarnation, 1)
            return self._run([OwnerGone(node=node, incarnation=_previous(incarnation), proven=True)])
        if isinstance(message, NewEpoch):
            if self.owners[node][0] == incarnation:
                self.owners[node] = (incarnation, max(message.epoch, self.owners[node][1]))
            return self._run([OwnerEpoch(node=node, incarnation=incarnation, epoch=message.epoch)])
        return self._run([OwnerSaid(link="", node=node, incarnation=incarnation, message=message)])

    def land(self, read: Read) -> Outputs:
        """The bytes arrive, all of them, and the mover says so."""
        assert read.content is not None
        self._write(read, read.content)
        return self._run([ReadDone(read=read.read)])

    def fail(self, read: Read) -> Outputs:
        """Some bytes arrive; then it is certain that no more will."""
        self._write(read, (None,) * len(read.target))
        return self._run([ReadFailed(read=read.read, problem="remote disconnect")])

    def mover_restarted(self) -> Outputs:
        return self._run([MoverReaped()])

    def owner_silent(self, owner: str) -> Outputs:
        return self._run([OwnerGone(node=owner, incarnation=self.owners[owner][0], proven=False)])

    def timers(self) -> dict[tuple[str, Any], int]:
        found: dict[tuple[str, Any], int] = {}
        for name, timers in self._all_timers().items():
            found |= {(name, key): at for key, at in deadlines(timers).items()}
        return found

    def fire(self, timer: tuple[str, Any]) -> Outputs:
        self._all_timers()[timer[0]].set(timer[1], PAST)
        return self._run([FetchTick()])

    def work(self) -> list[tuple[Any, ...]]:
        return []

    def failures(self) -> list[tuple[Any, ...]]:
        return []

    def quarantined(self) -> list[int]:
        """Open reads that nobody waits for."""
        rows = self.fetches.transfers.rows()
        return [row["read"] for row in rows if row["state"] == "quarantined"]

    def clean(self) -> bool:
        left = self.fetches.rows() or self.fetches.transfers.rows()
        return bool(self.outcome) and not left and self.pool.counts().free == self.blocks

    # how effects are carried out

    def _run(self, events: list[FetchEvent | None]) -> Outputs:
        packets: list[Packet] = []
        reads: list[Read] = []
        while events:
            event = events.pop(0)
            if event is None:
                continue
            for effect in self.fetches.handle(event, 0):
                match effect:
                    case Ask() | Say():
                        message: Message = effect.message
                        packets.append(Packet(effect.to, effect.to_inc, self.name, self.incarnation, message))
                    case PostRead(node=node, incarnation=inc, epoch=epoch, source=source, target=target):
                        reads.append(Read(effect.read, node, inc, epoch, source, target))
                    case FirstTokenKnown():
                        self.first_tokens += 1
                        if self.first_tokens > 1:
                            raise Violation("a second first token was sent")
                    case AttemptFailed():
                        events.append(self._failed(effect))
                    case Fetched():
                        self._check_bytes(effect.attempt)
                        self._end("ok")
        self.pool.check()
        self.memory = {block: self.memory[block] for block in self.held}  # what others hold is garbage to us
        return Outputs(tuple(packets), tuple(reads))

    def _next_attempt(self) -> FetchAsked | None:
        if self.attempt == self.attempts_max:
            self._end("local")
            return None
        taken = self.pool.take(self.prompt_blocks, Holder.HELD)
        if taken is None:
            self._end("local")
            return None
        self.held = taken
        self.attempt += 1
        for position, block in enumerate(taken):
            self.memory[block] = ("have", position) if position < self.have else None
        names = list(self.owners)
        node = names[(self.attempt - 1) % len(names)]
        incarnation, epoch = self.owners[node]
        return FetchAsked(
            request=REQUEST,
            attempt=self.attempt,
            node=node,
            incarnation=incarnation,
            epoch=epoch,
            link="",
            source_size=1,
            prompt_tokens=self.prompt_blocks,
            have=self.have,
            prompt_digest=b"digest",
            sampling=Sampling(),
            blocks=taken,
            deadline_ns=300_000_000_000,
        )

    def _failed(self, failed: AttemptFailed) -> FetchEvent | None:
        if failed.attempt != self.attempt or self.outcome:
            raise Violation("an attempt failed that is over")
        if failed.cause == "deadline":
            self._end("deadline")
            return FetchLeft(request=REQUEST)
        self.pool.drop(self.held, Holder.HELD)
        self.held = ()
        after = self._next_attempt()
        return after if after is not None else FetchLeft(request=REQUEST)

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise Violation(f"ended as {outcome} after {self.outcome}")
        self.outcome = outcome
        self.pool.drop(self.held, Holder.HELD)
        self.held = ()

    def _check_bytes(self, attempt: int) -> None:
        contents = [self.memory[block] for block in self.held]
        leases = {content[0] for content in contents[self.have :] if content}
        for position, content in enumerate(contents):
            if position < self.have:
                right = content == ("have", position)
            else:
                right = content is not None and content[1:] == (attempt, position) and len(leases) == 1
            if not right:
                raise Violation(f"valid with wrong bytes at position {position}: {content}")

    def _write(self, read: Read, contents: tuple[Content, ...]) -> None:
        for block, content in zip(read.target, contents, strict=True):
            if not self.pool.holders(block).get(Holder.IN_FLIGHT):
                raise Violation(f"a read wrote block {block} after it was given away")
            if block in self.held:
                self.memory[block] = content

    def _all_timers(self) -> dict[str, Timers[Any]]:
        fetches = self.fetches
        return {
            "attempt": fetches._clocks,
            "renew": fetches._renewals,
            "cancel": fetches._cancel_clocks,
            "read": fetches.transfers._deadlines,
        }


Node = PrefillNode | DecodeNode


UNIMPORTANT = ("counters", "_config", "_owner", "_events")  # of what a node's future does not depend on


def canonical(value: Any) -> Any:
    """A hashable key, equal for nodes that will behave alike."""
    if value is None or isinstance(value, (int, str, bytes, Enum)):
        return value
    if isinstance(value, Timers):
        return frozenset(deadlines(value).items())
    if isinstance(value, BlockPool):
        return tuple(tuple(counts) for counts in value._held.values()), tuple(value._hash), tuple(value._cached)
    if isinstance(value, (tuple, list)):
        return tuple(canonical(item) for item in value)
    if isinstance(value, dict):
        return frozenset((key, canonical(item)) for key, item in value.items())
    if hasattr(value, "__dict__"):
        named = value.__dict__
    elif is_dataclass(value):
        named = {f.name: getattr(value, f.name) for f in fields(value)}
    else:
        return value  # declared, so frozen
    return tuple((name, canonical(item)) for name, item in named.items() if name not in UNIMPORTANT)


def deadlines(timers: Timers[Any]) -> dict[Any, int]:
    return {key: at for key, (at, _) in timers._at.items()}


def _previous(incarnation: bytes) -> bytes:
    """Incarnations of the model are named 1, 2, 3."""
    return str(int(incarnation) - 1).encode()
