"""A fake beside the decode node that a load is sent to: answers as it is told, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

from pdbus.bus.errors import PdError
from pdbus.bus.messages import Finished, Timeline, Token
from pdbus.bus.wire import pack_u32


class FakeAnswer:
    """`problem` comes after the first token."""

    def __init__(self, prompt: int, tokens: int, problem: PdError | None, gate: asyncio.Event | None) -> None:
        self.finished: Finished | None = None
        self._prompt, self._tokens, self._problem, self._gate = prompt, tokens, problem, gate
        self._given = 0

    def __aiter__(self) -> FakeAnswer:
        return self

    async def __anext__(self) -> Token:
        await asyncio.sleep(0)
        if self._gate is not None:
            await self._gate.wait()
        if self._given and self._problem is not None:
            raise self._problem
        if self._given == self._tokens:
            self.finished = Finished(
                client_id="", request=b"", reason="length", prompt_tokens=self._prompt, cached_tokens=self._prompt // 2,
                completion_tokens=self._tokens, timeline=Timeline(remote=True),
            )  # fmt: skip
            raise StopAsyncIteration
        self._given += 1
        return Token(client_id="", request=b"", index=self._given - 1, tokens=pack_u32([7]))


class FakeTarget:
    vocab_size, block_tokens = 256, 16

    def __init__(self, name: str = "d", max_model_len: int = 1000) -> None:
        self.name, self.max_model_len = name, max_model_len
        self.client = SimpleNamespace(address=f"tcp://{name}:1")
        self.asked: list[tuple[list[int], int]] = []  # prompt and tokens, in the order they came
        self.unreachable: PdError | None = None
        self.problems: dict[int, PdError] = {}  # by a prompt's length
        self.gate: asyncio.Event | None = None  # what answers wait for

    async def reach(self) -> None:
        if self.unreachable is not None:
            raise self.unreachable

    def generate(self, prompt: Sequence[int], tokens: int) -> FakeAnswer:
        self.asked.append((list(prompt), tokens))
        return FakeAnswer(len(prompt), tokens, self.problems.get(len(prompt)), self.gate)
