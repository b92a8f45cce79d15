"""One answer as it comes: the client's side of generate, token, credit, finished and cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import wire
from .answers import exception_of
from .errors import Broken, PdError, RemoteProtocolError, RequestError
from .messages import Cancel, Cancelled, Credit, Error, Finished, Generate, Message, Sampling, Token

if TYPE_CHECKING:
    from .client import Client

DEADLINE_MS = 300_000  # for the whole answer, of who does not say
CREDIT_TOKENS = 1024  # how far the node may be ahead of who reads
CANCEL_S = 5.0  # for the node to say how a cancelled generation ended
REQUEST_BYTES_MAX = wire.FRAME_BYTES_MAX - (64 << 10)  # leaves room for the header in what one message may have
UNENCODABLE = (TypeError, OverflowError, ValueError, RecursionError)  # UnicodeEncodeError is a ValueError


class Conversation(NamedTuple):
    """Chat messages, and the tools that the model is told of, as OpenAI's API writes both."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Conversation


class Generation:
    """An async iterator over the answer's messages.Token, each one or more tokens and the text that they complete.

    `finished` tells how it ended, once everything has been read; `text` and `tokens` are what has been read so far.
    Iterating raises what went wrong (RequestError, Overloaded, DeadlineExceeded, Broken ...). Ending it early, by
    `cancel()`, `aclose()`, leaving an `async with`, or cancelling the task that waits for a token, cancels it at the
    node. Who stops reading without any of that keeps the node working until the credit is used up.
    """

    def __init__(self, client: Client, message: Generate) -> None:
        self.message = message
        self.client_id = message.client_id
        self.submitted = 0  # the seq under which it was sent
        self.text = ""
        self.tokens: list[int] = []
        self._client = client
        self._queue: deque[Token] = deque()
        self._received = 0  # tokens that have come
        self._credited = 0
        self._end: Finished | Exception | None = None
        self._news = asyncio.Event()

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the last token has been read."""
        return self._end if isinstance(self._end, Finished) and not self._queue else None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Token:
        try:
            if not self.submitted and self._end is None:
                await self._start()
            while not self._queue and self._end is None:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self._cancel()
            raise
        if not self._queue:
            self._raise_if_bad()
            raise StopAsyncIteration
        return self._read(self._queue.popleft())

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel it at the node if it has not ended. Does not wait."""
        self._cancel()

    async def cancel(self) -> Finished:
        """Cancel it at the node and say how it ended: what came before the node heard of it is dropped unread."""
        self._cancel()
        self._queue.clear()
        try:
            async with asyncio.timeout(CANCEL_S):
                while self._end is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self.fail(Broken(f"{self._client.address} did not answer a cancel within {CANCEL_S:g} s"))
        self._queue.clear()
        if isinstance(self._end, Finished):
            return self._end
        return Finished(client_id=self.client_id, request=b"", reason="cancelled")

    async def whole(self) -> str:
        """Read to the end and return the whole text."""
        async for _ in self:
            pass
        return self.text

    # ------------------------------------------------------------ for Client

    def hear(self, message: Message) -> None:
        """An answer of the node."""
        match message:
            case Token():
                self._hear_token(message)
            case Finished():
                self._ended(message)
            case Cancelled():
                self._ended(Finished(client_id=self.client_id, request=b"", reason="cancelled"))
            case Error():
                self.fail(exception_of(message))

    def fail(self, problem: Exception) -> None:
        self._ended(problem)

    # ------------------------------------------------------------ inside

    async def _start(self) -> None:
        try:
            node = await self._client.node()
        except PdError as e:
            self.fail(e)
            return
        if not self.submitted and self._end is None:
            self._client.submit(self, node)

    def _hear_token(self, token: Token) -> None:
        count = len(token.tokens) // 4
        if token.index + count <= self._received and count:
            return  # doubled
        if token.index != self._received:
            self._client.tell(Cancel(client_id=self.client_id))
            self.fail(Broken(f"tokens {self._received} to {token.index} of the answer were lost on the way"))
            return
        self._received += count
        self._queue.append(token)
        self._news.set()

    def _read(self, token: Token) -> Token:
        self.tokens.extend(wire.unpack_u32(token.tokens))
        self.text += token.text
        if self._end is None and len(self.tokens) - self._credited >= max(1, self.message.credit // 4):
            self._credited = len(self.tokens)
            self._client.tell(Credit(client_id=self.client_id, index=self._credited))
        return token

    def _raise_if_bad(self) -> None:
        if isinstance(self._end, Exception):
            raise self._end.with_traceback(None)  # it may be that of many, and must not grow with each
        if self._end is not None and self._end.error is not None:
            raise exception_of(self._end.error)

    def _cancel(self) -> None:
        if self._end is not None:
            return
        if self.submitted:
            self._client.tell(Cancel(client_id=self.client_id))
        else:
            self._ended(Finished(client_id=self.client_id, request=b"", reason="cancelled"))

    def _ended(self, end: Finished | Exception) -> None:
        if self._end is None:
            self._end = end
            self._client.forget(self)
            self._news.set()


def generate_message(
    client_id: str,
    prompt: Prompt,
    model: str,
    sampling: Sampling,
    deadline_ms: int,
    credit: int,
    traceparent: str = "",
) -> Generate:
    """Raises RequestError, naming the parameter, for what no node would take."""
    text = messages = tokens = tools = None
    if isinstance(prompt, Conversation):
        messages, tools = _maps(prompt.messages, "messages"), _maps(prompt.tools, "tools") or None
    elif isinstance(prompt, str):
        text = prompt
    elif _is_conversation(prompt):
        messages = tuple(dict(item) for item in prompt if isinstance(item, Mapping))
    else:
        tokens = _token_bytes(prompt)
    return _checked(
        Generate(
            client_id=client_id,
            model=model,
            text=text,
            messages=messages,
            tokens=tokens,
            tools=tools,
            sampling=sampling,
            deadline_ms=deadline_ms,
            credit=credit,
            traceparent=traceparent,
        )
    )


def _maps(values: Any, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(values, Sequence) or not all(isinstance(value, Mapping) for value in values):
        raise RequestError(f"{name}: must be a list of maps, as OpenAI's API has them", param=name)
    return tuple(map(dict, values))


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _token_bytes(prompt: Any) -> bytes:
    try:
        if isinstance(prompt, bytes | bytearray | memoryview | Mapping):
            raise TypeError("no list")
        if bool in set(map(type, prompt)):
            raise TypeError("true and false are no ids")
        return wire.pack_u32(prompt)
    except (TypeError, OverflowError):
        problem = "the prompt must be text, a list of chat messages, or a list of token ids from 0 to 4294967295"
        raise RequestError(problem, param="prompt") from None


def _checked(message: Generate) -> Generate:
    """As the node will read it: types, text that is UTF-8, numbers and sizes that fit. The caller is told, no node."""
    try:
        encoded = wire.encode(message)
        wire.decode(encoded, Generate)
    except RemoteProtocolError as e:
        name = e.field.removeprefix("sampling.")
        raise RequestError(f"{name}: {str(e).partition(' - at ')[0]}", param=name) from None
    except UNENCODABLE:
        raise _unencodable(message) from None
    if len(encoded) > REQUEST_BYTES_MAX:
        problem = f"prompt: the request has {len(encoded)} bytes, at most {REQUEST_BYTES_MAX} can be sent"
        raise RequestError(problem, param="prompt", code="too_large", status=413)
    return message


def _unencodable(message: Generate) -> RequestError:
    """Names the first field that has no place in a message."""
    for owner in (message.sampling, message):
        for name in getattr(owner, "__struct_fields__", ()):
            try:
                wire.encode(getattr(owner, name))
            except UNENCODABLE as e:
                problem = "half of a surrogate pair is no text" if isinstance(e, UnicodeEncodeError) else str(e)
                param = "prompt" if name in ("text", "tokens") else name
                return RequestError(f"{param}: {problem}", param=param)
    return RequestError("prompt: cannot be sent", param="prompt")


def sampling_of(sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """Sampling as given, or made of keyword options. Raises RequestError for an option that there is not."""
    if sampling is not None:
        if options:
            raise RequestError("give sampling, or its fields as options, not both", param="sampling")
        return sampling
    unknown = sorted(set(options) - set(Sampling.__struct_fields__))
    if unknown:
        raise RequestError(
            f"{unknown[0]}: no such option; there are {', '.join(Sampling.__struct_fields__)}", param=unknown[0]
        )
    return Sampling(**options)


def listed(values: Any, name: str) -> tuple[str, ...]:
    """A list of texts. Raises RequestError naming the parameter `name`: one text would be taken for its letters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name}: give a list of texts, got {values!r:.80}", param=name)
    given = tuple(values)
    for value in given:
        if not isinstance(value, str):
            raise RequestError(f"{name}: {value!r:.80} is no text", param=name)
    return given
