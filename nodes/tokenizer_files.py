"""A node's tokenizer as it travels over the bus, and what is made of it at the other end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, RequestError
from pdbus.bus.hashing import digest
from pdbus.bus.messages import FetchTokenizerReply
from pdbus.bus.wire import pack_foreign, unpack_foreign

from .tokenizer import FILES, ByteTokenizer, HFTokenizer, Tokenizer

PART_BYTES = 4 << 20  # a quarter of the largest message: tokens of others go between the parts
PARTS_MAX = 64  # 256 MiB; the largest known are some 30 MB


def tokenizer_part(folder: str, vocab_size: int, part: int) -> FetchTokenizerReply:
    """One part of the tokenizer of a model's folder; '' is the byte tokenizer's. Raises RequestError (`part`); Broken
    where the folder cannot be read any more."""
    if not folder:
        return FetchTokenizerReply(tokenizer="bytes", vocab_size=vocab_size)
    try:
        found = {name: (Path(folder) / name).read_bytes() for name in FILES if (Path(folder) / name).is_file()}
    except OSError as e:
        raise Broken(f"its tokenizer cannot be read: {e.strerror}") from None
    packed = pack_foreign(found)
    parts = -(-len(packed) // PART_BYTES)
    if not 0 <= part < parts:
        raise RequestError(f"part: there are {parts} from 0, got {part}", param="part")
    data = packed[part * PART_BYTES : (part + 1) * PART_BYTES]
    return FetchTokenizerReply(tokenizer="hf", vocab_size=vocab_size, digest=digest(packed), parts=parts, data=data)


async def fetch_tokenizer(client: Client) -> Tokenizer:
    """The tokenizer of the node at the other end. Raises Broken for one that cannot be used here."""
    first = await client.tokenizer()
    if first.tokenizer == "bytes":
        return ByteTokenizer(first.vocab_size)
    if first.tokenizer != "hf" or not 1 <= first.parts <= PARTS_MAX:
        raise Broken(f"its tokenizer is of a kind that is not known here: {first.tokenizer!r:.40}")
    packed = bytearray(first.data)
    for part in range(1, first.parts):
        packed += (await client.tokenizer(part)).data
    if digest(bytes(packed)) != first.digest:
        raise Broken("its tokenizer did not come over whole")
    return _loaded(bytes(packed))


def _loaded(packed: bytes) -> Tokenizer:
    """Written to a folder for as long as it takes to read it."""
    files = unpack_foreign(packed, PARTS_MAX * PART_BYTES)
    with tempfile.TemporaryDirectory(prefix="pd-tokenizer-") as folder:
        for name in FILES:
            if isinstance(files.get(name), bytes):
                (Path(folder) / name).write_bytes(files[name])
        return HFTokenizer(folder)
