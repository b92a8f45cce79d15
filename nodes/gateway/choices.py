"""What a gateway records beside its messages: each choice of a node, so that it can be made again."""

from __future__ import annotations

from pdbus.bus.wire import Declared

from .routing import Ask, Choice, NodeView


class Chose(Declared, tag_field="t", tag=True):
    """The node for the generate of this `client_id`, which follows. `number` counts the gateway's requests, `attempt`
    its tries at one of them from 1."""

    client_id: str
    number: int
    attempt: int
    policy: str
    ask: Ask
    nodes: tuple[NodeView, ...]
    choice: Choice
