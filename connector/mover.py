"""The mover: reads, as told; reports back; polls the transport. One process per rank, beside the worker.

It is a process of its own because over TCP a reader that dies can end the owner of the memory with it. `Mover` is the
whole of it but for the process: messages in (`handle`), one round of work (`turn`), messages out. It knows nothing
of requests or leases, and decides nothing but in what order to post and how often to poll.

A read is cut into slices, each one post and one handle. Reads take turns, a slice each; a read has ended when all its
posted slices are terminal. After a failed slice nothing more of that read is posted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pdbus.bus import wire
from pdbus.bus.errors import Broken, Closed, LocalProtocolError, PdError, RemoteProtocolError

from .agent import Agent, ReadDoubtful, ReadFailed
from .channel import ChildChannel
from .ipc import (
    Advertise,
    FromMover,
    MoverAlive,
    MoverArgs,
    MoverFailed,
    MoverReady,
    PeerAdd,
    PeerAdded,
    PeerRemove,
    ProbeMover,
    Read,
    ReadEnded,
    ReadRuns,
    StopMover,
    ToMover,
)
from .ipc import ReadDoubtful as ReadDoubtfulMessage
from .pace import MS, Pace
from .process import keep_what_is_loaded

SLICE_BLOCKS_MAX = 1_000  # posting costs 7 to 12 us a scattered descriptor
SLICE_BYTES_MAX = 16 << 20  # a post may copy at once, and holds the thread: 4 ms at 4 GB/s; half of it costs 5 %
SLICES_POSTED_MAX = 4  # of one read: keeps the line full, and leaves room for the others
TURN_POST_NS = 2 * MS  # how long one round goes on posting
WARM_UP_NS = 1_000 * MS  # after this a peer counts as added, warm or not
BLOCKED_POLL_MS = 250  # the longest sleep: signals and the death of control are noticed this late at worst


class Peer:
    """A loaded agent. `blocks` is 0 when only runs are read from it. `open_handles` counts posted handles to it; a
    leaving peer is forgotten when none is left."""

    def __init__(self, added: PeerAdd, remote: Any) -> None:
        self.name = added.peer
        self.agent_name = added.agent_name
        self.region_bytes = added.region_bytes
        self.blocks = added.region_bytes // added.block_bytes if added.block_bytes else 0
        self.remote = remote
        self.open_handles = 0
        self.leaving = False


class OpenRead:
    """A read that is not terminal. `make` makes a handle of a slice; `problem` is '' as long as none has failed."""

    def __init__(self, read: int, peer: Peer, make: Callable[..., Any], slices: deque[Any], size_bytes: int) -> None:
        self.read = read
        self.peer = peer
        self.make = make
        self.slices = slices
        self.size_bytes = size_bytes
        self.posted: list[Any] = []
        self.started_ns = 0  # first post
        self.ended_ns = 0  # last terminal status
        self.handles = 0  # how many slices got as far as a handle
        self.problem = ""
        self.doubted = False

    @property
    def may_post(self) -> bool:
        return bool(self.slices) and len(self.posted) < SLICES_POSTED_MAX

    @property
    def ended(self) -> bool:
        return not self.slices and not self.posted


class WarmUp:
    """A peer's first small read. `answered` once PeerAdded was said; the handle may live on."""

    def __init__(self, peer: Peer, handle: Any, until_ns: int) -> None:
        self.peer = peer
        self.handle = handle
        self.until_ns = until_ns
        self.answered = False


class Mover:
    def __init__(
        self, agent: Agent, region_bytes: int, block_bytes: int, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._agent = agent
        self._block_bytes = block_bytes
        self._region_bytes = region_bytes
        self._blocks = region_bytes // block_bytes
        self._clock_ns = clock_ns
        self._peers: dict[str, Peer] = {}
        self._leaving: dict[str, Peer] = {}  # by agent name: removed, but with reads under way
        self._warm_ups: list[WarmUp] = []
        self._reads: dict[int, OpenRead] = {}
        self._order: deque[OpenRead] = deque()  # the open reads, whose turn it is to post first
        self._out: list[FromMover] = []
        self._leases = 0
        self._stop_ns: int | None = None
        self._pump_ns = 0
        self._pace = Pace()

    # ------------------------------------------------------------ messages

    def handle(self, message: ToMover) -> None:
        """Take one message. Raises LocalProtocolError for a read number that is still open."""
        match message:
            case Read() | ReadRuns():
                self._read(message)
            case PeerAdd():
                self._peer_add(message)
            case PeerRemove():
                self._peer_remove(message.peer)
            case Advertise():
                self._leases = message.leases
            case ProbeMover():
                self._out.append(MoverAlive(probe=message.probe, reads=len(self._reads)))
            case StopMover() if self._stop_ns is None:
                self._stop_ns = self._clock_ns() + message.wait_ms * MS

    def _peer_add(self, message: PeerAdd) -> None:
        try:
            self._check_peer(message)
            remote = self._agent.add_peer(
                message.agent_name, message.metadata, message.base_address, message.region_bytes
            )
        except PdError as e:
            self._out.append(PeerAdded(peer=message.peer, problem=str(e)))
            return
        self._peers[message.peer] = peer = Peer(message, remote)
        self._pace.courted(self._clock_ns())
        self._warm_up(peer)

    def _check_peer(self, message: PeerAdd) -> None:
        if message.peer in self._peers:
            raise LocalProtocolError(f"peer {message.peer} has been added already")
        if any(message.agent_name == peer.agent_name for peer in self._peers.values()):
            raise LocalProtocolError(f"agent {message.agent_name} is loaded for another peer already")
        if message.agent_name in self._leaving:  # forgetting it later would take the status of new reads with it
            raise LocalProtocolError(f"agent {message.agent_name} is still left by reads under way")
        if message.block_bytes not in (0, self._block_bytes):
            raise RemoteProtocolError(f"block_bytes: theirs {message.block_bytes}, ours {self._block_bytes}")
        if message.region_bytes < max(1, message.block_bytes):
            raise RemoteProtocolError(f"region_bytes: {message.region_bytes} do not hold one block")

    def _warm_up(self, peer: Peer) -> None:
        try:
            warm_up = WarmUp(peer, self._agent.make_warm_up(peer.remote), self._clock_ns() + WARM_UP_NS)
        except ReadFailed as e:
            self._refuse_peer(peer, str(e))
            return
        peer.open_handles += 1
        self._warm_ups.append(warm_up)
        self._judge_warm_up(warm_up, self._agent.post)

    def _refuse_peer(self, peer: Peer, problem: str) -> None:
        self._out.append(PeerAdded(peer=peer.name, problem=problem))
        self._peer_remove(peer.name)

    def _peer_remove(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer:
            peer.leaving = True
            self._leaving[peer.agent_name] = peer
            self._forget_if_free(peer)

    def _forget_if_free(self, peer: Peer) -> None:
        if peer.leaving and not peer.open_handles and not any(r.peer is peer for r in self._order):
            self._leaving.pop(peer.agent_name, None)
            with contextlib.suppress(Broken):  # it is gone either way
                self._agent.remove_peer(peer.remote)

    def _read(self, message: Read | ReadRuns) -> None:
        if message.read in self._reads:
            raise LocalProtocolError(f"read {message.read} is still open")
        try:
            read = self._opened(message)
        except (ReadFailed, RemoteProtocolError) as e:
            self._out.append(ReadEnded(read=message.read, problem=str(e), posted=False))
            return
        self._reads[message.read] = read
        self._order.append(read)

    def _opened(self, message: Read | ReadRuns) -> OpenRead:
        """Raises ReadFailed or RemoteProtocolError for what cannot be read."""
        if (peer := self._peers.get(message.peer)) is None:
            raise ReadFailed(f"no peer {message.peer}")
        if self._stop_ns is not None:
            raise ReadFailed("the mover is stopping")
        if isinstance(message, ReadRuns):
            return self._opened_runs(message, peer)
        source, target = wire.unpack_u32(message.source), wire.unpack_u32(message.target)
        if problem := self._refusal(peer, source, target):
            raise ReadFailed(problem)
        pieces, size_bytes = slices(source, target, self._block_bytes), len(source) * self._block_bytes
        return OpenRead(message.read, peer, self._agent.make_read, pieces, size_bytes)

    def _opened_runs(self, message: ReadRuns, peer: Peer) -> OpenRead:
        from . import runs  # numpy is not part of the base install

        asked = runs.unpack(message.source, message.target, message.length)
        if problem := runs.refusal(asked, peer.region_bytes, self._region_bytes):
            raise ReadFailed(problem)
        pieces = runs.slices(asked, SLICE_BLOCKS_MAX, SLICE_BYTES_MAX)
        return OpenRead(message.read, peer, self._agent.make_read_runs, pieces, asked.bytes)

    def _refusal(self, peer: Peer, source: Any, target: Any) -> str:
        """Why these blocks cannot be read, or ''. NIXL itself guards nothing inside a region."""
        if len(source) != len(target) or not source:
            return f"{len(source)} source blocks for {len(target)} target blocks"
        if max(source) >= peer.blocks:
            return f"source block {max(source)}, but the peer has {peer.blocks}"
        if max(target) >= self._blocks:
            return f"target block {max(target)}, but there are {self._blocks}"
        if len(set(target)) != len(target):
            return "a target block is named twice"
        return ""

    # ------------------------------------------------------------ work

    def turn(self) -> list[FromMover]:
        """One round: pump, post what may be posted, ask after what was. What there is to say."""
        before = self._clock_ns()
        self._agent.pump()
        self._pump_ns = self._clock_ns() - before
        self._post_slices()
        for read in list(self._reads.values()):
            self._check_read(read)
        for warm_up in list(self._warm_ups):
            self._check_warm_up(warm_up)
        said, self._out = self._out, []
        return said

    def _post_slices(self) -> None:
        """A slice of each read in turn, until all have enough posted or the round's time is over."""
        began = self._clock_ns()
        while (read := self._next_to_post()) and self._clock_ns() - began < TURN_POST_NS:
            self._order.rotate(-1)
            self._post_slice(read)

    def _next_to_post(self) -> OpenRead | None:
        """The first read in order that has something to post and room for it; it comes to the front."""
        for _ in range(len(self._order)):
            if self._order[0].may_post:
                return self._order[0]
            self._order.rotate(-1)
        return None

    def _post_slice(self, read: OpenRead) -> None:
        try:
            handle = read.make(read.peer.remote, *read.slices.popleft())
        except ReadFailed as e:
            self._fail(read, str(e))
            return
        read.started_ns = read.started_ns or self._clock_ns()
        read.handles += 1
        read.posted.append(handle)
        read.peer.open_handles += 1
        self._judge_slice(read, handle, self._agent.post)

    def _check_read(self, read: OpenRead) -> None:
        for handle in list(read.posted):
            self._judge_slice(read, handle, self._agent.check)
        if read.ended:
            self._end_read(read)

    def _judge_slice(self, read: OpenRead, handle: Any, ask: Callable[[Any], bool]) -> None:
        try:
            terminal = ask(handle)
        except ReadFailed as e:
            self._fail(read, str(e))
            terminal = True
        except ReadDoubtful as e:
            terminal = False
            if not read.doubted:
                read.doubted = True
                self._out.append(ReadDoubtfulMessage(read=read.read, problem=str(e)))
        if terminal:
            read.ended_ns = self._clock_ns()
            read.posted.remove(handle)
            self._release(read.peer, handle)
            self._pace.progressed(self._clock_ns())

    def _fail(self, read: OpenRead, problem: str) -> None:
        read.problem = read.problem or problem
        read.slices.clear()

    def _end_read(self, read: OpenRead) -> None:
        del self._reads[read.read]
        self._order.remove(read)
        self._forget_if_free(read.peer)
        self._out.append(
            ReadEnded(
                read=read.read,
                problem=read.problem,
                posted=read.handles > 0,
                bytes=0 if read.problem else read.size_bytes,
                transfer_ns=read.ended_ns - read.started_ns,
            )
        )

    def _release(self, peer: Peer, handle: Any) -> None:
        with contextlib.suppress(Broken):  # a leaked handle of a finished read harms nobody
            self._agent.release(handle)
        peer.open_handles -= 1
        self._forget_if_free(peer)

    def _check_warm_up(self, warm_up: WarmUp) -> None:
        self._judge_warm_up(warm_up, self._agent.check)
        if not warm_up.answered and self._clock_ns() >= warm_up.until_ns:
            self._answer(warm_up, "")

    def _judge_warm_up(self, warm_up: WarmUp, ask: Callable[[Any], bool]) -> None:
        problem, terminal = "", True
        try:
            terminal = ask(warm_up.handle)
        except ReadFailed as e:
            problem = str(e)
        except ReadDoubtful as e:
            problem, terminal = str(e), False
        if terminal:
            self._warm_ups.remove(warm_up)
            self._release(warm_up.peer, warm_up.handle)
        if terminal or problem:
            self._answer(warm_up, problem)

    def _answer(self, warm_up: WarmUp, problem: str) -> None:
        if warm_up.answered or warm_up.peer.leaving:
            return
        warm_up.answered = True
        if problem:
            self._refuse_peer(warm_up.peer, problem)
        else:
            self._out.append(PeerAdded(peer=warm_up.peer.name))

    # ------------------------------------------------------------ pace and end

    def wait_ns(self) -> int | None:
        """How long to wait for a message before the next turn; None: for as long as it takes."""
        if self._out or any(read.may_post for read in self._order):
            return 0
        return self._pace.wait_ns(
            self._clock_ns(),
            reads=bool(self._reads or self._warm_ups),
            peers=bool(self._peers),
            leases=self._leases > 0,
            pump_ns=self._pump_ns,
        )

    @property
    def stopped(self) -> bool:
        """Asked to stop, and nothing outstanding is left to wait for, or the time for that is over."""
        if self._stop_ns is None or self._out:
            return False
        return not self.outstanding or self._clock_ns() >= self._stop_ns

    @property
    def outstanding(self) -> bool:
        """Handles may still be written to."""
        return bool(self._reads or self._warm_ups)

    def close(self) -> None:
        """End the agent. Only with nothing outstanding: NIXL would keep it alive for its handles."""
        self._agent.close()


def slices(source: Any, target: Any, block_bytes: int) -> deque[tuple[bytes, bytes]]:
    """Block lists as u32 (source, target) pieces fit for one post, in order of source so that neighbours meet."""
    size = max(1, min(SLICE_BLOCKS_MAX, SLICE_BYTES_MAX // block_bytes))
    pairs = sorted(zip(source, target, strict=True))
    pieces = (pairs[i : i + size] for i in range(0, len(pairs), size))
    return deque((wire.pack_u32(s for s, _ in piece), wire.pack_u32(t for _, t in piece)) for piece in pieces)


# ---------------------------------------------------------------- the process


def run(args: MoverArgs, channel: ChildChannel[ToMover]) -> None:
    """Serve until told to stop. Raises PdError when it cannot start or go on."""
    from .nixl_agent import NixlAgent  # numpy and NIXL are not part of the base install
    from .slab import Slab

    slab = Slab.open(args.slab_path, args.slab_bytes)
    slab.populate()
    agent = NixlAgent(args.agent_name, slab.address, slab.size_bytes, args.block_bytes)
    mover = Mover(agent, slab.size_bytes, args.block_bytes)
    signal.signal(signal.SIGTERM, lambda *_: mover.handle(StopMover()))
    channel.send(
        MoverReady(
            pid=os.getpid(),
            agent_name=args.agent_name,
            metadata=agent.metadata,
            base_address=slab.address,
            region_bytes=slab.size_bytes,
        )
    )
    keep_what_is_loaded()
    serve(mover, channel)
    if mover.outstanding:
        channel.close()
        os._exit(0)  # the process's end stops what NIXL cannot
    mover.close()


def serve(mover: Mover, channel: ChildChannel[ToMover]) -> None:
    """The loop: messages, a turn, answers, sleep. Without control it stops in good order: a reader must not vanish."""
    while not mover.stopped:
        try:
            for message in channel.poll(_poll_ms(mover.wait_ns())):
                mover.handle(message)
            for said in mover.turn():
                channel.send(said)
        except Closed:
            mover.handle(StopMover())


def _poll_ms(wait_ns: int | None) -> int:
    """What of the wait the socket can do; waits under a millisecond are slept here."""
    if wait_ns is None:
        return BLOCKED_POLL_MS
    if 0 < wait_ns < MS:
        time.sleep(wait_ns / 1e9)
    return wait_ns // MS


def main(argv: list[str]) -> int:
    """`python -m pdbus.connector.mover '<MoverArgs as JSON>'`."""
    args = wire.from_json(argv[1], MoverArgs)
    channel: ChildChannel[ToMover] = ChildChannel(args.endpoint, ToMover)
    if args.cpus:
        os.sched_setaffinity(0, args.cpus)
    try:
        run(args, channel)
    except PdError as e:
        with contextlib.suppress(Closed):
            channel.send(MoverFailed(problem=str(e)))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
