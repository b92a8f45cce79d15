"""Digests that both halves of a hand-off, and every prefix cache, compute alike."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from .wire import pack_u32


def digest(data: bytes | memoryview) -> bytes:
    """xxh3_128 of `data`, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def prompt_digest(tokens_u32: bytes) -> bytes:
    """xxh3_128 of a prompt's token ids as little-endian u32: tells whether a repeated try has the same prompt."""
    return digest(tokens_u32)


def block_hashes(tokens: Sequence[int] | bytes, block_size: int) -> tuple[bytes, ...]:
    """One hash for each full block: xxh3_128 of the parent's hash (none before the first) and the block's ids.

    `tokens` are ids, or little-endian u32 bytes. A hash stands for the whole prefix up to the block's end.
    """
    packed = tokens if isinstance(tokens, bytes) else pack_u32(tokens)
    width = 4 * block_size
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(packed) - width + 1, width):
        parent = digest(parent + packed[start : start + width])
        hashes.append(parent)
    return tuple(hashes)
