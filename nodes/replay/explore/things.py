"""What passes between the model's nodes, what comes of telling them something, and the prompts they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pdbus.bus.messages import LeaseId
from pdbus.bus.wire import Header

from ... import events as ev
from .scenario import Scenario

Content = bytes | None  # the block's hash, that of the prompt up to its end; None for garbage


class Packet(NamedTuple):
    """A message on its way. `link` is that of the node which opened it; `inbound`: it goes to the other one."""

    to: str
    link: str
    inbound: bool
    header: Header
    message: Any

    def __str__(self) -> str:
        return f"{self.message.KIND} {self.header.from_} -> {self.to}"


class Read(NamedTuple):
    """An open read: posted, then sampled at the owner, then landed here. `content` is what was sampled."""

    reader: str
    read: int
    owner: str
    incarnation: bytes
    epoch: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    content: tuple[Content, ...] | None = None


class Outputs(NamedTuple):
    """What came of telling a node something. `done`: leases that ended so; `valid`: whose KV was taken as valid."""

    packets: tuple[Packet, ...] = ()
    reads: tuple[Read, ...] = ()
    done: tuple[LeaseId, ...] = ()
    valid: tuple[LeaseId, ...] = ()
    reads_end: bool = False  # this node's mover is gone, and with it its reads


class Turn(NamedTuple):
    """One turn of a core, for a recording. `raised`: instead of effects."""

    event: ev.NodeEvent
    now: int
    effects: list[ev.NodeEffect]
    raised: Exception | None = None


@dataclass
class Answer:
    """What a client has got."""

    tokens: int = 0
    first: bool = False
    attempts: int = 0
    failed: int = 0  # attempts
    outcome: str = ""


def prompt_hashes(scenario: Scenario, number: int) -> tuple[bytes, ...]:
    """The block hashes of a request's prompt."""
    whose = 0 if scenario.same_prompt else number
    return tuple(f"{whose if place else 0}.{place}".encode() for place in range(scenario.blocks))


def request_id(number: int, life: int) -> bytes:
    """Unlike that of any other life of its node."""
    return f"request {number} {life}".encode().ljust(16, b".")


def request_number(request: bytes) -> int:
    return int(request.split(b" ")[1])
