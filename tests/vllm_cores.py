"""Two cores of vLLM servers, and the words between them. No vLLM, no socket, no clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Agent, Hello, PrefillFailed
from pdbus.bus.wire import Header
from pdbus.connector import events as ev
from pdbus.connector.handoff import HandoffConfig
from pdbus.connector.layout import geometry_for
from pdbus.connector.pool import PoolCounts
from pdbus.connector.readable import unreadable
from pdbus.connector.recording import TurnRecorder
from pdbus.connector.vllm.core import PairConfig, PairCore, Role
from pdbus.connector.vllm.events import EngineEvent, KvWanted, PromptCame, PromptSaved, RequestLeft
from pdbus.connector.vllm.recording import recorder
from pdbus.connector.vllm.wants import Want

S = 1_000_000_000
SIZE, BLOCKS = 4, 8
GEOMETRY = geometry_for(2, 1, 4, SIZE, "float32")
PAIR, DIGEST, PROMPT = b"p" * 16, b"d" * 16, 10


class Server:
    """A core, its mover and its end of a link, all as good as they are told to be."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.incarnation = name, name.encode() * 8
        address = f"tcp://127.0.0.1:{7800 + len(name)}"
        hello = Hello(role=role, address=address, version="0.1.0", epoch=1, geometry=GEOMETRY, fingerprint="w")
        config = PairConfig(
            name=name, incarnation=self.incarnation, role=role, blocks=BLOCKS, block_size=SIZE, pair_wait_ns=10 * S,
            park_ns=30 * S, fetch_ns=60 * S, handoff=HandoffConfig(answer_ns=11 * S),
        )  # fmt: skip
        self.membership = MembershipConfig(name=name, incarnation=self.incarnation, hello=hello)
        self.core = PairCore(config, Membership(self.membership, unreadable))
        self.recorder: TurnRecorder | None = None

    def record(self, folder: Path) -> None:
        self.recorder = recorder(folder, self.core.config, self.membership, setting="record")

    def handle(self, event: ev.NodeEvent | EngineEvent, now: int) -> list[ev.NodeEffect]:
        if self.recorder is None:
            return self.core.handle(event, now)
        return self.recorder.record(self.core.handle, event, now)

    def agent(self, epoch: int) -> Agent:
        return Agent(epoch=epoch, name=f"{self.name}/0/x/{epoch}", metadata=b"m", region_bytes=1 << 20, blocks=BLOCKS)


class Two:
    """A prefill and a decode server with one link, `l` at both ends. Reads wait in `reads` until told how they end."""

    def __init__(self, record: Path | None = None) -> None:
        """`record`: a folder for both servers' recordings."""
        self.now, self.seq = S, 0
        self.p, self.d = Server("p", "prefill"), Server("dd", "decode")
        self.reads: list[ev.StartRead] = []
        self.said: list[Any] = []
        self.lost: tuple[type, ...] = ()
        self.restarts: list[ev.RestartMover] = []
        for server in (self.p, self.d) if record is not None else ():
            server.record(record)
        for server in (self.p, self.d):
            self.tell(server, ev.MoverUp(agents=(server.agent(1),)))
        self.tell(self.d, ev.JoinAsked(address="tcp://127.0.0.1:7801"))

    def tell(self, server: Server, event: ev.NodeEvent | EngineEvent) -> None:
        other = self.d if server is self.p else self.p
        for effect in server.handle(event, self.now):
            match effect:
                case ev.OpenLink(address=address):
                    self.tell(server, ev.LinkOpened(address=address, link="l"))
                case ev.Send(message=message) if not isinstance(message, self.lost):
                    self.said.append(message)
                    self.seq += 1
                    header = Header(
                        from_=server.name, from_inc=server.incarnation, to=effect.to, to_inc=effect.to_inc,
                        seq=self.seq, cause=0,
                    )  # fmt: skip
                    self.tell(other, ev.MessageCame(link="l", header=header, message=message))
                case ev.AddPeer(peer=peer):
                    self.tell(server, ev.PeerAddEnded(peer=peer))
                case ev.StartRead():
                    self.reads.append(effect)
                case ev.RestartMover():
                    self.restarts.append(effect)

    def wait(self, seconds: float) -> None:
        """Both tick when they are due."""
        end = self.now + int(seconds * S)
        while True:
            due = [(at, s) for s in (self.p, self.d) if (at := s.core.next_deadline()) is not None and at <= end]
            if not due:
                break
            at, server = min(due, key=lambda d: d[0])
            self.now = max(self.now, at)
            self.tell(server, ev.Tick())
        self.now = end

    def came(self, request: str = "P", digest: bytes = DIGEST, tokens: int = PROMPT, pair: bytes = PAIR) -> None:
        self.tell(self.p, PromptCame(request=request, pair=pair, prompt_tokens=tokens, prompt_digest=digest))

    def saved(self, ready: int = PROMPT, request: str = "P") -> None:
        self.tell(self.p, PromptSaved(request=request, ready=ready))

    def wanted(self, request: str = "D", have: int = 0, node: str = "", pair: bytes = PAIR) -> None:
        number = request.encode().rjust(16, b"0")
        self.tell(
            self.d,
            KvWanted(
                request=request, id=number, pair=pair, node=node, prompt_tokens=PROMPT, prompt_digest=DIGEST, have=have
            ),
        )

    def left(self, server: Server, request: str) -> None:
        self.tell(server, RequestLeft(request=request))

    def read(self, problem: str = "") -> None:
        """All reads that are under way end so."""
        reads, self.reads = self.reads, []
        for one in reads:
            self.tell(self.d, ev.ReadEnded(read=one.read, problem=problem))

    def want(self, request: str = "D") -> Want:
        want = self.d.core.want(request)
        assert want is not None
        return want

    def failed(self) -> list[str]:
        return [m.cause for m in self.said if isinstance(m, PrefillFailed)]

    def recordings(self) -> list[Path]:
        """Closed: nothing more is recorded."""
        paths = []
        for server in (self.p, self.d):
            assert server.recorder is not None
            server.recorder.close()
            paths.append(server.recorder.path)
        return paths

    def free(self) -> tuple[PoolCounts, PoolCounts]:
        for server in (self.p, self.d):
            server.core.pool.check()
        return self.p.core.pool.counts(), self.d.core.pool.counts()
