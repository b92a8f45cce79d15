"""A request's answer in OpenAI's words: whole, or as the chunks of a stream.

Beyond OpenAI: `pd_timeline` in the whole answer, or in the chunk that carries finish_reason (where the request's time
went, milliseconds and bytes), and `token_ids` in each choice when return_token_ids asks for them. The id ends in the
decode node's request id, so that a recording can be asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pdbus.bus import wire
from pdbus.bus.messages import Finished, Timeline, Token, TokenLogprob

from .schema import Asked

LOGPROB_MIN = -9999.0  # JSON has no minus infinity; OpenAI writes this


class Answer:
    """Builds the objects of one answer. `Chat` and `Completion` say what differs between the two APIs."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, asked: Asked, model: str, created_s: int) -> None:
        self._asked = asked
        self._model = model
        self._created_s = created_s

    def opening(self, request: bytes) -> list[dict[str, Any]]:
        """Chunks that come before the first token's."""
        return []

    def chunk(self, token: Token) -> dict[str, Any]:
        return self._chunk(token.request, self._choice(self._delta(token.text), [token], None))

    def closing(self, finished: Finished) -> list[dict[str, Any]]:
        """Chunks that come after the last token's: why it ended, and the usage when that was asked for."""
        end = self._chunk(finished.request, self._choice(self._last_delta(), [], finished.reason))
        end["pd_timeline"] = timeline(finished.timeline)
        if not self._asked.include_usage:
            return [end]
        return [end, {**self._chunk(finished.request), "usage": usage(finished)}]

    def whole(self, tokens: Sequence[Token], finished: Finished) -> dict[str, Any]:
        text = "".join(token.text for token in tokens)
        return {
            **self._head(finished.request, self.WHOLE),
            "choices": [self._choice(self._whole_text(text), tokens, finished.reason)],
            "usage": usage(finished),
            "pd_timeline": timeline(finished.timeline),
        }

    def _head(self, request: bytes, kind: str) -> dict[str, Any]:
        identity = f"{self.PREFIX}-{request.hex()}"
        return {"id": identity, "object": kind, "created": self._created_s, "model": self._model}

    def _chunk(self, request: bytes, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(request, self.CHUNK), "choices": list(choices)}
        return {**chunk, "usage": None} if self._asked.include_usage else chunk

    def _choice(self, said: dict[str, Any], tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        wanted = self._asked.sampling.logprobs is not None and tokens
        logprobs = self._logprobs(tokens) if wanted else None
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}
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


class Completion(Answer):
    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, model: str, created_s: int) -> None:
        super().__init__(asked, model, created_s)
        self._offset = 0  # characters of the answer before the message at hand

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _last_delta(self) -> dict[str, Any]:
        return {"text": ""}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = [entry for token in tokens for entry in scored(token)]
        return {
            "tokens": [entry[0]["token"] for entry in entries],
            "token_logprobs": [entry[0]["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry[1:]} for entry in entries],
            "text_offset": [offset for token in tokens for offset in self._offsets(token)],
        }

    def _offsets(self, token: Token) -> list[int]:
        """Tokens whose text comes in one message start where it starts."""
        offset, self._offset = self._offset, self._offset + len(token.text)
        return [offset] * len(token.logprobs)


class Chat(Answer):
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, request: bytes) -> list[dict[str, Any]]:
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(request, self._choice(said, [], None))]

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _last_delta(self) -> dict[str, Any]:
        return {"delta": {}}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = [entry for token in tokens for entry in scored(token)]
        return {"content": [{**entry[0], "top_logprobs": entry[1:]} for entry in entries], "refusal": None}


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
        {"token": _name(token, piece), "logprob": max(score, LOGPROB_MIN), "bytes": None if piece is None else [*piece]}
        for (token, score), piece in zip(candidates, known, strict=False)
    ]


def _name(token: int, piece: bytes | None) -> str:
    """A token's text, or its id where the node did not say its text."""
    return f"token_id:{token}" if piece is None else piece.decode(errors="replace")


def usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def timeline(times: Timeline) -> dict[str, Any]:
    """Every field of `Timeline` under its own name; the `_ns` ones as `_ms`."""
    plain: dict[str, Any] = wire.to_plain(times)
    return dict(_in_ms(name, value) for name, value in plain.items())


def _in_ms(name: str, value: Any) -> tuple[str, Any]:
    return (name.removesuffix("_ns") + "_ms", value / 1e6) if name.endswith("_ns") else (name, value)
