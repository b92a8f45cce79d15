"""What an engine with a scheduler of its own tells the core, beside what the bus and the mover do (../events.py).

`request` is the engine's name for a request. Blocks are those of the slab, never the engine's.
"""

from __future__ import annotations

from pdbus.bus.wire import Declared


class EngineEvent(Declared, tag_field="t", tag=True):
    pass


class PromptCame(EngineEvent):
    """A prefill server has a request with this pair, and will compute its prompt."""

    request: str
    pair: bytes
    prompt_tokens: int
    prompt_digest: bytes


class PromptSaved(EngineEvent):
    """KV of the first `ready` tokens is in the prompt's blocks, for good."""

    request: str
    ready: int


class KvWanted(EngineEvent):
    """A decode server has a request with this pair, and the KV of its first `have` tokens (whole blocks).

    `id` is 128 bits that no request ever had. `node`: of which prefill node to ask; '' for the only one.
    """

    request: str
    id: bytes
    pair: bytes
    node: str
    prompt_tokens: int
    prompt_digest: bytes
    have: int


class RequestLeft(EngineEvent):
    """The engine needs nothing more of this request, and no copy from or into its blocks is under way."""

    request: str
