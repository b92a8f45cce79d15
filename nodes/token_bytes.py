"""How much text one token can stand for at most, so that a prompt that cannot fit is refused before it is tokenized."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .pieces import byte_of_sign

# Steps that keep every character, by how many bytes of text may become one: composing takes up to three characters of
# three bytes (Hangul) or four of two (Greek) to one of three; the rest never makes text shorter.
NORMALIZERS = {"Prepend": 1, "Replace": 1, "NFC": 4}
PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


class TokenBytes(NamedTuple):
    """`longest`: bytes of UTF-8 that one token covers at most; 0 when there is no such limit, or when it is not known.
    `dropped`: bytes that have no token, and so count for none."""

    longest: int
    dropped: bytes = b""

    def tokens_min(self, text: bytes) -> int:
        """Certainly no fewer tokens."""
        return -(-len(text.translate(None, self.dropped)) // self.longest) if self.longest else 0


UNKNOWN = TokenBytes(0)


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Of a tokenizer of the package tokenizers. Unknown where a step may drop text, a token takes any number of blanks
    beside it, or many characters without a token make one."""
    spec = json.loads(tokenizer.to_str())
    added = spec.get("added_tokens") or []
    shrink = _shrink(spec.get("normalizer"))
    steps = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    kept = all(s.get("type") in PRE_TOKENIZERS and s.get("behavior") != "Removed" for s in steps)
    model = spec.get("model") or {}
    vocabulary = model.get("vocab") if model.get("type") == "BPE" else None
    greedy = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if greedy or not shrink or not kept or not isinstance(vocabulary, dict):
        return UNKNOWN
    by_signs = any(step.get("type") == "ByteLevel" for step in steps)
    dropped = bytes(byte for sign, byte in byte_of_sign().items() if sign not in vocabulary) if by_signs else b""
    if (dropped and shrink > 1) or not (by_signs or (model.get("byte_fallback") and vocabulary.keys() >= BYTES)):
        return UNKNOWN
    pieces = [len(text) if by_signs else len(text.encode()) for text in vocabulary]
    return TokenBytes(shrink * max(*pieces, *(len(token["content"].encode()) for token in added), 1), dropped)


def _shrink(normalizer: Any) -> int:
    """By how much it may shorten text at most; 0 for not known."""
    shrink = 1
    for step in _steps(normalizer, "normalizers"):
        shorter = step.get("type") == "Replace" and not _lengthens(step)
        shrink *= 0 if shorter else NORMALIZERS.get(step.get("type", ""), 0)
    return shrink


def _lengthens(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return isinstance(pattern, str) and len(step.get("content", "").encode()) >= len(pattern.encode())


def _steps(spec: Any, parts: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    steps: list[dict[str, Any]] = spec.get(parts, []) if spec.get("type") == "Sequence" else [spec]
    return steps
