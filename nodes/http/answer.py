"""A request's answer in OpenAI's words: whole, or as the chunks of a stream.

Beyond OpenAI: `pd_timeline` in the whole answer, of several choices in each, or in the chunk that carries finish_reason
(where the time went, milliseconds and bytes), and `token_ids` in each choice when return_token_ids asks for them. The
id ends in the decode node's request id, that of the first choice, so that a recording can be asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pdbus.bus import wire
from pdbus.bus.messages import Finished, Timeline, Token, TokenLogprob
from pdbus.bus.wire import replace

from .echo import LOGPROB_MIN, Echo, named
from .schema import Asked
from .tools import Called, reader_of


class Answer:
    """Builds the objects of one answer's choice. `Chat` and `Completion` say what differs between the two APIs."""

    OPERATION: ClassVar[str]  # as traces call it
    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, asked: Asked, model: str, created_s: int, index: int = 0) -> None:
        self._asked = asked
        self._model = model
        self._created_s = created_s
        self._index = index

    def opening(self, request: bytes) -> list[dict[str, Any]]:
        """Chunks that come before the first token's."""
        return []

    def chunk(self, request: bytes, token: Token) -> dict[str, Any]:
        return self._chunk(request, self._choice(self._delta(token.text), [token], None))

    def closing(self, request: bytes, finished: Finished) -> dict[str, Any]:
        """The chunk that comes after the last token's: why it ended."""
        said = self._last_delta()
        end = self._chunk(request, self._choice(said, [], self._reason(finished.reason)))
        return {**end, "pd_timeline": timeline(finished.timeline)}

    def counted(self, request: bytes, used: dict[str, Any]) -> dict[str, Any]:
        """The chunk that comes last of all, where usage is asked for."""
        return {**self._chunk(request), "usage": used}

    def choice(self, tokens: Sequence[Token], finished: Finished) -> dict[str, Any]:
        """All of it."""
        said = self._whole_text("".join(token.text for token in tokens))
        return self._choice(said, tokens, self._reason(finished.reason))

    def whole(self, choices: Sequence[dict[str, Any]], ends: Sequence[Finished], n: int) -> dict[str, Any]:
        """The answer of all choices; they ended as `ends` says, `n` to each prompt."""
        head, times = self._head(ends[0].request, self.WHOLE), [timeline(end.timeline) for end in ends]
        if len(choices) == 1:
            return {**head, "choices": list(choices), "usage": usage(ends, n), "pd_timeline": times[0]}
        timed = [{**choice, "pd_timeline": each} for choice, each in zip(choices, times, strict=True)]
        return {**head, "choices": timed, "usage": usage(ends, n)}

    def _head(self, request: bytes, kind: str) -> dict[str, Any]:
        identity = f"{self.PREFIX}-{request.hex()}"
        return {"id": identity, "object": kind, "created": self._created_s, "model": self._model}

    def _chunk(self, request: bytes, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(request, self.CHUNK), "choices": list(choices)}
        return {**chunk, "usage": None} if self._asked.include_usage else chunk

    def _choice(self, said: dict[str, Any], tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        wanted = self._asked.sampling.logprobs is not None and tokens
        logprobs = self._logprobs(tokens) if wanted else None
        choice = {"index": self._index, **said, "logprobs": logprobs, "finish_reason": reason}
        if self._asked.return_token_ids:
            choice["token_ids"] = [i for token in tokens for i in wire.unpack_u32(token.tokens)]
        return choice

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _last_delta(self) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        raise NotImplementedError

    def _reason(self, reason: str) -> str:
        return reason


class Completion(Answer):
    OPERATION = "text_completion"
    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, model: str, created_s: int, index: int = 0) -> None:
        super().__init__(asked, model, created_s, index)
        self._offset = 0  # characters of the answer before the message at hand
        self._echo = Echo(asked.prompts[index // asked.n]) if asked.echo else None

    def _choice(self, said: dict[str, Any], tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        if not self._asked.answers:
            said = {"text": ""}
            tokens = [replace(token, tokens=b"", text="", logprobs=(), pieces=()) for token in tokens]
        if self._echo is not None and self._offset == 0:
            text = self._echo.text(tokens)
            said, self._offset = {"text": text + said["text"]}, len(text)
        return super()._choice(said, tokens, reason)

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _last_delta(self) -> dict[str, Any]:
        return {"text": ""}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = [entry for token in tokens for entry in scored(token)]
        answer = {
            "tokens": [entry[0]["token"] for entry in entries],
            "token_logprobs": [entry[0]["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry[1:]} for entry in entries],
            "text_offset": [offset for token in tokens for offset in self._offsets(token)],
        }
        prompt = self._echo.logprobs(tokens) if self._echo is not None else {}
        return {key: [*prompt.get(key, ()), *values] for key, values in answer.items()}

    def _offsets(self, token: Token) -> list[int]:
        """Tokens whose text comes in one message start where it starts."""
        offset, self._offset = self._offset, self._offset + len(token.text)
        return [offset] * len(token.logprobs)


class Chat(Answer):
    OPERATION = "chat"
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, model: str, created_s: int, index: int = 0) -> None:
        super().__init__(asked, model, created_s, index)
        self._reader = reader_of(asked.tools) if asked.tools else None

    def opening(self, request: bytes) -> list[dict[str, Any]]:
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(request, self._choice(said, [], None))]

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if self._reader is None else _delta_of(self._reader.add(text))}

    def _last_delta(self) -> dict[str, Any]:
        return {"delta": {} if self._reader is None else _delta_of(self._reader.finish())}

    def _whole_text(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._reader is None:
            return {"message": message}
        parts = (self._reader.add(text), self._reader.finish())
        text, calls = "".join(part.text for part in parts), [_called(call) for part in parts for call in part.calls]
        said = {"content": text or None, "tool_calls": calls} if calls else {"content": text}
        return {"message": {**message, **said}}

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._reader is not None and self._reader.calls else reason

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = [entry for token in tokens for entry in scored(token)]
        return {"content": [{**entry[0], "top_logprobs": entry[1:]} for entry in entries], "refusal": None}


def _delta_of(said: Called) -> dict[str, Any]:
    text = {"content": said.text} if said.text else {}
    return {**text, "tool_calls": list(said.calls)} if said.calls else text


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """Without its place, which only a stream needs."""
    return {key: value for key, value in call.items() if key != "index"}


def scored(token: Token) -> list[list[dict[str, Any]]]:
    """Per token of the message: {token, logprob, bytes} of the chosen one, then of its alternatives, best first."""
    entries = []
    for i, (chosen, logprob) in enumerate(zip(wire.unpack_u32(token.tokens), token.logprobs, strict=False)):
        pieces = token.pieces[i] if i < len(token.pieces) else ()
        entries.append(_scored_one(chosen, logprob, pieces))
    return entries


def _scored_one(chosen: int, logprob: TokenLogprob, pieces: Sequence[bytes]) -> list[dict[str, Any]]:
    candidates = [(chosen, logprob.logprob), *logprob.top]
    known: list[bytes | None] = [*pieces, *[None] * (len(candidates) - len(pieces))]
    return [
        {"token": named(token, piece), "logprob": max(score, LOGPROB_MIN), "bytes": None if piece is None else [*piece]}
        for (token, score), piece in zip(candidates, known, strict=False)
    ]


def usage(ends: Sequence[Finished], n: int) -> dict[str, Any]:
    """Of all choices together. A prompt counts once, however many answers it has: `n`, next to each other."""
    prompt = sum(end.prompt_tokens for end in ends[::n])
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends[::n])},
    }


def timeline(times: Timeline) -> dict[str, Any]:
    """Every field of `Timeline` under its own name; the `_ns` ones as `_ms`."""
    plain: dict[str, Any] = wire.to_plain(times)
    return dict(_in_ms(name, value) for name, value in plain.items())


def _in_ms(name: str, value: Any) -> tuple[str, Any]:
    return (name.removesuffix("_ns") + "_ms", value / 1e6) if name.endswith("_ns") else (name, value)
