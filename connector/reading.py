"""One read of a peer's KV into ours while it is carried out: what is posted, what waits to be, what lies in scratch.

A read is cut into stretches of blocks, whose runs are made when their turn comes, and these into slices, each fit for
one post. What goes through scratch is cut into detours of a few blocks: each takes a part of scratch, is read there in
slices, permuted into its blocks when the last of these is terminal, and gives its part back. Used by `Mover`, which
posts.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from .agent import Agent
from .apply import Pairing, Runs, batches, direct_runs, permute, scratch_runs
from .plan import RankPlan, TransferPlan
from .runs import slices
from .scratch import Scratch

SLICE_RUNS_MAX = 1_000  # posting costs 7 to 12 us a scattered descriptor
SLICE_BYTES_MAX = 32 << 20  # a post may copy at once, and holds the thread: 6 ms at 5 GB/s; half of it costs up to 10 %
SLICES_POSTED_MAX = 4  # of one read: keeps the line full, and leaves room for the others
RUNS_AT_ONCE_MAX = 16_384  # made in one go: some ms
PEER_BYTES_MAX = 128 << 20  # posted to one peer: two reads at their fullest; more would only wait at the other end
DETOUR_BYTES_MAX = 4 << 20  # permuting so much holds the thread for some ms
DETOURS = 8  # find room in scratch side by side, if their blocks are small enough
PEER_DETOURS = 2  # of them, those of one peer: one that answers no more must not keep scratch from the others


class RemoteAgent:
    """One loaded agent of a peer. `open_handles` counts what was posted to it and is not terminal."""

    def __init__(self, rank: int, name: str, remote: Any) -> None:
        self.rank = rank
        self.name = name
        self.remote = remote
        self.open_handles = 0


class Peer:
    """A peer's life and epoch: how to read from it, and those of its ranks' agents that we read from."""

    def __init__(self, name: str, plan: TransferPlan) -> None:
        self.name = name
        self.plan = plan
        self.agents: dict[int, RemoteAgent] = {}
        self.warming: dict[int, None] = {}  # ranks whose first small read has not been answered
        self.posted_bytes = 0
        self.detours = 0
        self.leaving = False


class Stretch(NamedTuple):
    """Blocks whose direct runs are not made yet."""

    rank: RankPlan
    pairing: Pairing


class Detour:
    """A few blocks' way through scratch. `left` counts its slices that are not terminal."""

    def __init__(self, rank: RankPlan, pairing: Pairing, size: int) -> None:
        self.rank = rank
        self.pairing = pairing
        self.size = size
        self.at = 0
        self.left = 0


class Slice(NamedTuple):
    """What one post reads."""

    agent: RemoteAgent
    runs: Runs
    size: int  # bytes
    detour: Detour | None = None


class Posted(NamedTuple):
    handle: Any
    slice: Slice


class OpenRead:
    """A read that is not terminal. `problem` is '' as long as nothing of it has failed."""

    def __init__(self, read: int, peer: Peer, pairing: Pairing, scratch: Scratch) -> None:
        self.read = read
        self.peer = peer
        self.posted: list[Posted] = []
        self.started_ns = 0  # first post
        self.ended_ns = 0  # last terminal status
        self.handles = 0  # how many slices got as far as a handle
        self.runs = 0  # in these
        self.post_ns = 0  # spent in posting them
        self.size_bytes = 0  # what has been read
        self.problem = ""
        self.doubted = False
        self._scratch = scratch
        self._ready: deque[Slice] = deque()
        self._stretches: deque[Stretch] = deque()
        self._detours: deque[Detour] = deque()
        for rank in peer.plan.ranks:
            if runs := sum(box.runs for box in rank.pieces[0].direct):
                at_once = max(1, RUNS_AT_ONCE_MAX // (runs * len(rank.pieces)))
                self._stretches += [Stretch(rank, some) for some in batches(pairing, at_once)]
            if rank.reads:
                at_once = max(1, min(DETOUR_BYTES_MAX, scratch.size // DETOURS) // rank.scratch_bytes)
                self._detours += [self._detour(rank, some) for some in batches(pairing, at_once)]

    def _add(self, runs: Runs, rank: RankPlan, detour: Detour | None = None) -> None:
        pieces = slices(runs, SLICE_RUNS_MAX, SLICE_BYTES_MAX)
        self._ready += [Slice(self.peer.agents[rank.rank], piece, piece.bytes, detour) for piece in pieces]
        if detour:
            detour.left = len(pieces)

    def _detour(self, rank: RankPlan, pairing: Pairing) -> Detour:
        return Detour(rank, pairing, rank.scratch_bytes * pairing.source_blocks)

    # ------------------------------------------------------------ posting

    @property
    def may_post(self) -> bool:
        if len(self.posted) >= SLICES_POSTED_MAX:
            return False
        if self._ready:
            return not self.peer.posted_bytes or self.peer.posted_bytes + self._ready[0].size <= PEER_BYTES_MAX
        if self._stretches:
            return self.peer.posted_bytes < PEER_BYTES_MAX
        return bool(self._detours) and self._may_detour(self._detours[0])

    def _may_detour(self, detour: Detour) -> bool:
        return self.peer.detours < PEER_DETOURS and self._scratch.has_room(detour.size)

    def post(self, agent: Agent) -> Posted:
        """The next slice as a handle that has not been posted yet. Only when `may_post`. Raises ReadFailed."""
        if not self._ready and self._stretches:
            rank, pairing = self._stretches.popleft()
            self._add(direct_runs(rank, pairing), rank)
        elif not self._ready:
            self._begin(self._detours.popleft())
        next_ = self._ready.popleft()
        try:
            posted = Posted(agent.make_read(next_.agent.remote, next_.runs), next_)
        except Exception:
            self._over(next_)
            raise
        self.handles += 1
        self.runs += len(next_.runs.length)
        self.posted.append(posted)
        self.peer.posted_bytes += next_.size
        next_.agent.open_handles += 1
        return posted

    def _begin(self, detour: Detour) -> None:
        at = self._scratch.take(detour.size)
        assert at is not None, "may_post has seen room"
        detour.at = at
        self.peer.detours += 1
        runs = scratch_runs(detour.rank, detour.pairing)
        self._add(runs._replace(target=runs.target + at), detour.rank, detour)

    # ------------------------------------------------------------ ending

    def terminal(self, posted: Posted, memory: memoryview) -> None:
        """Nothing more comes of this post. `memory` is our whole region, scratch included."""
        self.posted.remove(posted)
        done = posted.slice
        self.peer.posted_bytes -= done.size
        done.agent.open_handles -= 1
        self.size_bytes += done.size
        if done.detour and done.detour.left == 1 and not self.problem:
            there = memory[done.detour.at : done.detour.at + done.detour.size]
            permute(self.peer.plan, done.detour.rank, done.detour.pairing, there, memory)
        self._over(done)

    def fail(self, problem: str) -> None:
        """The first problem counts. Nothing more is posted; what is posted stays until it is terminal."""
        self.problem = self.problem or problem
        self._stretches.clear()
        self._detours.clear()
        while self._ready:
            self._over(self._ready.popleft())

    def _over(self, done: Slice) -> None:
        """With its last slice a detour gives back its part of scratch."""
        if done.detour is None:
            return
        done.detour.left -= 1
        if not done.detour.left:
            self._scratch.give_back(done.detour.at, done.detour.size)
            self.peer.detours -= 1

    @property
    def ended(self) -> bool:
        return not (self._ready or self._stretches or self._detours or self.posted)
