"""Digests of KV are of what it is, not of how it lies; and they notice every byte."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from pdbus.bus.messages import Geometry
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import KvDigested, RowResult, StepDone, StepRow
from pdbus.connector.joins import WorkerJoin
from pdbus.connector.layout import blocks_for, geometry_for, layers_of, layout_of
from pdbus.nodes.digests import KvDigests
from pdbus.nodes.engines.coded import coded_cells
from pdbus.nodes.events import CheckKv
from pdbus.nodes.kv_checks import wrong_digest

from tests.kv_memory import Bytes, write_cells

MODEL = geometry_for(3, 4, 8, 16, "float32")
TOKENS = list(range(100, 145))  # 45: two blocks of 16 and a partial one
TABLE = [5, 2, 7, 0, 3, 1]


class Rank:
    """One rank's memory with the KV of TOKENS in it."""

    def __init__(self, geometry: Geometry, rank: int = 0) -> None:
        self.layout = layout_of(geometry, 8, rank)
        self.memory: Bytes = np.full(self.layout.region_bytes, 0xEE, np.uint8)
        self.table = TABLE[: blocks_for(len(TOKENS), geometry.block_size)]
        write_cells(self.memory, self.layout, self.table, coded_cells(MODEL, TOKENS))
        self.digests = KvDigests(self.memory, self.layout)

    def of(self, begin: int = 0, end: int = len(TOKENS), size: int = 16) -> bytes:
        first = begin // self.layout.block_size
        return self.digests.of(self.table[first:], begin, end, size)


def joined(geometry: Geometry, **span: int) -> bytes:
    """All ranks'."""
    copies = max(1, geometry.tp // geometry.kv_heads)
    join = WorkerJoin(geometry.tp, copies)
    said = [join.hear(r, KvDigested(check=1, digests=Rank(geometry, r).of(**span))) for r in range(geometry.tp)]
    ((digested,),) = [words for words in said if words]
    assert isinstance(digested, KvDigested)
    return digested.digests


def test_a_digest_is_the_exclusive_or_of_its_heads() -> None:
    """By the protocol's words, for one block and layer."""
    cells = coded_cells(MODEL, TOKENS)[16:32, 1]
    wanted = 0
    for part, head in np.ndindex(2, 4):
        wanted ^= xxhash.xxh3_64_intdigest(cells[:, part, head].tobytes(), seed=2 * head + part)
    at = 8 * (1 * 3 + 1)
    assert Rank(MODEL).of()[at : at + 8] == wanted.to_bytes(8, "little")


@pytest.mark.parametrize("order", ["native", "NHD", "HND"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("span", [{}, {"begin": 16}, {"begin": 8}, {"begin": 40, "end": 45}, {"size": 32}])
def test_how_kv_lies_does_not_matter(order: str, block_size: int, tp: int, span: dict[str, int]) -> None:
    geometry = replace(MODEL, layout=order, block_size=block_size, tp=tp)
    assert joined(geometry, **span) == Rank(MODEL).of(**span)


def test_every_layer_of_every_block_has_its_own() -> None:
    digests = Rank(MODEL).of()
    eights = [digests[at : at + 8] for at in range(0, len(digests), 8)]
    assert len(eights) == 3 * 3 and len(set(eights)) == 9


@pytest.mark.parametrize("token", [0, 15, 16, 44])
def test_one_flipped_bit_is_named_by_block_and_layer(token: int) -> None:
    rank = Rank(MODEL)
    check = CheckKv(
        request=b"", attempt=1, node="p", blocks=tuple(rank.table), begin=0, end=45, size=16, digests=rank.of()
    )  # fmt: skip
    layout = rank.layout
    at = layout.starts[2] + rank.table[token // 16] * layout.block_stride + token % 16 * layout.slot_stride
    assert wrong_digest(check, rank.of(), 3) == ""
    rank.memory[at] ^= 1
    block = token // 16
    last = min(16 * block + 15, 44)
    problem = f"block {block} (tokens {16 * block} to {last}) layer 2 is not what p computed"
    assert wrong_digest(check, rank.of(), 3) == problem


def test_a_copy_of_a_head_that_differs_is_noticed() -> None:
    """Eight ranks hold four heads: each reads its own copy."""
    geometry = replace(MODEL, tp=8)
    ranks = [Rank(geometry, rank) for rank in range(8)]
    ranks[5].memory[ranks[5].table[1] * ranks[5].layout.block_stride] ^= 1
    join, said = WorkerJoin(8, 2), []
    for rank in range(8):
        said += join.hear(rank, KvDigested(check=1, digests=ranks[rank].of()))
    assert said[0].digests != Rank(MODEL).of()  # type: ignore[union-attr]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 1), (2, 2), (2, 8)])
@pytest.mark.parametrize("chunks", [[45], [20, 25]])
def test_those_of_stages_with_layers_of_their_own_are_put_together_block_by_block(
    pp: int, tp: int, chunks: list[int]
) -> None:
    """Three layers in shares of 2 and 1, or of one each; with 8 ranks there are copies of the heads."""
    geometry = replace(MODEL, pp=pp, tp=tp)
    stages = [len(layers_of(3, pp, stage)) for stage in range(pp)]
    join, made, start = WorkerJoin(geometry.ranks, max(1, tp // 4), stages), b"", 0
    ranks = [Rank(geometry, rank) for rank in range(geometry.ranks)]
    for rank in ranks:
        rank.digests.open(1, 0, len(TOKENS))
    for chunk in chunks:
        row = StepRow(seq=1, start=start, count=chunk, new_blocks=b"" if start else pack_u32(ranks[0].table))
        start += chunk
        for number, rank in enumerate(ranks):
            rows = (RowResult(seq=1, digests=rank.digests.stepped([row])[1]),)
            for done in join.hear(number, StepDone(step=start, rows=rows, compute_ns=1)):
                assert isinstance(done, StepDone)
                made += done.rows[0].digests
    assert made == Rank(MODEL).of()


def test_what_stands_behind_the_prompt_does_not_matter() -> None:
    rank = Rank(MODEL)
    before = rank.of()
    rank.memory[rank.table[2] * rank.layout.block_stride + 15 * rank.layout.slot_stride] ^= 1
    assert rank.of() == before


# ---------------------------------------------------------------- chunk by chunk


@pytest.mark.parametrize("begin", [0, 16, 24])
@pytest.mark.parametrize("chunks", [[45], [16, 16, 13], [1, 14, 1, 29], [44, 1], [31, 14]])
def test_chunks_together_give_the_digests_of_the_whole(begin: int, chunks: list[int]) -> None:
    """`begin` may lie within a block: the reader's blocks are of another size."""
    rank = Rank(MODEL)
    rank.digests.open(-1, begin, len(TOKENS))
    start, made = 0, []
    for chunk in chunks:
        new = pack_u32(rank.table) if start == 0 else b""
        made.append(rank.digests.stepped([StepRow(seq=-1, start=start, count=chunk, new_blocks=new)])[-1])
        start += chunk
    assert b"".join(made) == rank.of(begin)


def test_a_cached_prefix_is_digested_with_the_first_chunk() -> None:
    rank = Rank(MODEL)
    rank.digests.open(-1, 0, len(TOKENS))
    row = StepRow(seq=-1, start=32, count=13, new_blocks=pack_u32(rank.table))
    assert rank.digests.stepped([row]) == {-1: rank.of()}


def test_sequences_that_want_none_get_none() -> None:
    rank = Rank(MODEL)
    rank.digests.open(-1, 0, len(TOKENS))
    rank.digests.close(-1)
    assert rank.digests.stepped([StepRow(seq=-1, start=0, count=16, new_blocks=pack_u32(rank.table))]) == {}
