"""What the workers or movers of several ranks say, joined into what one would say. Pure; for one rank it changes
nothing.

| heard of ranks                       | said                                                                          |
|--------------------------------------|-------------------------------------------------------------------------------|
| ready, step done, copied, peer added | once, when the last rank has said it; the first problem counts                |
| alive                                | once, when the last rank has said it                                          |
| a part of a read ended               | once the last part has: the read ended, with the first problem and all bytes  |
| the first part failed, others open   | at once: the read is doubtful. So the request hears of it, and hears it once, |
|                                      | while its blocks stay as they are until the last part may write no more       |
| failed                               | at once                                                                       |

What is sampled is what the ranks of the last stage sample: the others' steps end without a token.

Digests of KV (nodes/digests.py) are joined by exclusive or, as they are made: each rank's are of its own heads. Of
ranks with copies of one head the first counts, and a copy that differs from it makes the joined digest a wrong one.
Those of stages, which are of some layers each, are put together block by block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from pdbus.bus.wire import Declared, replace

from .attempt import DIGEST_BYTES
from .ipc import (
    Copied,
    FromMover,
    FromWorker,
    KvDigested,
    MoverAlive,
    MoverFailed,
    MoverReady,
    PeerAdded,
    PeerRemove,
    ReadDoubtful,
    ReadEnded,
    RowResult,
    StepDone,
    WorkerAlive,
    WorkerFailed,
    WorkerReady,
)

T = TypeVar("T")


class MoversReady(Declared):
    """The movers of all ranks, in order."""

    ranks: tuple[MoverReady, ...]


class Gather(Generic[T]):
    """The answers of all ranks to one question each, by the question's key."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._heard: dict[Hashable, dict[int, T]] = {}

    def hear(self, key: Hashable, rank: int, answer: T) -> tuple[T, ...]:
        """All answers in order of rank with the last of them, () before."""
        heard = self._heard.setdefault(key, {})
        heard[rank] = answer
        if len(heard) < self._ranks:
            return ()
        del self._heard[key]
        return tuple(heard[r] for r in range(self._ranks))

    def forget(self, key: Hashable) -> None:
        self._heard.pop(key, None)


class WorkerJoin:
    """Of one life of all workers: another life needs another join. `copies` ranks of a stage hold each KV head;
    `stages` are the stages' numbers of layers, in order of rank."""

    def __init__(self, ranks: int, copies: int = 1, stages: Sequence[int] = (1,)) -> None:
        self._ranks = ranks
        self._copies = copies
        self._stages = stages
        self._each = ranks // len(stages)  # ranks of a stage
        self._digested: Gather[KvDigested] = Gather(ranks)
        self._ready: Gather[WorkerReady] = Gather(ranks)
        self._steps: Gather[StepDone] = Gather(ranks)
        self._copied: Gather[Copied] = Gather(ranks)
        self._alive: Gather[WorkerAlive] = Gather(ranks)

    def tell(self, message: Declared) -> None:
        pass

    def hear(self, rank: int, message: FromWorker) -> list[FromWorker]:
        match message:
            case WorkerReady():
                ready = self._ready.hear("", rank, message)
                return [replace(ready[0], load_ns=max(r.load_ns for r in ready))] if ready else []
            case StepDone(step=step):
                done = self._steps.hear(step, rank, message)
                return [self._step(done)] if done else []
            case KvDigested(check=check):
                digested = self._digested.hear(check, rank, message)
                return [KvDigested(check=check, digests=self._digested_by_all(digested))] if digested else []
            case Copied(copy=copy):
                copied = self._copied.hear(copy, rank, message)
                return [self._copy(copied)] if copied else []
            case WorkerAlive(probe=probe):
                return list(self._alive.hear(probe, rank, message)[:1])
            case WorkerFailed(problem=problem) if self._ranks > 1:
                return [replace(message, problem=f"rank {rank}: {problem}")]
        return [message]

    def _step(self, done: tuple[StepDone, ...]) -> StepDone:
        """What the first rank of the last stage sampled; the others of that stage must have sampled the same, and all
        must have found no wrong KV."""
        rows = tuple(self._row(rows) for rows in zip(*(d.rows for d in done), strict=True))
        return StepDone(step=done[0].step, rows=rows, compute_ns=max(d.compute_ns for d in done))

    def _digested_by_all(self, digested: Sequence[KvDigested]) -> bytes:
        each = [d.digests for d in digested]
        differ = [_xor([each[r], each[r - r % self._copies]]) for r in range(len(each)) if r % self._copies]
        return _xor([self._digests(digested), *differ])

    def _digests(self, ranks: Sequence[KvDigested | RowResult]) -> bytes:
        each = [r.digests for r in ranks]
        stages = [each[first : first + self._each] for first in range(0, self._ranks, self._each)]
        return _beside([_xor(stage[:: self._copies]) for stage in stages], self._stages)

    def _copy(self, copied: tuple[Copied, ...]) -> Copied:
        return replace(
            copied[0],
            bytes=sum(c.bytes for c in copied),
            copy_ns=max(c.copy_ns for c in copied),
            in_step=all(c.in_step for c in copied),
        )

    def _row(self, rows: tuple[RowResult, ...]) -> RowResult:
        if len(rows) == 1:
            return rows[0]
        lead = self._ranks - self._each
        first = rows[lead]
        for rank, row in enumerate(rows):
            if row.wrong_kv:
                return replace(first, wrong_kv=f"rank {rank}: {row.wrong_kv}")
            if row.problem:
                return row
            if rank < lead:
                continue
            if row.token != first.token or [m.token for m in row.more] != [m.token for m in first.more]:
                said = f"rank {rank} sampled token {row.token}, rank {lead} token {first.token}"
                return replace(first, wrong_kv=said)
        return replace(first, digests=self._digests(rows))


def _xor(digests: Sequence[bytes]) -> bytes:
    """Of equal lengths."""
    joined = 0
    for some in digests:
        joined ^= int.from_bytes(some, "little")
    return joined.to_bytes(len(digests[0]) if digests else 0, "little")


def _beside(stages: Sequence[bytes], layers: Sequence[int]) -> bytes:
    """The digests of each block's layers, stage after stage. Of equal numbers of blocks."""
    if len(stages) == 1:
        return stages[0]
    sizes = [count * DIGEST_BYTES for count in layers]
    blocks = range(len(stages[0]) // sizes[0])
    return b"".join(made[n * size : (n + 1) * size] for n in blocks for made, size in zip(stages, sizes, strict=True))


class MoverJoin:
    """Of one life of all movers: another life needs another join."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ready: Gather[MoverReady] = Gather(ranks)
        self._peers: Gather[PeerAdded] = Gather(ranks)
        self._reads: Gather[ReadEnded] = Gather(ranks)
        self._alive: Gather[MoverAlive] = Gather(ranks)
        self._doubted: dict[int, None] = {}  # reads that were said to be doubtful

    def hear(self, rank: int, message: FromMover) -> list[FromMover | MoversReady]:
        match message:
            case MoverReady():
                ready = self._ready.hear("", rank, message)
                return [MoversReady(ranks=ready)] if ready else []
            case PeerAdded(peer=peer):
                added = self._peers.hear(peer, rank, message)
                return [next((a for a in added if a.problem), added[0])] if added else []
            case ReadEnded():
                return self._read_ended(rank, message)
            case ReadDoubtful():
                return self._doubtful(message)
            case MoverAlive(probe=probe):
                return list(self._alive.hear(probe, rank, message)[:1])
            case MoverFailed(problem=problem) if self._ranks > 1:
                return [replace(message, problem=f"rank {rank}: {problem}")]
        return [message]

    def tell(self, message: Declared) -> None:
        """What some ranks have said of a peer counts no more once all are told to remove it."""
        if isinstance(message, PeerRemove):
            self._peers.forget(message.peer)

    def _read_ended(self, rank: int, message: ReadEnded) -> list[FromMover | MoversReady]:
        parts = self._reads.hear(message.read, rank, message)
        if not parts:
            failed = message.problem and ReadDoubtful(read=message.read, problem=message.problem)
            return self._doubtful(failed) if failed else []
        self._doubted.pop(message.read, None)
        return [
            ReadEnded(
                read=message.read,
                problem=next((part.problem for part in parts if part.problem), ""),
                posted=any(part.posted for part in parts),
                bytes=sum(part.bytes for part in parts),
                transfer_ns=max(part.transfer_ns for part in parts),
                posts=sum(part.posts for part in parts),
                runs=sum(part.runs for part in parts),
                post_ns=max(part.post_ns for part in parts),
            )
        ]

    def _doubtful(self, message: ReadDoubtful) -> list[FromMover | MoversReady]:
        if message.read in self._doubted:
            return []
        self._doubted[message.read] = None
        return [message]
