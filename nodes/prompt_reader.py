"""Prompts become token ids, in threads: seconds for megabytes of text, which must delay neither a heartbeat nor the
short prompts of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdbus.bus.errors import Overloaded, RequestError
from pdbus.bus.messages import Generate
from pdbus.bus.wire import to_json, unpack_u32

from .limits import too_long
from .tokenizer import Tokenizer

LONG_CHARS = 64 << 10  # takes some 30 ms; what is longer has a thread of its own
WAITING_CHARS_MAX = 64 << 20  # of all prompts being read; a queue of large ones would be the machine's memory
RETRY_AFTER_MS = 1000


class PromptReader:
    """Two threads over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, tokens_max: int) -> None:
        """`tokens_max`: of a prompt. Many more are refused before any work; a few are the caller's to refuse."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens_max = tokens_max
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._waiting_chars = 0

    async def read(self, message: Generate) -> Sequence[int]:
        """The prompt's token ids. Raises RequestError for what is no prompt, Overloaded when too much waits."""
        chars = _chars(message)
        if self._waiting_chars and self._waiting_chars + chars > WAITING_CHARS_MAX:
            raise Overloaded("too much text is waiting to be tokenized", retry_after_ms=RETRY_AFTER_MS)
        self._waiting_chars += chars
        thread = self._long if chars > LONG_CHARS else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, self._ids, message)
        finally:
            self._waiting_chars -= chars

    def close(self) -> None:
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    def _ids(self, message: Generate) -> Sequence[int]:
        given = [name for name in ("text", "messages", "tokens") if getattr(message, name) is not None]
        if message.tools and message.messages is None:
            raise RequestError("tools: only with messages", param="tools")
        if len(given) != 1:
            raise RequestError("give exactly one of text, messages and tokens", param="prompt")
        ids = self._tokenized(message)
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if max(ids) >= self._vocab_size:
            raise RequestError(f"token id {max(ids)} is outside the vocabulary of {self._vocab_size}", param="prompt")
        return ids

    def _tokenized(self, message: Generate) -> Sequence[int]:
        if message.messages is not None:
            return self._tokenizer.chat(message.messages, tokens_max=self._tokens_max, tools=message.tools)
        if message.text is not None:
            return self._tokenizer.encode(message.text, self._tokens_max) if message.text else ()
        if (count := len(message.tokens or b"") // 4) > self._tokens_max:
            raise too_long(count, self._tokens_max, "prompt")
        return unpack_u32(message.tokens or b"")


def _chars(message: Generate) -> int:
    """About how much there is to read."""
    texts = [message.text, *(text for m in message.messages or () for text in _texts(m.get("content")))]
    calls = [message.tools, *(m.get("tool_calls") for m in message.messages or ())]
    told = sum(len(to_json(call)) for call in calls if call)
    return told + len(message.tokens or b"") // 4 + sum(len(text) for text in texts if isinstance(text, str))


def _texts(content: Any) -> list[Any]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part.get("text") for part in parts if isinstance(part, dict)]
