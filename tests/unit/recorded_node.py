"""A NodeCore driven by hand and recorded: what it hears is what the test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdbus.bus.members import MembershipConfig
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Agent, Hello, Message, Sampling
from pdbus.bus.wire import Header
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable
from pdbus.nodes import events as ev
from pdbus.nodes.core import CoreConfig, NodeCore
from pdbus.nodes.recording import NodeRecorder

SIZE = 4
MS = 1_000_000


class RecordedNode:
    """Clock in ms; every event 1 ms after the one before."""

    def __init__(self, folder: Path, name: str = "d", role: str = "decode", **options: Any) -> None:
        self.name, self.incarnation = name, name.encode() * 16
        self.hello = Hello(
            role=role,
            address=f"tcp://{name}:1",
            epoch=1,
            geometry=geometry_for(1, 1, 4, SIZE, "float32"),
            fingerprint="f",
        )
        config = CoreConfig(
            name=name, incarnation=self.incarnation, decodes=role != "prefill", blocks=32, block_size=SIZE,
            block_bytes=64, max_model_len=100,
        )  # fmt: skip
        membership = MembershipConfig(name=name, incarnation=self.incarnation, hello=self.hello)
        self.core = NodeCore(config, Membership(membership, unreadable))
        self.recorder = NodeRecorder(folder, config, membership, **options)
        self.path = self.recorder.path
        self.now = 0

    def hear(self, event: ev.NodeEvent, wait_ms: int = 1) -> list[ev.NodeEffect]:
        self.now += wait_ms * MS
        return self.recorder.turn(self.core, event, self.now)

    def hear_message(self, node: str, message: Message, **rest: Any) -> list[ev.NodeEffect]:
        header = Header(from_=node, from_inc=node.encode() * 16, to=self.name, to_inc=self.incarnation)
        return self.hear(ev.MessageCame(link=f"in:{node}", header=header, message=message, **rest))

    def come_up(self) -> None:
        """Worker and mover are there."""
        self.hear(ev.WorkerUp())
        self.hear(ev.MoverUp(agents=(Agent(epoch=1, name="a", blocks=32),)))

    def ask(self, request: bytes, tokens: int = 6, max_tokens: int = 3) -> list[ev.NodeEffect]:
        hashes = tuple(request[:8] + bytes([i]) for i in range(tokens // SIZE))
        return self.hear(
            ev.GenerateAsked(
                request=request, link="c", client=request.hex(), prompt_tokens=tokens, prompt_digest=b"digest",
                block_hashes=hashes, sampling=Sampling(max_tokens=max_tokens), deadline_ns=10_000 * MS, credit=100,
            )
        )  # fmt: skip

    def step(self, **row: Any) -> list[ev.NodeEffect]:
        """The step that is out ends; all its rows alike."""
        rows = self.core.scheduler._rows
        ended = tuple(ev.StepRowEnded(seq=seq, **row) for seq in rows)
        return self.hear(ev.StepEnded(step=self.core.scheduler.step, rows=ended, compute_ns=1))

    def answer(self, request: bytes, **options: int) -> None:
        """A whole request, computed here."""
        self.ask(request, **options)
        while len(self.core.requests):
            self.step()

    def close(self) -> Path:
        self.recorder.close()
        return self.path
