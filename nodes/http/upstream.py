"""What answers behind the HTTP app: one node, or a whole cluster (nodes/gateway)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from pdbus.bus.client import Client
from pdbus.bus.generation import Prompt
from pdbus.bus.messages import Finished, Outcome, Sampling, Token
from pdbus.nodes.tokenizer import Tokenizer
from pdbus.nodes.tokenizer_files import fetch_tokenizer


class Answering(Protocol):
    """One answer as it comes, like the SDK's Generation."""

    @property
    def finished(self) -> Finished | None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None:
        """Cancels what has not ended."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Token:
        """One whose index is 0 begins the answer, perhaps again: what came before it does not count."""
        ...


class Upstream(Protocol):
    def generate(
        self, prompt: Prompt, *, model: str, sampling: Sampling, deadline_ms: int, stream: bool, traceparent: str
    ) -> Answering:
        """`stream`: tokens go out as they come, so that the answer cannot begin again."""
        ...

    async def status(self) -> dict[str, Any]:
        """As a node gives it (docs/operating.md). Raises what Client.status does."""
        ...

    async def tokenizer(self) -> Tokenizer:
        """The model's. Raises what Client.tokenizer does, and Broken for one that cannot be used here."""
        ...

    async def connect(self, addresses: Sequence[str]) -> tuple[Outcome, ...]: ...

    async def disconnect(self, targets: Sequence[str]) -> tuple[Outcome, ...]: ...


class OneNode:
    """The node at the other end of a client."""

    def __init__(self, client: Client) -> None:
        self.status, self.connect, self.disconnect = client.status, client.connect, client.disconnect
        self._client = client

    def generate(
        self, prompt: Prompt, *, model: str, sampling: Sampling, deadline_ms: int, stream: bool, traceparent: str
    ) -> Answering:
        return self._client.generate(
            prompt, model=model, sampling=sampling, deadline_ms=deadline_ms, traceparent=traceparent
        )

    async def tokenizer(self) -> Tokenizer:
        return await fetch_tokenizer(self._client)
