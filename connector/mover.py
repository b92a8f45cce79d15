"""The mover: reads, as told; reports back; polls the transport. One process per rank, beside the worker.

It is a process of its own because over TCP a reader that dies can end the owner of the memory with it. `Mover` is the
whole of it but for the process: messages in (`handle`), one round of work (`turn`), messages out. It knows nothing
of requests or leases, and decides nothing but in what order to post and how often to poll.

How to read from a peer is a plan (plan.py), made once when the peer is added. A read is cut into slices (reading.py),
each one post and one handle. Reads take turns, a slice each; a read has ended when all its posted slices are terminal.
After a failed slice nothing more of that read is posted.
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
from pdbus.bus.errors import Broken, Closed, ConfigError, LocalProtocolError, PdError, RemoteProtocolError
from pdbus.bus.hashing import prompt_digest
from pdbus.bus.messages import Agent as AgentMessage
from pdbus.bus.messages import KVLayout

from .agent import Agent, ReadDoubtful, ReadFailed
from .apply import pair
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
    StopMover,
    ToMover,
)
from .ipc import ReadDoubtful as ReadDoubtfulMessage
from .pace import MS, Pace
from .plan import plan
from .process import keep_what_is_loaded
from .readable import layouts_of_agents
from .reading import OpenRead, Peer, Posted, RemoteAgent
from .scratch import Scratch

TURN_POST_NS = 2 * MS  # how long one round goes on posting
WARM_UP_NS = 1_000 * MS  # after this a peer counts as added, warm or not
ALONE_POLL_S = 0.001  # with control gone, until the last read has ended
BLOCKED_POLL_MS = 250  # the longest sleep: signals and the death of control are noticed this late at worst


class WarmUp:
    """An agent's first small read. `answered` once its peer knows; the handle may live on."""

    def __init__(self, peer: Peer, agent: RemoteAgent, handle: Any, until_ns: int) -> None:
        self.peer = peer
        self.agent = agent
        self.handle = handle
        self.until_ns = until_ns
        self.answered = False


class Mover:
    """`memory` is the whole registered region: `layout`'s, then scratch. `rank` is ours within the node."""

    def __init__(
        self,
        agent: Agent,
        memory: memoryview,
        layout: KVLayout,
        rank: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._layout = layout
        self._rank = rank
        self._clock_ns = clock_ns
        self._scratch = Scratch(layout.region_bytes, len(memory) - layout.region_bytes)
        self._peers: dict[str, Peer] = {}
        self._leaving: dict[str, tuple[Peer, RemoteAgent]] = {}  # by agent name: removed, but with reads under way
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
            case Read():
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

    # ------------------------------------------------------------ peers

    def _peer_add(self, message: PeerAdd) -> None:
        if message.peer in self._peers:
            self._out.append(PeerAdded(peer=message.peer, problem=f"peer {message.peer} has been added already"))
            return
        try:
            peer = self._planned(message)
            self._peers[peer.name] = peer
            for rank in peer.plan.ranks:
                peer.agents[rank.rank] = self._loaded(message.agents[rank.rank])
        except PdError as e:
            self._refuse_peer(message.peer, str(e))
            return
        self._pace.courted(self._clock_ns())
        peer.warming = dict.fromkeys(peer.agents)
        if not peer.agents:
            self._out.append(PeerAdded(peer=peer.name))
        for agent in peer.agents.values():
            self._warm_up(peer, agent)

    def _planned(self, message: PeerAdd) -> Peer:
        """Raises RemoteProtocolError for agents that cannot be, or not be read from."""
        for agent in message.agents:
            if prompt_digest(agent.metadata) != agent.metadata_digest:
                raise RemoteProtocolError(f"the metadata of agent {agent.name} does not match its digest")
        layouts = layouts_of_agents(message.geometry, message.agents)
        made = plan(layouts, self._layout, self._rank)
        if any(rank.scratch_bytes > self._scratch.size for rank in made.ranks):
            made = plan(layouts, self._layout, self._rank, run_bytes_min=0)  # short runs, but they need no scratch
        return Peer(message.peer, made)

    def _loaded(self, agent: AgentMessage) -> RemoteAgent:
        loaded = (other.name for peer in self._peers.values() for other in peer.agents.values())
        if agent.name in loaded:
            raise LocalProtocolError(f"agent {agent.name} is loaded for another peer already")
        if agent.name in self._leaving:  # forgetting it later would take the status of new reads with it
            raise LocalProtocolError(f"agent {agent.name} is still left by reads under way")
        remote = self._agent.add_peer(agent.name, agent.metadata, agent.base_address, agent.region_bytes)
        return RemoteAgent(agent.rank, agent.name, remote)

    def _warm_up(self, peer: Peer, agent: RemoteAgent) -> None:
        if peer.leaving:  # refused for another rank
            return
        try:
            handle = self._agent.make_warm_up(agent.remote)
        except ReadFailed as e:
            self._refuse_peer(peer.name, str(e))
            return
        agent.open_handles += 1
        warm_up = WarmUp(peer, agent, handle, self._clock_ns() + WARM_UP_NS)
        self._warm_ups.append(warm_up)
        self._judge_warm_up(warm_up, self._agent.post)

    def _refuse_peer(self, name: str, problem: str) -> None:
        self._out.append(PeerAdded(peer=name, problem=problem))
        self._peer_remove(name)

    def _peer_remove(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.leaving = True
        for agent in peer.agents.values():
            self._leaving[agent.name] = peer, agent
            self._forget_if_free(peer, agent)

    def _forget_if_free(self, peer: Peer, agent: RemoteAgent) -> None:
        if peer.leaving and not agent.open_handles and not any(r.peer is peer for r in self._order):
            if self._leaving.pop(agent.name, None) is None:
                return
            with contextlib.suppress(Broken):  # it is gone either way
                self._agent.remove_peer(agent.remote)

    # ------------------------------------------------------------ reads

    def _read(self, message: Read) -> None:
        if message.read in self._reads:
            raise LocalProtocolError(f"read {message.read} is still open")
        try:
            read = self._opened(message)
        except PdError as e:
            self._out.append(ReadEnded(read=message.read, problem=str(e), posted=False))
            return
        self._reads[message.read] = read
        self._order.append(read)

    def _opened(self, message: Read) -> OpenRead:
        """Raises PdError for what cannot be read."""
        if (peer := self._peers.get(message.peer)) is None:
            raise ReadFailed(f"no peer {message.peer}")
        if self._stop_ns is not None:
            raise ReadFailed("the mover is stopping")
        source, target = wire.unpack_u32(message.source), wire.unpack_u32(message.target)
        pairing = pair(peer.plan, message.begin, message.end, source, target)
        return OpenRead(message.read, peer, pairing, self._scratch)

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
        began = self._clock_ns()
        try:
            posted = read.post(self._agent)
        except ReadFailed as e:
            read.fail(str(e))
            return
        read.started_ns = read.started_ns or self._clock_ns()
        self._judge_slice(read, posted, self._agent.post)
        read.post_ns += self._clock_ns() - began

    def _check_read(self, read: OpenRead) -> None:
        for posted in list(read.posted):
            self._judge_slice(read, posted, self._agent.check)
        if read.ended:
            self._end_read(read)

    def _judge_slice(self, read: OpenRead, posted: Posted, ask: Callable[[Any], bool]) -> None:
        try:
            terminal = ask(posted.handle)
        except ReadFailed as e:
            read.fail(str(e))
            terminal = True
        except ReadDoubtful as e:
            terminal = False
            if not read.doubted:
                read.doubted = True
                self._out.append(ReadDoubtfulMessage(read=read.read, problem=str(e)))
        if terminal:
            read.ended_ns = self._clock_ns()
            read.terminal(posted, self._memory)
            self._release(read.peer, posted.slice.agent, posted.handle)
            self._pace.progressed(self._clock_ns())

    def _end_read(self, read: OpenRead) -> None:
        del self._reads[read.read]
        self._order.remove(read)
        for agent in read.peer.agents.values():
            self._forget_if_free(read.peer, agent)
        self._out.append(
            ReadEnded(
                read=read.read,
                problem=read.problem,
                posted=read.handles > 0,
                bytes=0 if read.problem else read.size_bytes,
                transfer_ns=read.ended_ns - read.started_ns,
                posts=read.handles,
                runs=read.runs,
                post_ns=read.post_ns,
            )
        )

    def _release(self, peer: Peer, agent: RemoteAgent, handle: Any) -> None:
        with contextlib.suppress(Broken):  # a leaked handle of a finished read harms nobody
            self._agent.release(handle)
        self._forget_if_free(peer, agent)

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
            warm_up.agent.open_handles -= 1
            self._release(warm_up.peer, warm_up.agent, warm_up.handle)
        if terminal or problem:
            self._answer(warm_up, problem)

    def _answer(self, warm_up: WarmUp, problem: str) -> None:
        """A peer is added when the last of its ranks is warm, and refused with the first that cannot be reached."""
        peer = warm_up.peer
        if warm_up.answered or peer.leaving:
            return
        warm_up.answered = True
        if problem:
            self._refuse_peer(peer.name, problem)
            return
        del peer.warming[warm_up.agent.rank]
        if not peer.warming:
            self._out.append(PeerAdded(peer=peer.name))

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


# ---------------------------------------------------------------- the process


def run(args: MoverArgs, channel: ChildChannel[ToMover]) -> None:
    """Serve until told to stop. Raises PdError when it cannot start or go on."""
    from .nixl_agent import NixlAgent
    from .slab import Slab

    slab = Slab.open(args.slab_path, args.slab_bytes)
    slab.populate(args.layout.region_bytes)
    agent = NixlAgent(args.agent_name, slab.address, slab.size_bytes)
    mover = Mover(agent, slab.memory, args.layout, args.rank)
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
    """The loop: messages, a turn, answers, sleep. Without control it ends in good order: a reader must not vanish."""
    try:
        while not mover.stopped:
            for message in channel.poll(_poll_ms(mover.wait_ns())):
                mover.handle(message)
            for said in mover.turn():
                channel.send(said)
    except Closed:
        mover.handle(StopMover())
        while not mover.stopped:
            mover.turn()
            time.sleep(ALONE_POLL_S)


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
    except ConfigError as e:
        return _failed(channel, e.problem, 2, e.setting)
    except PdError as e:
        return _failed(channel, str(e), 1)
    finally:
        channel.close()
    return 0


def _failed(channel: ChildChannel[ToMover], problem: str, status: int, setting: str = "") -> int:
    with contextlib.suppress(Closed):
        channel.send(MoverFailed(problem=problem, setting=setting))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
