"""The client SDK without asyncio: the same calls, run on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import uvloop

from .client import Client
from .errors import Closed
from .generation import CREDIT_TOKENS, DEADLINE_MS, Generation, Prompt
from .messages import Finished, LedgerReply, Outcome, Published, Sampling, Token
from .subscription import Subscription

T = TypeVar("T")


class SyncClient:
    """Like Client, for plain code: `with SyncClient(address) as client: for token in client.generate("Hi"): ...`

    Any thread may call it. An interrupted wait (Ctrl-C) cancels what was waited for.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        credit: int = CREDIT_TOKENS,
        keys: str | os.PathLike[str] | None = None,
        record: str | os.PathLike[str] | None = None,
        record_tokens: bool = False,
    ) -> None:
        self._client = Client(
            address, timeout_s=timeout_s, credit=credit, keys=keys, record=record, record_tokens=record_tokens
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SyncClient:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdbus-client", daemon=True)
        self._thread.start()
        try:
            self.run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every generation and the connection, and the thread."""
        if self._loop is not None:
            self.run(self._client.__aexit__())
            self._stop()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling | None = None,
        deadline_ms: int = DEADLINE_MS,
        **options: Any,
    ) -> SyncGeneration:
        """See Client.generate."""

        async def start() -> Generation:
            return self._client.generate(prompt, model=model, sampling=sampling, deadline_ms=deadline_ms, **options)

        return SyncGeneration(self, self.run(start()))

    def status(self) -> dict[str, Any]:
        return self.run(self._client.status())

    def ledger(self) -> LedgerReply:
        return self.run(self._client.ledger())

    def connect(self, addresses: Sequence[str]) -> tuple[Outcome, ...]:
        return self.run(self._client.connect(addresses))

    def disconnect(self, targets: Sequence[str], *, timeout_s: float = 130.0) -> tuple[Outcome, ...]:
        return self.run(self._client.disconnect(targets, timeout_s=timeout_s))

    def drain(self) -> None:
        self.run(self._client.drain())

    def subscribe(self, topics: Sequence[str] = ("",)) -> SyncSubscription:
        """See Client.subscribe. In force when it returns; close it (or leave the client) to stop."""

        async def start() -> Subscription:
            return await self._client.subscribe(topics).__aenter__()

        return SyncSubscription(self, self.run(start()))

    @property
    def closed(self) -> bool:
        return self._loop is None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """For SyncGeneration and SyncSubscription: run on the client's loop and wait for it."""
        if self._loop is None:
            work.close()
            raise Closed("the client is not open: use it within `with`")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()


class SyncGeneration:
    """See Generation: iterate over it for messages.Token."""

    def __init__(self, client: SyncClient, generation: Generation) -> None:
        self._client = client
        self._generation = generation

    def __iter__(self) -> SyncGeneration:
        return self

    def __next__(self) -> Token:
        token = self._client.run(self._next())
        if token is None:
            raise StopIteration
        return token

    def __enter__(self) -> SyncGeneration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def finished(self) -> Finished | None:
        return self._generation.finished

    @property
    def text(self) -> str:
        return self._generation.text

    @property
    def tokens(self) -> list[int]:
        return self._generation.tokens

    def whole(self) -> str:
        return self._client.run(self._generation.whole())

    def cancel(self) -> Finished:
        return self._client.run(self._generation.cancel())

    def close(self) -> None:
        self._client.run(self._generation.aclose())

    async def _next(self) -> Token | None:
        try:
            return await self._generation.__anext__()
        except StopAsyncIteration:
            return None


class SyncSubscription:
    """See Subscription: iterate over it for messages.Published."""

    def __init__(self, client: SyncClient, subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription

    def __iter__(self) -> SyncSubscription:
        return self

    def __next__(self) -> Published:
        event = self._client.run(self._next())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> SyncSubscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._client.closed:  # whose end has closed it
            self._client.run(self._subscription.aclose())

    async def _next(self) -> Published | None:
        return await anext(self._subscription, None)
