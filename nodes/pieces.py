"""The bytes that a token stands for, which may be part of a character: what OpenAI's `bytes` beside a logprob are."""

from __future__ import annotations

import json
import re
from typing import Any

SPACE_MARK = "\u2581"  # SentencePiece's sign for a space
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of_sign() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one printable character: itself where it is one in Latin-1, the others
    in order from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    signs = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in signs)
    return signs | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class Pieces:
    """Of one tokenizer of the package tokenizers. Special and added tokens stand for their own names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = _kinds(tokenizer.decoder)
        self._signs = byte_of_sign() if "ByteLevel" in kinds else {}
        self._marks_spaces = bool({"Metaspace", "Replace"} & set(kinds))
        self._has_bytes = "ByteFallback" in kinds

    def of(self, token: int) -> bytes:
        """Empty for an id that no token has."""
        if token in self._added:
            return str(self._added[token]).encode()
        text: str = self._tokenizer.id_to_token(token) or ""
        if self._signs:
            return b"".join(bytes((self._signs[c],)) if c in self._signs else c.encode() for c in text)
        if self._has_bytes and (byte := _BYTE.fullmatch(text)):
            return bytes((int(byte[1], 16),))
        return (text.replace(SPACE_MARK, " ") if self._marks_spaces else text).encode()


def _kinds(decoder: Any) -> list[str]:
    """The types of the steps that a decoder is made of."""
    if decoder is None:
        return []
    spec = json.loads(decoder.__getstate__())
    return [step.get("type", "") for step in spec.get("decoders", [spec])]
