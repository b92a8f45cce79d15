"""A completion's prompt at the head of its answer, with what the model made of its tokens if that was asked for."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pdbus.bus import wire
from pdbus.bus.messages import Token

LOGPROB_MIN = -9999.0  # JSON has no minus infinity; OpenAI writes this


def named(token: int, piece: bytes | None) -> str:
    """A token's text, or its id where the node did not say its text."""
    return f"token_id:{token}" if piece is None else piece.decode(errors="replace")


class Echo:
    """Of one prompt, text or token ids. The node says with an answer's first message what the ids stand for."""

    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def text(self, tokens: Sequence[Token]) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return b"".join(pieces[0] for token in tokens for pieces in token.prompt_pieces).decode(errors="replace")

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """As OpenAI lists them; nothing comes before the first token, so it has none."""
        first = next((token for token in tokens if token.prompt), None)
        if first is None:
            return {}
        ids, pieces = wire.unpack_u32(first.prompt), first.prompt_pieces
        scores: list[Any] = [None]
        tops: list[Any] = [None]
        for one, (_, *others) in zip(first.prompt_logprobs, pieces[1:], strict=False):
            scores.append(max(one.logprob, LOGPROB_MIN))
            names = [named(token, piece) for (token, _), piece in zip(one.top, others, strict=True)]
            tops.append(dict(zip(names, [max(score, LOGPROB_MIN) for _, score in one.top], strict=True)))
        return {
            "tokens": [named(token, piece[0]) for token, piece in zip(ids, pieces, strict=True)],
            "token_logprobs": scores,
            "top_logprobs": tops,
            "text_offset": self._offsets([piece[0] for piece in pieces]),
        }

    def _offsets(self, pieces: Sequence[bytes]) -> list[int]:
        """In the prompt's text. Tokens that a tokenizer puts before it stand at its beginning."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        starts, at = [], 0
        for piece in pieces:
            starts.append(at)
            at += len(decoder.decode(piece))
        before = max(0, at - len(self._prompt)) if isinstance(self._prompt, str) else 0
        return [max(0, start - before) for start in starts]
