"""Both halves of a hand-off with blocks of any two sizes: every missing token is read once, from where it was written.

The real machines talk to each other; what D posts is carried out token by token on two small memories.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from pdbus.bus.messages import PrefillRequest, Sampling
from pdbus.connector.fetch import Fetches
from pdbus.connector.handoff import (
    Answer,
    Ask,
    ChunkComputed,
    FetchAsked,
    Fetched,
    HandoffConfig,
    Holder,
    OwnerSaid,
    PostRead,
    PrefillAsked,
    ReadDone,
    ReaderSaid,
    Say,
)
from pdbus.connector.offer import Offers
from pdbus.connector.pool import BlockPool

sizes = st.sampled_from((1, 2, 3, 4, 8, 12, 16))


class Pair:
    """P and D, each with a memory of tokens. P's holds the prompt's positions once they are computed."""

    def __init__(self, source_size: int, target_size: int, prompt: int, have: int) -> None:
        self.prompt, self.have = prompt, have
        self.sizes = source_size, target_size
        self.pools = BlockPool(64, source_size), BlockPool(64, target_size)
        self.pools[0].take(3, Holder.HELD)  # so that ids differ on both sides
        self.offers = Offers("p", b"p", 1, self.pools[0], HandoffConfig())
        self.fetches = Fetches("d", b"d", self.pools[1], HandoffConfig())
        self.there: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self.reads: list[PostRead] = []
        self.fetched = False

    def run(self, chunks: list[int]) -> None:
        blocks = self.pools[1].take(-(-self.prompt // self.sizes[1]), Holder.HELD)
        assert blocks is not None
        self.table = blocks
        for position in range(self.have):
            self.here[self.place(1, blocks, position)] = position
        asked = FetchAsked(
            request=b"r", attempt=1, node="p", incarnation=b"p", epoch=1, link="l", source_size=self.sizes[0],
            prompt_tokens=self.prompt, have=self.have, prompt_digest=b"x", sampling=Sampling(), blocks=blocks,
            deadline_ns=1 << 50,
        )  # fmt: skip
        self.d_decides(self.fetches.handle(asked, 0))
        for ready in chunks:
            self.compute(ready)

    def compute(self, ready: int) -> None:
        (row,) = self.offers._offers.values()
        for position in range(ready):
            self.there[self.place(0, row.blocks, position)] = position
        event = ChunkComputed(try_=row.try_, ready=ready, last=ready == self.prompt)
        self.p_decides(self.offers.handle(event, 0))

    def place(self, side: int, table: tuple[int, ...], position: int) -> int:
        size = self.sizes[side]
        return table[position // size] * size + position % size

    def p_decides(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Answer):
                said = OwnerSaid(link="l", node="p", incarnation=b"p", message=effect.message)
                self.d_decides(self.fetches.handle(said, 0))

    def d_decides(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Ask(message=PrefillRequest() as message):
                    self.p_decides(self.offers.handle(PrefillAsked(link="l", message=message, block_hashes=()), 0))
                case Say(message=message):
                    said = ReaderSaid(link="l", node="d", incarnation=b"d", to_inc=b"p", message=message)
                    self.p_decides(self.offers.handle(said, 0))
                case PostRead():
                    self.read(effect)
                case Fetched():
                    self.fetched = True

    def read(self, read: PostRead) -> None:
        self.reads.append(read)
        size = self.sizes
        for position in range(read.begin, read.end):
            there = read.source[position // size[0] - read.begin // size[0]] * size[0] + position % size[0]
            here = read.target[position // size[1] - read.begin // size[1]] * size[1] + position % size[1]
            assert here not in self.here, "a token's place is written twice"
            self.here[here] = self.there[there]
        assert len(read.source) == -(-read.end // size[0]) - read.begin // size[0]
        assert len(read.target) == -(-read.end // size[1]) - read.begin // size[1]
        self.d_decides(self.fetches.handle(ReadDone(read=read.read), 0))


@given(sizes, sizes, st.integers(1, 60), st.data())
def test_every_missing_token_is_read_once_from_its_place(
    source_size: int, target_size: int, prompt: int, data: st.DataObject
) -> None:
    have = target_size * data.draw(st.integers(0, prompt // target_size), label="blocks here")
    chunks = sorted(data.draw(st.sets(st.integers(1, prompt), max_size=6), label="chunks") | {prompt})
    pair = Pair(source_size, target_size, prompt, have)
    pair.run(chunks)
    assert pair.fetched
    assert [pair.here[pair.place(1, pair.table, position)] for position in range(prompt)] == list(range(prompt))
    written = [block for read in pair.reads for block in read.target]
    assert len(set(written)) == len(written), "one of our blocks is written by two reads"
    assert pair.offers.held() == 0 and pair.pools[0].counts().in_use == 3


def test_the_last_announcement_alone_is_enough() -> None:
    """Progress may be lost."""
    pair = Pair(4, 8, 21, 8)
    pair.run([21])
    assert [(read.begin, read.end) for read in pair.reads] == [(8, 21)]
