"""POST /tokenize and /detokenize, in vLLM's form, by the model's own tokenizer, fetched when it is first asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pdbus.bus.errors import RequestError
from pdbus.bus.wire import Declared
from pdbus.nodes.tokenizer import Tokenizer

from .body import decode_body
from .errors import JSON
from .schema import ChatMessage, messages_of
from .stream import read_body
from .upstream import Upstream


class TokenizeBody(Declared, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Declared, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Tokens:
    def __init__(
        self,
        upstream: Upstream,
        check_model: Callable[[str], Awaitable[str]],
        status: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._upstream = upstream
        self._check_model = check_model
        self._status = status
        self._tokenizer: Tokenizer | None = None

    async def tokenize(self, request: Request) -> Response:
        """What a request with this prompt, or conversation, would be to the model. What is far longer than the model's
        context is refused before any work."""
        body = decode_body(await read_body(request), TokenizeBody)
        if (body.prompt is None) is (body.messages is None):
            raise RequestError("prompt: give either prompt or messages", param="prompt")
        await self._check_model(body.model or "")
        longest = int((await self._status()).get("max_model_len", 0))
        tokenizer = await self._loaded()
        if body.messages is not None:
            messages, prompts = messages_of(body.messages), body.add_generation_prompt is not False
            tokens = await asyncio.to_thread(tokenizer.chat, messages, prompts, longest)
        else:
            assert body.prompt is not None
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, longest)
        return JSON({"count": len(tokens), "max_model_len": longest, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """The text, special tokens left out."""
        body = decode_body(await read_body(request), DetokenizeBody)
        await self._check_model(body.model or "")
        tokenizer = await self._loaded()
        for i, token in enumerate(body.tokens):
            if not 0 <= token < tokenizer.vocab_size:
                problem = f"tokens[{i}]: must be a token id from 0 to {tokenizer.vocab_size - 1}, got {token}"
                raise RequestError(problem, param=f"tokens[{i}]")
        return JSON({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    async def _loaded(self) -> Tokenizer:
        """A model's tokenizer never changes in its node's life."""
        if self._tokenizer is None:
            self._tokenizer = await self._upstream.tokenizer()
        return self._tokenizer
