"""What each node has cached of a prompt: prompts are tokenized and hashed here as the nodes do it, and compared with
what the nodes publish. Where something is missing (a tokenizer, a node's events) a match is just not found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from pdbus.bus.errors import PdError
from pdbus.bus.generation import Conversation, Prompt
from pdbus.bus.hashing import block_hashes
from pdbus.bus.messages import Generate
from pdbus.bus.subscription import Subscription
from pdbus.bus.wire import pack_u32
from pdbus.nodes.prompt_reader import PromptReader
from pdbus.nodes.tokenizer_files import fetch_tokenizer

from .fleet_node import FleetNode
from .prefix_index import PrefixIndex

RETRY_S = 1.0
PREFIX_TOKENS_MAX = 65_536  # that are compared; hashing them takes 5 ms, in which nothing else is done

log = logging.getLogger("pdbus.gateway")


class Read(NamedTuple):
    """A prompt as far as it is known: how many tokens it has, and the first of them as u32."""

    length: int = 0
    tokens: bytes = b""


class Prefixes:
    """Follows the caches of all nodes that it is shown."""

    def __init__(self) -> None:
        self._caches: dict[FleetNode, _Cache] = {}
        self._reader: PromptReader | None = None
        self._fetching: asyncio.Task[None] | None = None

    def looked(self, node: FleetNode) -> None:
        """This node can be asked."""
        cache = self._caches.get(node)
        if cache is None:
            cache = self._caches[node] = _Cache(node)
        cache.is_in(node.life)
        if self._reader is None and self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch(node))

    def gone(self, node: FleetNode) -> None:
        """It is not followed any more."""
        cache = self._caches.pop(node, None)
        if cache is not None:
            cache.close()

    async def read(self, prompt: Prompt) -> Read:
        """A prompt's tokens. What is wrong with it is the node's to say."""
        tools = prompt.tools if isinstance(prompt, Conversation) else ()
        prompt = prompt.messages if isinstance(prompt, Conversation) else prompt
        text = prompt if isinstance(prompt, str) else None
        messages = tuple(dict(item) for item in prompt if isinstance(item, Mapping)) if text is None else ()
        if text is None and not messages:
            return _read(cast(Sequence[int], prompt))
        if self._reader is None:
            return Read()
        asked = Generate(client_id="", text=text, messages=messages or None, tools=tuple(map(dict, tools)) or None)
        try:
            return _read(await self._reader.read(asked))
        except PdError:
            return Read()

    def matched(self, read: Read, nodes: Sequence[FleetNode]) -> list[int]:
        """How many tokens of the prompt's beginning each of the nodes has cached. The last token never counts: a node
        always computes it."""
        hashes: dict[int, tuple[bytes, ...]] = {}
        found = []
        for node in nodes:
            size = node.view().block_size
            if size not in hashes:
                hashes[size] = block_hashes(read.tokens, size)[: max(0, read.length - 1) // size]
            cache = self._caches.get(node)
            found.append(cache.index.match(hashes[size]) * size if cache else 0)
        return found

    def index(self, node: FleetNode) -> PrefixIndex:
        """What is known of a node's cache."""
        cache = self._caches.get(node)
        return cache.index if cache else PrefixIndex()

    def close(self) -> None:
        for cache in self._caches.values():
            cache.close()
        if self._fetching is not None:
            self._fetching.cancel()
        if self._reader is not None:
            self._reader.close()

    async def _fetch(self, node: FleetNode) -> None:
        try:
            tokenizer = await fetch_tokenizer(node.client)
            longest = int(node.status.get("max_model_len", 0))
            self._reader = PromptReader(tokenizer, int(node.status.get("vocab_size", 0)), longest - 1)
        except PdError as e:
            log.info("prompts are not compared with caches: the tokenizer of %s: %s", node.name, e)
            await asyncio.sleep(RETRY_S)
        finally:
            self._fetching = None


class _Cache:
    """One node's, followed from life to life."""

    def __init__(self, node: FleetNode) -> None:
        self.index = PrefixIndex()
        self._node = node
        self._life = node.life
        self._events: Subscription | None = None
        self._task = asyncio.ensure_future(self._follow())

    def is_in(self, life: tuple[str, bytes]) -> None:
        """A node that was restarted has an empty cache, and says nothing before it has something new."""
        if life != self._life:
            self._life = life
            self.index.clear()
            if self._events is not None:
                self._events.close()

    def close(self) -> None:
        self._task.cancel()
        if self._events is not None:
            self._events.close()

    async def _follow(self) -> None:
        while True:
            try:
                async with self._node.client.subscribe([f"kv@{self._node.name}"]) as self._events:
                    async for published in self._events:
                        self.index.apply(published.event, published.data)
            except PdError:
                self.index.clear()
            await asyncio.sleep(RETRY_S)


def _read(tokens: Sequence[int]) -> Read:
    return Read(len(tokens), pack_u32(tokens[:PREFIX_TOKENS_MAX]))
