"""A fake beside `pdbus.bus.Client`: scripted answers, no socket. For tests of what stands on the client's interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pdbus.bus import wire
from pdbus.bus.messages import Finished, Outcome, Sampling, Timeline, Token, TokenLogprob
from pdbus.nodes.tokenizer import ByteTokenizer

REQUEST = bytes(range(16))
STATUS: dict[str, Any] = {
    "name": "decode-0",
    "incarnation": "ab" * 16,
    "role": "decode",
    "model": "tiny",
    "max_model_len": 128,
    "address": "tcp://127.0.0.1:7400",
    "ready": True,
    "not_ready": [],
    "peers": [
        {"name": "p0", "address": "tcp://127.0.0.1:7500", "role": "prefill", "state": "up", "detail": "", "leases": 1},
        {"name": "d1", "address": "tcp://127.0.0.1:7600", "role": "decode", "state": "up", "detail": "", "leases": 0},
    ],
    "metrics": {"blocks_free": 7, "requests_total": 3},
}


def token(index: int, text: str, *, logprob: TokenLogprob | None = None, pieces: tuple[bytes, ...] = ()) -> Token:
    return Token(
        client_id="c", request=REQUEST, index=index, tokens=wire.pack_u32([100 + index]), text=text,
        logprobs=(logprob,) if logprob else (), pieces=(pieces,) if pieces else (),
    )  # fmt: skip


def finished(reason: str = "stop", **changes: Any) -> Finished:
    end = Finished(
        client_id="c", request=REQUEST, reason=reason, prompt_tokens=5, cached_tokens=4, completion_tokens=2,
        timeline=Timeline(remote=True, prefill_node="p0", attempts=1, ttft_ns=1_500_000, read_bytes=4096),
    )  # fmt: skip
    return wire.replace(end, **changes)


Step = Token | Finished | Exception | asyncio.Event  # an event is waited for


class FakeGeneration:
    """Yields the script's tokens; a Finished ends it, an exception is raised."""

    def __init__(self, script: Sequence[Step], waiting: asyncio.Event) -> None:
        self._script = script
        self._waiting = waiting
        self._failed = False
        self.finished: Finished | None = None
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Token]:
        for step in self._script:
            if isinstance(step, Exception):
                self._failed = True
                raise step
            if isinstance(step, Finished):
                self.finished = step
                return
            if isinstance(step, asyncio.Event):
                self._waiting.set()
                await step.wait()
            else:
                yield step

    async def __aenter__(self) -> FakeGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.finished is None and not self._failed:
            self.cancelled.set()


class FakeClient:
    """Answers every generate with `script`, status with `says` (or raises it), and notes what it was asked."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = script or (token(0, "Hel"), token(1, "lo"), finished())
        self.says: dict[str, Any] | Exception = dict(STATUS)
        self.asked: list[tuple[Any, Sampling]] = []
        self.deadlines_ms: list[int] = []
        self.traceparents: list[str] = []
        self.generations: list[FakeGeneration] = []
        self.waiting = asyncio.Event()  # set when a script has come to an event
        self.commands: list[tuple[str, str]] = []  # what it was asked to do, to whom
        self.connected = ""  # who answered where it was told to connect to; its name

    def generate(
        self,
        prompt: Any,
        *,
        model: str = "",
        sampling: Sampling,
        deadline_ms: int = 300_000,
        stream: bool = False,
        traceparent: str = "",
    ) -> FakeGeneration:
        self.traceparents.append(traceparent)
        self.asked.append((prompt, sampling))
        self.deadlines_ms.append(deadline_ms)
        self.generations.append(FakeGeneration(self.script, self.waiting))
        return self.generations[-1]

    async def status(self) -> dict[str, Any]:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    async def connect(self, addresses: Sequence[str]) -> tuple[Outcome, ...]:
        self.commands += (("connect", address) for address in addresses)
        return tuple(Outcome(target=address, ok=True, detail=self.connected) for address in addresses)

    async def disconnect(self, targets: Sequence[str]) -> tuple[Outcome, ...]:
        self.commands += (("disconnect", target) for target in targets)
        return tuple(Outcome(target=target, ok=True) for target in targets)
