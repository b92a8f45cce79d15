"""The decode nodes that a workload is sent to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, ConfigError, PdError
from pdbus.bus.generation import Generation
from pdbus.bus.keyring import Keyring
from pdbus.bus.messages import Sampling

RETRY_S = 5.0  # a node that did not answer is not asked again before
TO = "--to"


class Target:
    """One node: one connection for all its requests."""

    def __init__(self, client: Client, says: dict[str, Any]) -> None:
        """Raises ConfigError (`--to`) for a node that takes no requests, or does not say what it can take."""
        self.client = client
        self.name = str(says.get("name", client.address))
        if says.get("role") == "prefill":
            raise ConfigError(TO, f"{self.name} at {client.address} is a prefill node; give decode nodes")
        self.vocab_size, self.max_model_len, self.block_tokens = (
            self._number(says, key) for key in ("vocab_size", "max_model_len", "block_size")
        )
        self._asking = asyncio.Lock()
        self._problem: PdError | None = None
        self._retry_s = 0.0

    def _number(self, says: dict[str, Any], key: str) -> int:
        value = says.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(TO, f"{self.name} at {self.client.address} does not tell its {key}: a newer pdbus does")
        return value

    async def reach(self) -> None:
        """Raises Broken when the node cannot be reached, at once when that was found a moment ago: a thousand requests
        shall not wait for a dead node one after the other."""
        async with self._asking:
            if self._problem is not None and time.monotonic() < self._retry_s:
                raise Broken(str(self._problem))
            try:
                await self.client.node()
                self._problem = None
            except PdError as e:
                self._problem, self._retry_s = e, time.monotonic() + RETRY_S
                raise Broken(str(e)) from None

    def generate(self, prompt: Sequence[int], tokens: int) -> Generation:
        """An answer of exactly so many tokens."""
        return self.client.generate(prompt, sampling=Sampling(max_tokens=tokens, ignore_eos=True))


async def open_targets(addresses: Sequence[str], stack: AsyncExitStack, keys: Keyring | None = None) -> list[Target]:
    """Raises Broken or DeadlineExceeded when one does not answer, ConfigError when one will not do."""
    clients = [await stack.enter_async_context(Client(address, keys=keys)) for address in dict.fromkeys(addresses)]
    return [Target(client, await client.status()) for client in clients]
